"""The `CostBook`: seconds of ops as calls have shown them, and what plans would take by them.

    book.read(piece)                     the traces of its plans become costs
    book.predict(piece, strategy)        seconds of the last call, had it run by this strategy
    book.search(piece, strategy, ...)    a quicker plan than this strategy's, by simulation
    book.bound(calls, inner)             seconds that no strategy can beat in these calls

An entry is an op's structure, the shapes of what it reads and its rows (`cost_key`): equal layers
share one. Other kernels have entries of their own, and take those of the model's where they have
none. A flight lasts from its start, or from the end of the one before it, to its end. An op that
ran beside a flight may have been slowed down by it; its seconds count where none were seen of the
op alone, but not for a bound. Where a size was not seen, the formulas of `Costs` fill in.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from torchweft.errors import WeftError
from torchweft.plan.context import Context
from torchweft.plan.flown import Flown, Key, taken_by
from torchweft.plan.improve import improve, replay
from torchweft.plan.improve.bound import Bound, bound
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, CostTable, cost_key, moved_bytes
from torchweft.plan.plan import Plan
from torchweft.plan.strategies import sequential
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import Strategy, write
from torchweft.ranks.speakers import number_of

if TYPE_CHECKING:
    from torchweft.serve.piece import Piece, PlanEntry

NUM_KEPT = 32
MAX_RUNS = 25_000  # of all plans that a search simulates
BESIDE = 0.05  # the share of an op's time that flights may take before it counts as beside them
Table = dict[Key, dict[int, deque[float]]]
Calls = Sequence[tuple["Piece", Context]]
"""Graphs, and what was known of a call of each."""
Agreed = Callable[[Sequence[float]], list[float]]
"""The largest of these numbers on all ranks that the model talks with."""


def same_on_all(what: object, agreed: Agreed) -> bool:
    """Whether all ranks say the same here."""
    mine = float(number_of(str(what)) >> 16)
    most, least = agreed([mine, -mine])
    return most == -least


class Seen(NamedTuple):
    """How a cost was seen: by which kernels, and whether nothing was in flight beside it."""

    inner: str | None
    alone: bool


class CostBook:
    """What ops have taken: as it was seen, then by key and device, then by rows."""

    def __init__(self) -> None:
        self.seconds: dict[Seen, Table] = {}
        self.flights: dict[int, Table] = {}  # by a power of two of the rows of the call
        self._read_last: dict[int, Trace] = {}  # by the id of an entry

    def read(self, piece: Piece) -> None:
        """Take the costs from all traces of a piece's plans that were not read before."""
        for entry in piece.plans.all_entries():
            is_new = self._read_last.get(id(entry)) is not entry.trace
            if entry.trace is not None and entry.traced and is_new:
                self._read_last[id(entry)] = entry.trace
                self._read(piece, entry)

    def _read(self, piece: Piece, entry: PlanEntry) -> None:
        assert entry.trace is not None and entry.traced is not None, "only traces are read"
        graph, (bounds, context) = piece.graph, (entry.traced.bounds, entry.traced.context)
        spans = [s for s in entry.trace.spans if s.kind in ("run", "transfer") and s.op in graph.op]
        flights = sorted(span[-3:-1] for span in spans if span.kind == "transfer")
        flown: dict[str, list[Flown]] = {}  # by lane
        for span in sorted(spans, key=lambda span: span.end_s):
            start_s, end_s = span.start_s, span.end_s
            first, last = span.parts or (0, len(bounds) - 1)
            rows = bounds[last] - bounds[first]
            op, env = graph.op[span.op], context.env(graph.batch, rows)
            key = cost_key(graph, op, env), span.device
            if span.kind == "transfer":
                flight = Flown(key, rows, moved_bytes(graph, op, env), start_s, end_s)
                flown.setdefault(span.lane, []).append(flight)
            else:
                beside_s = sum(max(0.0, min(e, end_s) - max(s, start_s)) for s, e in flights)
                alone = beside_s <= BESIDE * (end_s - start_s)
                table = self.seconds.setdefault(Seen(entry.inner, alone), {})
                _keep(table, key, rows, end_s - start_s)
        table = self.flights.setdefault(_near(context), {})
        for key, rows, taken_s in chain(*map(taken_by, flown.values())):
            _keep(table, key, rows, taken_s)

    def clear(self) -> None:
        """Forget what was seen: it holds for the machine as it was."""
        self.seconds.clear()
        self.flights.clear()

    def link_rate(self, pieces: Sequence[Piece]) -> int:
        """How fast the network was in the last traced calls, as a power of two of bytes a second.

        Links that differ by noise have the same. 0: nothing was sent.
        """
        moved, taken_s = 0.0, 0.0
        for piece in pieces:
            for entry in piece.plans.all_entries():
                if entry.traced is not piece.traced or entry.trace is None:
                    continue
                for span in entry.trace.spans:
                    if span.kind == "transfer" and span.op in piece.graph.op:
                        moved += self._bytes(piece, span.op)
                        taken_s += span.end_s - span.start_s
        return round(math.log2(moved / taken_s)) if moved and taken_s else 0

    def _bytes(self, piece: Piece, name: str) -> int:
        assert piece.traced is not None, "only a piece that was traced is looked at"
        graph, context = piece.graph, piece.traced.context
        sizes = [graph.value[read].bytes for read in graph.op[name].reads]
        return sum(size.evaluate(context.env(graph.batch)) for size in sizes)

    def costs(
        self, piece: Piece, context: Context, inner: str | None = None, *, alone: bool = False
    ) -> Costs:
        """What ops cost on the machine of a piece in a call: medians, with kernels of an inner
        compiler; None: as the model was compiled. alone: only what was seen without flights beside
        it; of an inner compiler's kernels also what they took beside flights, where that is less
        than other kernels take alone. Flights are those of calls like it, if there were any: a
        link that has had little to do is quicker."""
        table: dict[Key, dict[int, float]] = {}
        for near in sorted(self.flights, key=lambda near: near == _near(context)):
            for key, by_rows in self.flights[near].items():
                known = {} if near == _near(context) else table.get(key, {})
                table[key] = {**known, **{n: median(s) for n, s in by_rows.items()}}
        for seen in (Seen(None, False), Seen(None, True), Seen(inner, False), Seen(inner, True)):
            counts = seen.alone or not alone
            for key, by_rows in self.seconds.get(seen, {}).items() if counts or inner else ():
                known = table.setdefault(key, {})
                for rows, taken in by_rows.items():
                    if counts:
                        known[rows] = median(taken)
                    elif seen.inner:  # slowed down, yet these kernels, not others
                        known[rows] = min(known.get(rows, math.inf), median(taken))
        table = {key: by_rows for key, by_rows in table.items() if by_rows}
        return Costs(piece.service.options.resolved_machine, CostTable.of(table))

    def agreed_costs(self, piece: Piece, context: Context, agreed: Agreed) -> Costs | None:
        """The costs of a piece, the same on all ranks: the largest of each; None if the ranks have
        seen different ops. agreed: the largest of these numbers on all ranks."""
        costs = self.costs(piece, context)
        entries = costs.table.entries
        if not same_on_all(
            [(*op, [rows for rows, _ in points]) for *op, points in entries], agreed
        ):
            return None
        seconds = iter(agreed([s for *_, points in entries for _, s in points]))
        table = [
            (key, device, tuple((rows, next(seconds)) for rows, _ in points))
            for key, device, points in entries
        ]
        return replace(costs, table=CostTable(tuple(table)))

    def predict(self, piece: Piece, strategy: Strategy, context: Context | None = None) -> float:
        """Seconds of a piece's call by a strategy, of the last traced one unless it is told; those
        of no plan are without end."""
        if context is None:
            assert piece.traced is not None, "only a piece that was traced is looked at"
            context = piece.traced.context
        return piece.plans.predict(strategy, context, self.costs(piece, context, strategy.inner))

    def search(
        self, piece: Piece, strategy: Strategy, context: Context, costs: Costs
    ) -> tuple[Plan, float, float]:
        """What a search makes of a strategy's plan; with the seconds of a call by either of them.
        Equal costs, equal plans."""
        graph, machine = piece.graph, costs.machine
        try:
            bare = write(strategy, graph, context, machine, costs=costs)
        except WeftError:  # it cannot write one for this graph
            bare = write(sequential, graph, context, machine, costs=costs)
        better = improve(bare, context, machine, costs, max_runs=MAX_RUNS)
        before_s = piece.plans.limit.seconds(strategy, lower(bare), context, costs)
        return better, before_s, piece.plans.predict(replay(plan=str(better)), context, costs)

    def bound(self, calls: Calls, inner: str | None = None) -> Bound:
        """What no strategy can beat, and what it is made of, over the graphs of a call."""
        parts: Counter[str] = Counter()
        for piece, context in calls:
            costs = self.costs(piece, context, inner, alone=True)
            parts.update(dict(bound(piece.graph, context, costs.machine, costs).parts))
        return Bound(sum(parts.values()), tuple(parts.most_common()))


def _near(context: Context) -> int:
    return context.batch.bit_length()


def _keep(table: Table, key: Key, rows: int, seconds: float) -> None:
    table.setdefault(key, {}).setdefault(rows, deque(maxlen=NUM_KEPT)).append(seconds)
