"""Each form of a mark names an op, breaks no graph, and says when it matched nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.capture.dynamo import Capture, probe
from torchweft.capture.marks import (
    MarkRule,
    mark,
    mark_function,
    mark_module,
    mark_op,
    mark_path,
)
from torchweft.errors import CaptureError
from torchweft_tools.tracer import Tracer, run_reference


def scale(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y + 1


@mark("decorated", uses="io")
def decorated(x: torch.Tensor) -> torch.Tensor:
    return (x + 3).relu()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with mark("attention", uses="memory"):
            y = self.first(x).relu()
        return scale(self.second(y)) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.sigmoid(self.head(decorated(x)))


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def captured(model: Any, *rules: MarkRule) -> Any:
    tracer = Tracer(rules=rules)
    x = torch.randn(6, 4)
    want = model(x)
    compiled = tracer.compile(model, fullgraph=True)
    assert torch.equal(compiled(x), want)
    tracer.cut = lambda rows: (0, 2, rows)
    torch.testing.assert_close(compiled(x), want)
    assert len(tracer.captures) == 1, "a mark adds no graph break"
    tracer.require_matched()
    return tracer.captures[0].graph


def marked(graph: Any, name: str) -> list[Any]:
    return [op for op in graph.ops if op.mark == name]


def test_context_manager_gives_one_op_a_block_and_equal_blocks_one_structure() -> None:
    graph = captured(Model())
    ops = marked(graph, "attention")
    assert [op.name for op in ops] == ["attention", "attention.1", "attention.2"]
    assert {op.uses for op in ops} == {"memory"}
    assert len({graph.structure[op.name] for op in ops}) == 1
    assert all(op.rows == "row-wise" for op in ops)


def test_graph_false_reaches_the_body_in_every_form() -> None:
    class Left(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.last = Left(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.left(x)
            with mark("inside", graph=False):
                x = x * 2
            return scale(torch.sigmoid(self.last(self.right(x))))

    rules = (
        mark_module(Left, "left", graph=False),
        mark_path(r"right", "right", graph=False),
        mark_op("sigmoid", "gate", graph=False),
        mark_function(scale, graph=False),
        mark_path(r"last", "last"),
    )
    tracer = Tracer(rules=rules)
    tracer.compile(Both(), fullgraph=True)(torch.randn(6, 4))
    (found,) = tracer.captures
    graphs = {op.mark: found.bodies[op.name].graph for op in found.graph.ops if op.mark}
    never = dict.fromkeys(("left", "inside", "right", "gate", "scale"), False)
    assert graphs == {**never, "last": True}


def test_decorator() -> None:
    (op,) = marked(captured(Model()), "decorated")
    assert op.name == "decorated" and op.uses == "io"


def test_module_class_and_instance() -> None:
    model = Model()
    graph = captured(
        model, mark_module(model.head, "head", uses="compute"), mark_module(Block, "block")
    )
    assert [op.name for op in marked(graph, "block")] == ["block", "block.1", "block.2"]
    assert not marked(graph, "attention"), "a rule wins over model code"
    (head,) = marked(graph, "head")
    assert head.name == "head"


def test_function_of_the_user_and_of_torch() -> None:
    graph = captured(
        Model(), mark_function(scale), mark_function(torch.sigmoid, "gate", uses="memory")
    )
    assert len(marked(graph, "scale")) == 3
    (gate,) = marked(graph, "gate")
    assert gate.uses == "memory"


def test_path_and_target_by_regular_expression() -> None:
    graph = captured(
        Model(),
        mark_path(r"blocks\.\d+\.second", "second"),
        mark_op(r"sigmoid", "sigmoid", uses="memory"),
    )
    assert len(marked(graph, "second")) == 3
    assert len(marked(graph, "sigmoid")) == 1


@pytest.mark.parametrize(
    "rule",
    [
        mark_module(nn.Conv1d, "conv"),
        mark_module(nn.Linear(2, 2), "other"),
        mark_function(torch.cumsum),
        mark_path(r"nowhere\..*", "nothing"),
        mark_op(r"all_reduce"),
    ],
    ids=lambda rule: rule.form,
)
def test_a_rule_that_matched_nothing_raises(rule: MarkRule) -> None:
    with pytest.raises(CaptureError, match="matched nothing"):
        captured(Model(), rule)


def test_bad_names_and_resources_raise() -> None:
    with pytest.raises(CaptureError, match="not a name"):
        mark_op("x", "two words")
    with pytest.raises(CaptureError, match="unknown resource"):
        mark_module(nn.Linear, uses="netwrk")
    with pytest.raises(CaptureError, match="regular expression"):
        mark_op("(")
    with pytest.raises(CaptureError, match="unknown resource"), mark("a", uses="gpu"):
        pass


def test_a_mark_does_nothing_outside_of_capture() -> None:
    x = torch.ones(2)
    with mark("plain"):
        y = x + 1
    assert torch.equal(y, x + 1)
    assert torch.equal(decorated(x), (x + 3).relu())


def test_a_mixing_call_makes_its_whole_mark_mixing() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with mark("norm"):
            y = x - x.mean(0)
            y = y * 2
        return y + 1

    (op,) = marked(captured(fn), "norm")
    assert op.rows == "mixing"


def test_a_declared_region_is_row_wise_although_its_calls_are_not() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with mark("routed", rows="row-wise"):
            order = x.sum(-1).argsort()
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0])
            y = (x[order] * 2)[back]
        return y + 1

    (op,) = marked(captured(fn), "routed")
    assert op.rows == "row-wise"


@torch.library.custom_op("weft_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("weft_test::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@centred.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_probe_tells_custom_operators_apart_and_lists_what_it_assumed() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return centred(twice(x + 1) * 3) - 1

    tracer, x = Tracer(), torch.randn(6, 4)
    want = tracer.compile(fn)(x)
    (before,) = tracer.captures
    assert [op.rows for op in before.graph.ops if op.name in ("twice", "centred")] == ["mixing"] * 2
    _, env = before.bind(inputs := given(before, x))
    after = probe(before, inputs)
    assert after.assumed == ("twice",)
    assert after.graph.op["twice"].rows == "row-wise" and after.graph.op["centred"].rows == "mixing"
    assert "centred" in after.reasons and "twice" not in after.reasons
    (got,) = run_reference(after, inputs, (0, 2, env[after.graph.batch or ""]))
    torch.testing.assert_close(got, want)


def test_a_probe_of_a_marked_region() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with mark("sorted"):
            order = x.sum(-1).argsort()
            back = torch.empty_like(order)
            back[order] = torch.arange(order.shape[0])
            y = (x[order] * 2)[back]
        with mark("first"):
            y = y + x[0]
        return y + 1

    tracer, x = Tracer(), torch.randn(6, 4)
    tracer.compile(fn)(x)
    (captured,) = tracer.captures
    assert probe(captured, given(captured, x)).assumed == ("sorted",)


def given(captured: Capture, x: torch.Tensor) -> list[Any]:
    """The inputs as Dynamo passes them: sizes where it wants sizes."""
    slots = max([*captured.slots.values(), *(found[1] for found in captured.symbols)]) + 1
    inputs: list[Any] = [x] * slots
    for _, slot, dim, *_ in captured.symbols:
        if dim is None:
            inputs[slot] = x.shape[0]
    return inputs


def test_batch_free_calls_in_a_mark_that_others_read_leave_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        with mark("first"):
            table = torch.arange(4.0).exp().cumsum(0) * 2
            y = x * table
        return y + table.flip(0) + table

    graph = captured(fn)
    (op,) = marked(graph, "first")
    assert op.rows == "row-wise"
    assert any(op.rows == "batch-free" for op in graph.ops)


def test_what_is_declared_of_rows_says_nothing_of_a_call_that_has_none() -> None:
    """One row: Dynamo takes the size for a constant, and the graph has no batch."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return twice(x.sin()) + 1

    rules = [mark_op(r"weft_test\.twice", rows="row-wise")]
    run = weft.compile(fn, weft.overlap(parts=2), rules=rules)
    for rows in (8, 1, 8):
        x = torch.randn(rows, 4)
        assert torch.equal(run(x), fn(x))
    first, second = session_of(run).pieces
    (op,) = (op for op in first.graph.ops if op.mark)
    (alone,) = (op for op in second.graph.ops if op.mark)
    assert (op.rows, alone.rows) == ("row-wise", "batch-free")
    reasons = [reason for reason, _ in weft.report(run).fallbacks]
    assert not any("row-wise" in reason for reason in reasons), reasons
