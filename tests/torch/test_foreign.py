"""A host's own all_reduces become collectives of torch.distributed, which have two phases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import torchweft as weft
from torchweft.capture.ops.collectives import reduce_in_phases
from torchweft.options import Options
from torchweft.ranks import flights
from torchweft.ranks.flights import HOST, land
from torchweft.serve.session import Session


@torch.library.custom_op("toy_foreign::all_reduce", mutates_args=())
def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    raise AssertionError("the host's own operator was run")


@all_reduce.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("toy_foreign::reduce_in_place", mutates_args=("x",))
def reduce_in_place(handle: int, x: torch.Tensor) -> None:
    raise AssertionError("the host's own operator was run")


@reduce_in_place.register_fake
def _(handle: int, x: torch.Tensor) -> None:
    return None


class Model(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.in_place = in_place

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            torch.ops.toy_foreign.reduce_in_place(7, x)
            return x
        return torch.ops.toy_foreign.all_reduce(x, "tp")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.second(torch.relu(self.reduce(self.first(x)))))


PLACES = {"toy_foreign.all_reduce": 0, "toy_foreign.reduce_in_place": 1}


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("in_place", [False, True])
def test_foreign_reductions_have_two_phases(in_place: bool) -> None:
    """With one rank a sum over ranks changes nothing."""
    model = Model(in_place)
    session = Session(Options(weft.overlap(parts=2)))

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return session.backend(reduce_in_phases(gm, PLACES, dist.group.WORLD.group_name), inputs)

    compiled = torch.compile(model, backend=backend, dynamic=True)
    x = torch.randn(6, 4)
    with torch.no_grad():
        want = model.second(torch.relu(model.first(x)))
        for _ in range(3):
            torch.testing.assert_close(compiled(x), want)
    (piece,) = session.pieces
    talks = [op for op in piece.graph.ops if op.collective is not None]
    assert [op.collective.kind for op in talks] == ["all_reduce"] * 2
    assert all(op.two_phase and op.rows == "row-wise" for op in talks)
    assert session.fallbacks == {}
    assert [plan.num_parts for plan in (entry.plan for entry in piece.plans.entries)] == [2]


def test_an_operator_of_the_host_runs_as_it_is_told() -> None:
    """What an accelerator's lane runs: functional or in place, in a copy or where it may."""
    twice = torch.library.Library("toy_foreign", "FRAGMENT")
    twice.define("twice(Tensor x, str name) -> Tensor")
    twice.impl("twice", lambda x, name: 2 * x, "CPU")
    twice.define("twice_(int handle, Tensor(a!) x) -> ()")
    twice.impl("twice_", lambda handle, x: (x.mul_(2), None)[1], "CPU")
    whole = HOST + '["toy_foreign.twice.default", 0, ["", "tp"]]'
    in_place = HOST + '["toy_foreign.twice_.default", 1, [7, ""]]'
    for call in (whole, in_place):
        x = torch.ones(3)
        assert torch.equal(land(flights.all_reduce(x, call, "0"))[0], 2 * x)
        assert torch.equal(torch.ops.weft.all_reduce(x, call, "0"), 2 * x)
        assert torch.equal(x, torch.ones(3)), "nobody asked for it"
        (made,) = land(flights.all_reduce(x, call, "0", out=x))
        assert torch.equal(x, torch.full((3,), 2.0))
    assert made.data_ptr() == x.data_ptr()
    y = torch.ones(3)
    (made,) = land(flights.all_reduce(y, in_place, "0", mine=True))
    assert made is y
