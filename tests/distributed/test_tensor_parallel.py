"""Tensor-parallel models on two ranks: collectives of one part beside compute of another.

Transformers' own plan, `torch.distributed.tensor.parallel`, plain functional collectives, and
experts behind an all-to-all: one `weft.compile(model, strategy)` for all.
"""

from __future__ import annotations

import functools
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_overlap, run_once, talks
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import torchweft as weft
from torchweft.api import session_of

WIDE, NUM_RANKS, NUM_EXPERTS = 16, 2, 4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDE), nn.Linear(WIDE, 2 * WIDE)
        self.down = nn.Linear(2 * WIDE, WIDE, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class FunctionalMlp(Mlp):
    """Each rank has half of the columns; the sum over ranks is written out."""

    def forward(self, x):
        part = self.down(F.gelu(self.up(self.norm(x))))
        return x + funcol.all_reduce(part, "sum", dist.group.WORLD)


class InPlaceMlp(Mlp):
    def forward(self, x):
        part = self.down(F.gelu(self.up(self.norm(x))))
        dist.all_reduce(part)
        return x + part


class SequenceMlp(Mlp):
    """Gather along the sequence before, scatter along it behind: sequence parallel by hand."""

    def forward(self, x):
        every = funcol.all_gather_single(self.norm(x), 1, dist.group.WORLD)
        part = self.down(F.gelu(self.up(every)))
        return x + funcol.reduce_scatter_single(part, "sum", 1, dist.group.WORLD)


class Experts(nn.Module):
    """Top-2 of four experts, two a rank: tokens go there and back as [ranks, tokens, hidden]."""

    def __init__(self):
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDE), nn.Linear(WIDE, NUM_EXPERTS, bias=False)
        mine = NUM_EXPERTS // NUM_RANKS
        self.experts = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(mine))

    def forward(self, x):
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        best, where = weights.topk(2, -1)
        gates = torch.zeros_like(weights).scatter(-1, where, best / best.sum(-1, keepdim=True))
        owned = gates.unflatten(-1, (NUM_RANKS, -1))
        sent = torch.stack([h * (owned[:, rank].sum(-1, keepdim=True) > 0) for rank in (0, 1)])
        here = funcol.all_to_all_single(sent, None, None, dist.group.WORLD)
        done = torch.stack([F.silu(expert(here)) for expert in self.experts], -2)
        back = funcol.all_to_all_single(done, None, None, dist.group.WORLD)
        return x + (back * owned.movedim(1, 0).unsqueeze(-1)).sum((0, 2))


def check_model(build, shapes, kinds, strategy="overlap", limit=1e-5):
    """Equal to its eager self for every shape, split, in two phases that overlap."""
    plain = build()
    model = weft.compile(build(), strategy)
    for shape in shapes:
        x = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).sin()
        for _ in range(2):
            assert (model(x) - plain(x)).abs().max() < limit
    check_clean(model)
    assert set(talks(model)) == {(kind, "row-wise") for kind in kinds}, weft.report(model)
    for plan in weft.plans(model):
        check_overlap(plan)
    assert row_share(model) > 0.9


def row_share(model):
    """The share of calls that stand in row-wise ops, in the worst of the graphs."""
    shares = []
    for piece in session_of(model).pieces:
        calls, ops = piece.captured.num_calls, piece.captured.graph.ops
        inside = sum(calls[op.name] for op in ops if op.rows == "row-wise")
        shares.append(inside / max(1, sum(calls.values())))
    return min(shares)


def layers(kind, num=2):
    torch.manual_seed(dist.get_rank())
    return nn.Sequential(*(kind() for _ in range(num))).eval()


def check_functional(rank, *, name):
    kind, talked, shapes, parts = FUNCTIONAL[name]
    strategy = weft.overlap(parts=parts) if parts else "overlap"
    check_model(functools.partial(layers, kind), shapes, talked, strategy)


def dtensor_layers():
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    plan = {}
    for layer in range(2):
        plan |= {f"{layer}.up": ColwiseParallel(), f"{layer}.down": RowwiseParallel()}
    return parallelize_module(nn.Sequential(Mlp(), Mlp()), mesh, plan).eval()


def check_dtensor(rank):
    """Equal to the plain model too: every rank has all of it."""
    check_model(dtensor_layers, [(6, WIDE), (8, WIDE)], ["all_reduce"], weft.overlap(parts=2))
    torch.manual_seed(0)
    plain, x = nn.Sequential(Mlp(), Mlp()).eval(), torch.ones(6, WIDE)
    assert (dtensor_layers()(x) - plain(x)).abs().max() < 1e-5


def check_transformers(rank, *, folder, share):
    """A checkpoint, loaded with `tp_plan="auto"`: equal to the plain model on new lengths too."""
    from transformers import AutoModelForCausalLM, DistributedConfig
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
    load = functools.partial(AutoModelForCausalLM.from_pretrained, folder, dtype=torch.float32)
    plain, model = load(), load(distributed_config=DistributedConfig(tp_plan="auto"))
    weft.compile(model, weft.overlap(parts=2))
    for shape in ((6, 16), (6, 16), (6, 10)):
        ids = torch.arange(shape[0] * shape[1]).view(shape) % 250
        found = model(ids, use_cache=False).logits
        assert (found - plain(ids, use_cache=False).logits).abs().max() < 1e-4
    check_clean(model)
    report = weft.report(model)
    assert len(report.pieces) == 2 and report.num_breaks == 0, report
    kinds = {("all_reduce", "row-wise"), ("all_gather_into_tensor", "row-wise")}
    assert set(talks(model)) <= kinds, talks(model)
    assert row_share(model) > share, report
    for plan in weft.plans(model):
        check_overlap(plan)


def save_models(folder, num_layers=2):
    """Tiny random checkpoints, if there is what it takes to load them in parallel."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "initializer_range": 0.15,
    }  # fmt: skip
    torch.manual_seed(0)
    llama = LlamaConfig(**sizes, num_hidden_layers=num_layers)
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    sizes |= {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
    mixtral = MixtralConfig(**sizes, num_hidden_layers=1)
    MixtralForCausalLM(mixtral).save_pretrained(folder / "mixtral")


FLAT, LONG = [(6, WIDE), (8, WIDE)], [(6, 5, WIDE), (8, 5, WIDE)]
FUNCTIONAL = {
    "functional": (FunctionalMlp, ["all_reduce"], FLAT, 0),
    "functional in three parts": (FunctionalMlp, ["all_reduce"], FLAT, 3),
    "functional in parts of one row": (
        FunctionalMlp, ["all_reduce"], [(2, WIDE), (3, WIDE)], 2,
    ),
    "in place": (InPlaceMlp, ["all_reduce"], LONG, 0),
    "sequence parallel": (
        SequenceMlp, ["all_gather_into_tensor", "reduce_scatter_tensor"], LONG, 0,
    ),
    "experts": (Experts, ["all_to_all_single"], FLAT, 0),
}  # fmt: skip
NAMES = [*FUNCTIONAL, "dtensor", "llama", "mixtral"]


def cases(folder):
    found = {"dtensor": check_dtensor}
    for name in FUNCTIONAL:
        found[name] = functools.partial(check_functional, name=name)
    save_models(folder)
    for name, share in (("llama", 0.8), ("mixtral", 0.4)):
        told = {"folder": str(folder / name), "share": share}
        found[name] = functools.partial(check_transformers, **told)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, cases)


@pytest.mark.parametrize("name", NAMES)
def test_model(results, name):
    assert results[name] == "", results[name]
