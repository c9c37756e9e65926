"""Boundary mode on two ranks: collectives of eager parts overlap, and nobody is left waiting."""

from __future__ import annotations

import functools
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_overlap, run_cases, talks
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
        self.skip = 0
        self.angry = ""

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number < self.skip:
                continue
            y = torch.relu(layer(x))
            if self.angry and float(x[0, 0]) > 50:
                raise ValueError(self.angry)
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


def llama(rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.15,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config), config


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


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_cases(tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("name", CASES)
def test_parts_on_two_ranks_are_equal_to_eager(results, name):
    assert results[name] == "", results[name]
