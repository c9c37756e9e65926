"""The `CostBook`: seconds of ops as calls have shown them, and what plans would take by them.

    book.read(piece)                     the traces of its plans become costs
    book.predict(piece, strategy)        seconds of the last call, had it run by this strategy

An entry is an op's structure, the shapes of what it reads and its rows (`cost_key`): equal layers
share one. Where a size was not seen, the formulas of `Costs` fill in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from torchweft.plan.machine import Costs, CostTable, cost_key
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import Strategy

if TYPE_CHECKING:
    from torchweft.serve.piece import Piece, PlanEntry

NUM_KEPT = 32
Key = tuple[str, str]


class CostBook:
    """What ops have taken, by key and device, then by rows."""

    def __init__(self) -> None:
        self.seconds: dict[Key, dict[int, deque[float]]] = {}
        self._seen: dict[int, Trace] = {}  # by the id of an entry, the trace that was read last

    def read(self, piece: Piece) -> None:
        """Take the costs from all traces of a piece's plans that were not read before."""
        for entry in piece.plans.all_entries():
            is_new = self._seen.get(id(entry)) is not entry.trace
            if entry.trace is not None and entry.traced and is_new:
                self._seen[id(entry)] = entry.trace
                self._read(piece, entry)

    def _read(self, piece: Piece, entry: PlanEntry) -> None:
        assert entry.trace is not None and entry.traced is not None, "only traces are read"
        graph, (bounds, context) = piece.graph, (entry.traced.bounds, entry.traced.context)
        for span in entry.trace.spans:
            if span.kind not in ("run", "transfer") or span.op not in graph.op:
                continue
            first, last = span.parts or (0, len(bounds) - 1)
            rows = bounds[last] - bounds[first]
            key = cost_key(graph, graph.op[span.op], context.env(graph.batch, rows))
            by_rows = self.seconds.setdefault((key, span.device), {})
            by_rows.setdefault(rows, deque(maxlen=NUM_KEPT)).append(span.end_s - span.start_s)

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

    def table(self) -> CostTable:
        """The medians."""
        return CostTable.of({
            key: {rows: median(seen) for rows, seen in by_rows.items()}
            for key, by_rows in self.seconds.items()
        })  # fmt: skip

    def predict(self, piece: Piece, strategy: Strategy) -> float:
        """Seconds of a piece's last traced call by a strategy; those of no plan are without end."""
        assert piece.traced is not None, "only a piece that was traced is looked at"
        costs = Costs(piece.service.options.resolved_machine, self.table())
        return piece.plans.predict(strategy, piece.traced.context, costs)
