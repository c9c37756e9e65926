"""DTensor: parallelised modules on two ranks (and one) are equal to eager, whole and in parts.

Each test starts its ranks as processes of its own, takes their findings from a queue, and kills
them if anything is late.
"""

from __future__ import annotations

import datetime
import queue
import traceback

import torch
import torch.distributed as dist
from ranks import fork_server
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of

TIMEOUT_S = 60


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 32), nn.Linear(32, 12)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tensor_parallel(mesh):
    """Column, then row parallel: one all_reduce a layer."""
    torch.manual_seed(0)
    plan = {}
    for layer in range(2):
        plan |= {f"{layer}.up": ColwiseParallel(), f"{layer}.down": RowwiseParallel()}
    return parallelize_module(nn.Sequential(Mlp(), Mlp()), mesh, plan)


def sequence_parallel(mesh):
    """The norms on pieces of the sequence: all_gather and reduce_scatter in each layer."""
    torch.manual_seed(0)
    plan = {
        "0": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "1": PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),)),
    }
    for layer in range(2):
        plan |= {
            f"{layer}.norm": SequenceParallel(),
            f"{layer}.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            f"{layer}.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
    return parallelize_module(nn.Sequential(Mlp(), Mlp()), mesh, plan)


def gradients(model, x):
    for weight in model.parameters():
        weight.grad = None
    output = model(x)
    output.square().mean().backward()
    found = [weight.grad for weight in model.parameters()]
    return [output, *(g.full_tensor() if isinstance(g, DTensor) else g for g in found)]


def facts(model):
    """What the ops of each graph are, as plain text that a queue can carry."""
    return [
        (piece.graph.name, piece.graph.level, [
            (op.rows, op.two_phase, op.collective.kind if op.collective else "")
            for op in piece.graph.ops
        ])
        for piece in session_of(model).pieces
    ]  # fmt: skip


def look(build, mesh, *, training):
    """Everything that one rank finds out, by strategy: (largest difference, graphs, fallbacks)."""
    plain, found = build(mesh), {}
    batches = [torch.randn(rows, 6, 12) for rows in ((8, 7) if mesh.size() == 1 else (8, 12))]
    for name, strategy in (("sequential", "sequential"), ("parts", weft.overlap(parts=2))):
        torch._dynamo.reset()
        model = weft.compile(build(mesh), strategy)
        pairs = []
        for x in batches:
            if training:
                pairs += zip(gradients(model, x), gradients(plain, x), strict=True)
            else:
                with torch.no_grad():
                    pairs.append((model(x), plain(x)))
        worst = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
        session = session_of(model)
        assert not session.num_uncaptured
        found[name] = (worst, facts(model), dict(session.fallbacks))
    return found


def work(rank, world, path, build, training, results):
    try:
        torch.set_num_threads(1)
        limit = datetime.timedelta(seconds=TIMEOUT_S)
        store = dist.FileStore(path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        torch.manual_seed(1)
        found = look(build, init_device_mesh("cpu", (world,)), training=training)
        dist.barrier()  # a gloo rank that leaves while its peer still talks aborts one of them
        results.put((rank, found, ""))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def on_ranks(world, path, build, *, training):
    """Run `look` on every rank; what each found. No process outlives this."""
    context = fork_server()
    results = context.Queue()
    processes = [
        context.Process(target=work, args=(r, world, path, build, training, results), daemon=True)
        for r in range(world)
    ]
    try:
        for process in processes:
            process.start()
        found = {}
        for _ in processes:
            rank, facts, error = results.get(timeout=2 * TIMEOUT_S)
            assert not error, f"rank {rank}: {error}"
            found[rank] = facts
        for process in processes:
            process.join(timeout=10)
        return found
    except queue.Empty:
        raise AssertionError("the ranks did not answer in time") from None
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def check_ranks(found):
    """Equal on every rank, and no call fell back."""
    for rank in found:
        assert found[rank]["sequential"][0] == 0.0
        assert found[rank]["sequential"][2] == {}
        worst, graphs, fallbacks = found[rank]["parts"]
        assert worst < 1e-5
        assert fallbacks == {}
        assert {level for _, level, _ in graphs} == {"aten"}
    return [op for _, _, ops in found[0]["parts"][1] for op in ops]


def test_tensor_parallel_layers_on_two_ranks(tmp_path):
    ops = check_ranks(on_ranks(2, str(tmp_path / "store"), tensor_parallel, training=True))
    talks = [op for op in ops if op[2]]
    assert set(talks) == {("row-wise", True, "all_reduce")}
    assert any(op[0] == "additive" for op in ops)


def test_sequence_parallel_layers_on_two_ranks(tmp_path):
    ops = check_ranks(on_ranks(2, str(tmp_path / "store"), sequence_parallel, training=False))
    assert {op for op in ops if op[2]} == {
        ("row-wise", True, "all_gather_into_tensor"),
        ("row-wise", True, "reduce_scatter_tensor"),
    }


def test_a_mesh_of_one_rank(tmp_path):
    ops = check_ranks(on_ranks(1, str(tmp_path / "store"), tensor_parallel, training=False))
    assert {op[0] for op in ops} <= {"row-wise", "batch-free"}
