"""Four ranks on groups that overlap: what the ranks of one learn must reach those of the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_once
from torch import nn
from torch.distributed import _functional_collectives as funcol

import torchweft as weft
from torchweft.errors import PlanError, RunError

X = torch.arange(32.0).reshape(4, 8) / 10


class TwoGroups(nn.Module):
    def __init__(self, seed, one, other):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8, bias=False)
        self.one, self.other = one, other

    def forward(self, x):
        y = funcol.all_reduce(self.linear(x), "sum", self.one)
        return funcol.all_reduce(y + 1, "sum", self.other)


class Neighbours(nn.Module):
    def __init__(self, right, left):
        super().__init__()
        self.right, self.left = right, left

    def forward(self, x):
        y = funcol.all_reduce(x + 1, "sum", self.right)
        return y + funcol.all_reduce(x * 2, "sum", self.left)


def woven(model):
    return weft.compile(model.eval(), weft.overlap(parts=2), watchdog_s=5, fallback="error")


def check(model):
    torch.testing.assert_close(model(X), 2 * (2 * model.linear(X) + 1))


def ring(rank):
    """Each rank names its right neighbour's group first: nobody waits for anybody in a circle."""
    groups = [dist.new_group([at, (at + 1) % 4]) for at in range(4)]
    model = woven(Neighbours(groups[rank], groups[rank - 1]))
    for _ in range(2):
        torch.testing.assert_close(model(X), (X + 1) * 2 + X * 4)


def swapped_in_one_group(rank):
    """Ranks 2 and 3 call different models; 0 and 1, which have begun with them, are told why."""
    rows, columns = ([dist.new_group(pair) for pair in pairs] for pairs in (ROWS, COLUMNS))
    models = [woven(TwoGroups(seed, rows[rank // 2], columns[rank % 2])) for seed in (1, 2)]
    for model in models:
        check(model)
    with pytest.raises(RunError if rank < 2 else PlanError, match="call different models") as told:
        models[rank == 3](X)
    if rank < 2:
        assert f"rank {rank + 2} raised: PlanError" in str(told.value)
    else:
        assert "rank 2: call 3" in str(told.value) and "(model 2 of this group)" in str(told.value)
    for model in models:  # nothing is dead
        check(model)


class Cast(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return funcol.all_reduce((x * 3).to(self.dtype), "sum", dist.group.WORLD)


def unlike_dtypes(rank):
    """Sizes in bytes are equal, numbers are not."""
    model = woven(Cast(torch.int32 if rank == 2 else torch.float32))
    with pytest.raises(PlanError, match="do not plan the same collectives"):
        model(X)


ROWS, COLUMNS = ([0, 1], [2, 3]), ([0, 2], [1, 3])
CASES = {
    "ring": ring, "swapped in one group": swapped_in_one_group, "unlike dtypes": unlike_dtypes,
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES, size=4)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]
