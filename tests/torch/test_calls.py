"""Small bodies in a program, call by call: the same results, errors and lifetimes."""

from __future__ import annotations

import operator
import weakref

import pytest
import torch
from torch import fx, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.bodies.bodies import MAX_CALLS, write_calls
from torchweft.errors import RunError


def written(build) -> list[str] | None:
    """The lines of a graph that `build(graph, x)` makes; constants have their own names."""
    graph = fx.Graph()
    made = build(graph, graph.placeholder("x"))
    graph.output(made)
    targets = [f"y{number}" for number in range(len(made))]
    return write_calls(graph, ["x"], targets, lambda v: getattr(v, "__name__", "constant"))


def test_calls_are_written_as_python():
    def build(graph, x):
        first = graph.call_function(operator.getitem, (x, (slice(None), 0)))
        shifted = graph.call_function(operator.add, (first, -1))
        shaped = graph.call_method("view", (shifted, [2, 3]))
        return (graph.call_function(torch.sum, (shaped,), {"dim": 0}),)

    assert written(build) == [
        "l0 = x[constant]",
        "l1 = l0 + constant; l0 = None",
        "l2 = l1.view([2, 3]); l1 = None",
        "y0 = sum(l2, dim=0); l2 = None",
    ]


def test_what_cannot_be_written_is_called():
    def keyword(graph, x):
        return (graph.call_function(torch.sum, (x,), {"dim=0); evil(": 0}),)

    def method(graph, x):
        return (graph.call_method("view(); evil", (x,)),)

    def table(graph, x):
        return (graph.call_function(torch.sum, (x, {"x": x})),)

    def handed_on(graph, x):
        return (x,)

    def twice(graph, x):
        made = graph.call_function(torch.sin, (x,))
        return (made, made)

    def many(graph, x):
        for _ in range(MAX_CALLS + 1):
            x = graph.call_function(torch.sin, (x,))
        return (x,)

    for build in (keyword, method, table, handed_on, twice, many):
        assert written(build) is None


def test_an_argument_that_is_no_name_is_not_written_twice():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(operator.add, (x, x)),))
    assert write_calls(graph, ["t0(v1, b1, b0, b1)"], ["y"], str) is None
    lines = write_calls(graph, ["{v1_0_1}"], ["{v2_0_1}"], str)
    assert lines == ["{v2_0_1} = {v1_0_1} + {v1_0_1}"]


class Chain(nn.Module):
    def __init__(self, check=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.check = check

    def forward(self, x):
        for layer in self.layers:
            with weft.mark("tiny"):
                x = torch.relu(layer(x))
                if self.check is not None:
                    x = self.check(x)
        return x


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["sequential", weft.overlap(parts=2)])
@pytest.mark.parametrize("blocks", [True, False])
def test_a_program_has_the_calls_of_small_bodies_in_it(strategy, blocks):
    model, x = Chain().eval(), torch.randn(6, 8)
    wanted = model(x)
    weft.compile(model, strategy, blocks=blocks)
    for _ in range(3):
        assert torch.equal(model(x), wanted)
    piece = session_of(model).pieces[0]
    program = piece.plans.entries[0].program
    assert "l0 = k0(" in program.source
    assert len(program.plan.graph.ops) == 4
    assert {span.op for span in weft.trace(model, x).spans if span.kind == "run"} == {
        op.name for op in piece.graph.ops
    }


@torch.library.custom_op("weft_test::refuse_large", mutates_args=())
def refuse_large(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 100:
        raise ValueError("too large")
    return x.clone()


@refuse_large.register_fake
def _(x):
    return torch.empty_like(x)


@torch.no_grad()
def test_an_error_names_the_op_that_raised():
    model = Chain(refuse_large).eval()
    weft.compile(model, "sequential")
    for _ in range(3):
        model(torch.randn(4, 8))
    (piece,) = session_of(model).pieces
    program = piece.plans.entries[0].program
    assert len(piece.graph.ops) == 4 and "l0 = k0(" in program.source
    model.layers[2].bias += 1000  # the third op is the first to see it
    with pytest.raises(RunError, match="ValueError: too large") as caught:
        model(torch.randn(4, 8))
    assert program.plan.steps[caught.value.step].names == (piece.graph.ops[2].name,)


def test_what_is_made_inside_ends_as_early_as_in_a_body():
    graph = fx.Graph()
    x = graph.placeholder("x")
    inside = graph.call_function(torch.sin, (x,))
    graph.output((graph.call_function(torch.cos, (inside,)),))
    space: dict[str, object] = {}

    def constant(value):
        space[value.__name__] = value
        return value.__name__

    seen: list[weakref.ref[torch.Tensor]] = []

    def watched(tensor):
        made = torch.sin(tensor)
        seen.append(weakref.ref(made))
        return made

    lines = write_calls(graph, ["x"], ["y"], constant)
    assert lines is not None
    space |= {"sin": watched, "x": torch.ones(2)}
    exec("\n".join(lines), space)
    assert seen[0]() is None and torch.equal(space["y"], torch.ones(2).sin().cos())
