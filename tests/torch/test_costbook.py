"""The cost book: what traces say that ops and flights take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from torchweft.plan.context import Context
from torchweft.plan.machine import cost_key, cpu
from torchweft.plan.trace import Span, Trace
from torchweft.serve.costbook import CostBook
from torchweft_tools.demo.blueprint import transformer

GRAPH = transformer(2)
FLIGHTS = [op for op in GRAPH.ops if op.uses == "network"]


def span(kind: str, op: str, start_s: float, end_s: float) -> Span:
    lane = "network" if kind == "transfer" else "compute"
    return Span(kind, op, lane, "cpu", lane, op, None, start_s, end_s, end_s - start_s)


def piece_of(batch: int, *spans: Span, inner: str | None = None) -> Any:
    """A piece that was traced in one call."""
    traced = SimpleNamespace(bounds=(0, batch), context=Context(batch=batch))
    entry = SimpleNamespace(inner=inner, trace=Trace("t", spans, ()), traced=traced)
    plans = SimpleNamespace(all_entries=lambda: [entry])
    service = SimpleNamespace(options=SimpleNamespace(resolved_machine=cpu()))
    return SimpleNamespace(graph=GRAPH, plans=plans, service=service, traced=traced)


def seconds_of(book: CostBook, piece: Any, batch: int, rows: int) -> float:
    key = cost_key(GRAPH, FLIGHTS[0], Context(batch=batch).env(GRAPH.batch))
    return dict(book.costs(piece, Context(batch=batch)).table.seconds[key, "cpu"])[rows]


def test_flights_that_share_a_link_take_what_they_take_together() -> None:
    """Two flights at once end at once: the second seems to take nothing."""
    ops = [op.name for op in FLIGHTS][:4]
    ends = [4.0, 4.1, 8.0, 8.1]
    shared = [
        span("transfer", op, n // 2 * 4.0, end)
        for n, (op, end) in enumerate(zip(ops, ends, strict=True))
    ]
    book, piece = CostBook(), piece_of(64, *shared)
    book.read(piece)
    assert seconds_of(book, piece, 64, 64) == pytest.approx(8.1 / 4)


def test_flights_of_two_sizes_that_share_a_link_take_by_their_bytes() -> None:
    """The short one, which ends just behind the long one, is not told to take next to nothing."""
    op, other = (each.name for each in FLIGHTS[:2])
    long, short = span("transfer", op, 0.0, 4.0), span("transfer", other, 1.0, 4.1)
    long, short = long._replace(parts=(1, 2)), short._replace(parts=(0, 1))
    book, piece = CostBook(), piece_of(64, long, short)
    piece.traced.bounds = (0, 16, 64)
    book.read(piece)
    assert seconds_of(book, piece, 64, 48) == pytest.approx(4.1 * 3 / 4)
    assert seconds_of(book, piece, 64, 16) == pytest.approx(4.1 / 4)


def test_a_call_pays_for_all_of_its_flights_and_an_odd_call_does_not_count() -> None:
    ops, book = [op.name for op in FLIGHTS][:4], CostBook()
    for taken in ([0.2, 0.2, 0.2, 2.0], [9.0] * 4, [0.2, 2.0, 0.2, 0.2]):
        alone = [
            span("transfer", op, 10.0 * n, 10.0 * n + took)
            for n, (op, took) in enumerate(zip(ops, taken, strict=True))
        ]
        book.read(piece := piece_of(64, *alone))
    assert seconds_of(book, piece, 64, 64) == pytest.approx(2.6 / 4)


def test_flights_are_those_of_calls_of_like_size_if_there_were_any() -> None:
    op = FLIGHTS[0].name
    book = CostBook()
    small, large = (
        piece_of(batch, span("transfer", op, 0.0, took)) for batch, took in ((8, 0.1), (64, 3.0))
    )
    book.read(small)
    assert seconds_of(book, large, 64, 8) == pytest.approx(0.1), "better than nothing"
    book.read(large)
    assert seconds_of(book, large, 64, 64) == pytest.approx(3.0)
    with pytest.raises(KeyError):
        seconds_of(book, large, 64, 8)
    assert seconds_of(book, small, 8, 8) == pytest.approx(0.1)
    book.clear()
    assert not book.costs(large, Context(batch=64)).table.entries


def test_ops_that_ran_beside_a_flight_count_where_none_ran_alone() -> None:
    (first, second), flight = [op.name for op in GRAPH.ops if op.uses == "compute"][:2], FLIGHTS[0]
    spans = (
        span("run", first, 0.0, 1.0),
        span("transfer", flight.name, 1.0, 3.0),
        span("run", second, 1.0, 2.5),
    )
    book, piece = CostBook(), piece_of(64, *spans)
    book.read(piece)
    assert [len(book.costs(piece, Context(batch=64), alone=alone).table.entries) for alone in (
        False, True
    )] == [3, 2]  # fmt: skip


def test_a_bound_for_other_kernels_is_not_made_of_slower_ones() -> None:
    """Theirs ran beside flights only: still, no plan by them needs what the model's own take."""
    first, flight = next(op.name for op in GRAPH.ops if op.uses == "compute"), FLIGHTS[0].name
    alone = piece_of(64, span("run", first, 0.0, 4.0))
    beside = piece_of(
        64, span("transfer", flight, 0.0, 1.5), span("run", first, 0.0, 1.5), inner="onednn"
    )
    book, key = CostBook(), cost_key(GRAPH, GRAPH.op[first], Context(batch=64).env(GRAPH.batch))

    def taken(inner: str | None) -> float:
        costs = book.costs(alone, Context(batch=64), inner, alone=True)
        return dict(costs.table.seconds[key, "cpu"])[64]

    book.read(alone)
    book.read(beside)
    assert (taken(None), taken("onednn")) == (4.0, 1.5)
    book.read(piece_of(64, span("run", first, 0.0, 1.0), inner="onednn"))
    assert taken("onednn") == 1.0
