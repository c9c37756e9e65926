"""Boundary mode on two ranks: collectives of eager parts overlap, and nobody is left waiting."""

from __future__ import annotations

import copy
import functools
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE_S, check_clean, check_overlap, run_once, talks
from test_tensor_parallel import save_models
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import PlanError, RunError

WIDE = 16


def layers(num: int = 2) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(num))


class InPlace(nn.Module):
    def __init__(self, num=2):
        super().__init__()
        self.layers = layers(num)

    def forward(self, x):
        for layer in self.layers:
            y = torch.relu(layer(x))
            dist.all_reduce(y)
            x = x + y
        return x * 2


class Async(InPlace):
    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            work = dist.all_reduce(y, async_op=True)
            z = torch.relu(x)
            work.wait()
            x = y + z
        return x


class Functional(InPlace):
    def forward(self, x):
        for layer in self.layers:
            x = x + funcol.all_reduce(layer(x), "sum", dist.group.WORLD)
        return x


class Gathering(InPlace):
    """Forms that Dynamo does not capture, and rows in dim 0 of what is gathered by list."""

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            found = [torch.empty_like(y) for _ in range(2)]
            dist.all_gather(found, y)
            root = y.clone()
            dist.broadcast(root, src=1)
            x = x + found[0] - found[1] + root
        return x


def inputs() -> torch.Tensor:
    return torch.arange(8.0 * WIDE).reshape(8, WIDE) / 100


def boundary(model, parts=2, **options):
    return weft.compile(model.eval(), weft.overlap(parts=parts), capture="boundary", **options)


def check_equal(rank, *, make, parts=2, jitter=False):
    torch.manual_seed(rank)
    model, x = make().eval(), inputs()
    wanted = model(x.clone())
    boundary(model, parts, jitter=jitter)
    for _ in range(4):
        torch.testing.assert_close(model(x.clone()), wanted)
    plan = weft.plans(model)[0]
    assert plan.num_parts == parts and plan.graph.level == "boundary"
    check_overlap(plan)
    check_clean(model)
    torch.testing.assert_close(model(x[:6].clone()), wanted[:6])
    assert len(session_of(model).pieces) == 1


def check_graph_mode(rank, *, make, parts):
    """Parts of the same rows go through the same kernels, so the bits are the same too."""
    torch.manual_seed(rank)
    model, x = make().eval(), inputs()
    weft.compile(model, weft.overlap(parts=parts))
    wanted = model(x)
    boundary(model, parts)
    for _ in range(3):
        found = model(x)
    assert torch.equal(found, wanted)
    check_clean(model)


class Tensors(nn.Module):
    """DTensors: their collectives are seen as all others are."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def check_transformers(rank, *, folder):
    """A checkpoint, loaded with `tp_plan="auto"`: the bits of graph mode, on new lengths too."""
    from transformers import AutoModelForCausalLM, DistributedConfig
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    parallel = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=parallel
    )
    every = [torch.arange(6 * length).view(6, length) % 250 for length in (16, 16, 10)]
    plain = [model(ids, use_cache=False).logits for ids in every]
    weft.compile(model, weft.overlap(parts=2))
    wanted = [model(ids, use_cache=False).logits for ids in every]
    boundary(model)
    for number in range(3):
        for ids, by_graph, as_it_is in zip(every, wanted, plain, strict=True):
            found = model(ids, use_cache=False)
            assert type(found).__name__ == "CausalLMOutputWithPast" and found.loss is None
            torch.testing.assert_close(found.logits, as_it_is)
            assert number == 0 or torch.equal(found.logits, by_graph)
    check_clean(model)
    check_overlap(weft.plans(model)[0])
    assert len(weft.plans(model)) == 1, "lengths that differ share a plan"
    assert ("all_reduce", "row-wise") in talks(model)


class Faulty(nn.Module):
    """Does what it is told, on a group of its own."""

    def __init__(self):
        super().__init__()
        self.layers, self.group = layers(3), dist.new_group()
        self.skip, self.tail, self.mixes, self.angry = 0, False, False, False

    def forward(self, x):
        for layer in self.layers[self.skip :]:
            y = layer(x)
            if self.angry and float(x[0, 0]) > 0:  # only the second part
                raise ValueError("this part does not like it")
            dist.all_reduce(y, group=self.group)
            x = x + y
        if self.tail:
            with weft.mark("tail"):
                x = x * 1
            x = x * 1
        return x - x.mean(0) if self.mixes else x


def faulty(rank, num_calls=3, watchdog_s=20):
    torch.manual_seed(rank)
    model, x = Faulty(), inputs()
    plain = copy.copy(model)
    boundary(model, watchdog_s=watchdog_s)
    for _ in range(num_calls):
        torch.testing.assert_close(model(x), plain(x))
    return model, plain, x


def goes_on(model, plain, x, reason):
    """From now on the model runs as it is, and is right."""
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
    (told,) = weft.report(model).fallbacks
    assert reason in told[0] and told[1] == 2, told


def check_sequence(rank, *, on):
    """Other boundaries on these ranks: the call raises on all, and the next falls back."""
    model, plain, x = faulty(rank)
    model.skip = 1 if rank in on else 0
    with pytest.raises(RunError, match="sequence") as raised:
        model(x)
    assert raised.value.rule == "sequence"
    model.skip = 0
    goes_on(model, plain, x, "sequence")


def check_late(rank):
    """Another boundary on rank 1 behind its last collective: rank 0 learns of it at the next."""
    model, plain, x = faulty(rank)
    model.tail = rank == 1
    if rank == 1:
        with pytest.raises(RunError, match="sequence"):
            model(x)
    else:
        model(x)
    model.tail = False
    with pytest.raises(PlanError, match="runs the model as it is"):
        model(x)
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
    assert sum(count for _, count in weft.report(model).fallbacks) >= 2


def check_raises(rank, *, on):
    """A part that raises: its rank tells the story, the others are told, nobody waits (so long
    that these ranks would be killed)."""
    model, _, x = faulty(rank, watchdog_s=10 * PATIENCE_S)
    model.angry = rank in on
    with pytest.raises(RunError) as raised:
        model(x - 0.5)
    text = str(raised.value)
    assert "this part does not like it" in text, text
    assert ("[1] on lane 'compute' failed: ValueError" in text) or rank not in on, text
    with pytest.raises(RunError, match="is dead"):
        model(x)


def check_rows(rank):
    """Rows are mixed: the first split shows it, and what the model itself gives is given."""
    model, plain, x = faulty(rank, 0)
    model.mixes = plain.mixes = True
    for _ in range(4):
        torch.testing.assert_close(model(x), plain(x))
    ((reason, count),) = weft.report(model).fallbacks
    assert reason.startswith("rows:") and count == 3, reason


FAULTS = {
    "other boundaries on both ranks": functools.partial(check_sequence, on=(0, 1)),
    "other boundaries on rank 1": functools.partial(check_sequence, on=(1,)),
    "other boundaries on rank 0": functools.partial(check_sequence, on=(0,)),
    "another boundary at the end": check_late,
    "a part raises on rank 1": functools.partial(check_raises, on=(1,)),
    "a part raises on both ranks": functools.partial(check_raises, on=(0, 1)),
    "rows are mixed": check_rows,
}
CASES = {
    f"{make.__name__} parts={parts} jitter={jitter}": functools.partial(
        check_equal, make=make, parts=parts, jitter=jitter
    )
    for make in (InPlace, Async, Functional, Gathering, Tensors)
    for parts, jitter in ((2, False), (4, True))
}
CASES |= {
    f"graph mode, {make.__name__} parts={parts}": functools.partial(
        check_graph_mode, make=make, parts=parts
    )
    for make in (InPlace, Functional)
    for parts in (2, 4)
}


CASES |= FAULTS


def cases(folder):
    save_models(folder, num_layers=1)
    return {**CASES, "llama": functools.partial(check_transformers, folder=str(folder / "llama"))}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, cases)


@pytest.mark.parametrize("name", [*CASES, "llama"])
def test_boundary_mode_on_two_ranks(results, name):
    assert results[name] == "", results[name]
