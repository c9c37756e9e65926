"""Collectives become network ops in two phases; layers around them share one structure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import torchweft as weft
from torchweft_tools.tracer import Tracer


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def in_place(h: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(h)
    return h


def functional(h: torch.Tensor) -> torch.Tensor:
    return funcol.all_reduce(h, "sum", dist.group.WORLD)


class Layer(nn.Module):
    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4, bias=False)
        self.reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.reduce(self.down(self.up(x).relu()))


@pytest.mark.parametrize("reduce", [in_place, functional])
def test_layers_are_cut_at_their_all_reduce(reduce: Callable[[Any], Any]) -> None:
    model = nn.Sequential(*(Layer(reduce) for _ in range(4)))
    x = torch.randn(6, 4)
    want = model(x)
    tracer = Tracer()
    compiled = tracer.compile(model, fullgraph=True)
    assert torch.equal(compiled(x), want)
    tracer.cut = lambda rows: (0, 2, rows)
    torch.testing.assert_close(compiled(x), want)
    graph = tracer.captures[0].graph
    talks = [op for op in graph.ops if op.collective is not None]
    assert [op.collective.kind for op in talks if op.collective] == ["all_reduce"] * 4
    assert all(op.uses == "network" and op.two_phase and op.rows == "row-wise" for op in talks)
    assert len({graph.structure[op.name] for op in talks}) == 1
    middle = [op for op in graph.ops if op.collective is None][1:-1]
    assert len(middle) == 3 and len({graph.structure[op.name] for op in middle}) == 1
    assert all(bool(op.mutates) is (reduce is in_place) for op in talks)


@pytest.mark.parametrize("reduce", [in_place, functional])
def test_two_phases_do_what_the_whole_does(reduce: Callable[[Any], Any]) -> None:
    tracer = Tracer()
    tracer.compile(Layer(reduce))(torch.randn(6, 4))
    captured = tracer.captures[0]
    body = captured.bodies["all_reduce"]
    assert body.issue is not None and body.complete is not None
    for tensor in (torch.randn(3, 4), torch.randn(4, 3).t()):
        given, other = tensor.clone(), tensor.clone()
        made = body.complete(body.issue(given))
        want = body.code(other)
        assert len(made) == len(want) and torch.equal(given, other)
        assert all(torch.equal(a, b) for a, b in zip(made, want, strict=True))


def test_gather_and_scatter_keep_rows_apart() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        every = torch.ops._c10d_functional.all_gather_into_tensor(x * 2, 1, "0")
        every = torch.ops._c10d_functional.wait_tensor(every)
        mine = torch.ops._c10d_functional.reduce_scatter_tensor(every + 1, "sum", 1, "0")
        return torch.ops._c10d_functional.wait_tensor(mine) * 3

    tracer = Tracer(cut=lambda rows: (0, 2, rows))
    x = torch.randn(6, 4)
    assert torch.equal(tracer.compile(fn)(x), (x * 2 + 1) * 3)
    kinds = [op.collective.kind for op in tracer.captures[0].graph.ops if op.collective]
    assert kinds == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_only_what_nobody_reads_again_is_reduced_where_it_is() -> None:
    def last(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD)

    def again(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return funcol.all_reduce(y, "sum", dist.group.WORLD) + y

    def given(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", dist.group.WORLD)

    def handed_out(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return funcol.all_reduce(y.view(-1), "sum", dist.group.WORLD), y

    def perhaps_a_view(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).view(-1, 2, 2).transpose(1, 2).reshape(-1, 4)
        return funcol.all_reduce(y, "sum", dist.group.WORLD)

    for function, in_place in (
        (last, True), (again, False), (given, False), (handed_out, False), (perhaps_a_view, False),
    ):  # fmt: skip
        tracer = Tracer()
        tracer.compile(function)(torch.randn(6, 4))
        body = tracer.captures[0].bodies["all_reduce"]
        assert body.issue is not None and body.complete is not None
        tensor = torch.randn(24) if function is handed_out else torch.randn(6, 4)
        (made,) = body.complete(body.issue(tensor))
        assert (made.data_ptr() == tensor.data_ptr()) is in_place, function.__name__
        part_of_a_whole = torch.randn(8, 4)[:6]
        if function is last:
            (made,) = body.complete(body.issue(part_of_a_whole))
            assert made.data_ptr() == part_of_a_whole.data_ptr()
        torch._dynamo.reset()


def test_a_buffer_that_only_a_collective_fills_is_left_out() -> None:
    def fresh(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_gather_single(out, x * 2)
        return out + 1

    def read_before(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        y = out + x
        dist.all_gather_single(out, x * 2)
        return out + y

    def from_outside(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        dist.all_gather_single(out, x * 2)
        return out + 1

    x = torch.randn(6, 4)
    for function, more in ((fresh, ()), (read_before, ()), (from_outside, (torch.zeros(6, 4),))):
        tracer = Tracer(cut=lambda rows: (0, 2, rows))
        want = function(x, *more)
        assert torch.equal(tracer.compile(function)(x, *more), want)
        (op,) = [op for op in tracer.captures[0].graph.ops if op.collective is not None]
        assert bool(op.mutates) is (function is not fresh)
        torch._dynamo.reset()


@pytest.mark.parametrize("reduce", [in_place, functional])
@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # Inductor's own imports
def test_a_border_makes_no_part_wait(reduce: Callable[[Any], Any], inner: str) -> None:
    """What a layer does behind its collective joins what the next one does before its own."""
    model = nn.Sequential(*(Layer(reduce) for _ in range(4)))
    x = torch.randn(6, 4)
    want = model(x)
    weft.compile(model, weft.overlap(parts=2), inner=inner)
    torch.testing.assert_close(model(x), want)
    report = weft.report(model)
    assert report.unblocked == ""
    assert report.fallbacks == ()
    graph = weft.plans(model)[0].graph
    assert [op.two_phase for op in graph.ops] == [False, True] * 4 + [False]
    assert (report.pieces[0].num_compiled > 0) is (inner == "inductor")
