"""Two gloo ranks: collectives are two-phase ops in flight beside compute; results are right."""

from __future__ import annotations

import functools
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import check_clean, check_overlap, run_once
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchweft as weft


class Shard(torch.nn.Module):
    """Two row-parallel layers; each rank holds half of the columns."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.up = torch.nn.ModuleList(torch.nn.Linear(16, 8) for _ in range(2))
        self.down = torch.nn.ModuleList(torch.nn.Linear(8, 16, bias=False) for _ in range(2))

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            part = down(torch.relu(up(x)))
            if self.in_place:
                dist.all_reduce(part)
                x = x + part
            else:
                x = x + funcol.all_reduce(part, "sum", dist.group.WORLD)
        return x


def check_shard(rank, *, in_place, parts, jitter):
    model, x = Shard(in_place).eval(), torch.arange(7 * 16.0).reshape(7, 16) / 50
    wanted = model(x.clone())
    weft.compile(model, weft.overlap(parts=parts), jitter=jitter)
    for _ in range(3):
        torch.testing.assert_close(model(x.clone()), wanted)
    plan = weft.plans(model)[0]
    kinds = [step.kind for step in plan.steps]
    assert kinds.count("issue") == kinds.count("complete") == 2 * parts, str(plan)
    assert plan.num_parts == parts
    check_overlap(plan)
    check_clean(model)


@torch.enable_grad()
def check_sharded(rank):
    """Behind the hooks of `fully_shard`, which are graph breaks, there are parts too."""
    torch.manual_seed(0)
    model, plain = (torch.nn.Sequential(*(Feed() for _ in range(2))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for feed in model:
        fully_shard(feed, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    weft.compile(model, weft.overlap(parts=2))
    x = torch.randn(6, 8)
    warnings.filterwarnings("ignore", "The .grad attribute")  # Dynamo's own look at a tensor
    for _ in range(2):
        torch.testing.assert_close(model(x), plain(x))
        model(x).square().sum().backward()
    report = weft.report(model)
    assert all(plan.num_parts == 2 for piece in report.pieces for plan in piece.plans), report
    assert report.fallbacks == () and len(report.pieces) > 2


class Feed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def check_loaded(rank):
    """A fork server says nothing of what it cannot load; every rank would load it anew."""
    assert "warm" in sys.modules


CASES = {
    f"in_place={in_place} parts={parts} jitter={jitter}": functools.partial(
        check_shard, in_place=in_place, parts=parts, jitter=jitter
    )
    for in_place in (False, True)
    for parts, jitter in ((2, False), (3, False), (3, True))
}
CASES["fully_shard"] = check_sharded
CASES["the ranks are loaded when they start"] = check_loaded


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]
