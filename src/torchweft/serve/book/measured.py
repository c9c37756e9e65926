"""`MeasuredCosts`: what ops have taken in the calls of one model, the same numbers on all ranks.

    s.cost(op) in a strategy  ->  a line "costs: ..." in the plan's history
    talks 4, 8, 16, ... of the model: if all ranks have such plans, each tells what its traces show,
    all take the largest, and these plans are written again at the next call

The number of a talk is agreed on in every talk, so all ranks begin to use new costs at one call. A
model that talks with nobody uses its own at once, after its first, second, fourth ... traced plan.
Who talks on several groups keeps the formulas: no one call is the same for all of them. So does a
model on an accelerator: to trace a plan there is to wait for the device, and new plans are traced.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchweft.plan.machine import Costs, CostTable
from torchweft.plan.write.scheduler import COSTS_NOTE
from torchweft.serve.book.costbook import CostBook

if TYPE_CHECKING:
    from torchweft.serve.book.entry import PlanEntry
    from torchweft.serve.piece import Piece
    from torchweft.serve.session import Session

Table = dict[tuple[str, str], dict[int, float]]


def asks(entry: PlanEntry) -> bool:
    """Whether a plan depends on what ops cost."""
    return any(note.startswith(COSTS_NOTE) for note in entry.plan.history)


class MeasuredCosts:
    """The costs of one model's ops, as far as its calls have shown them."""

    def __init__(self, session: Session) -> None:
        self.session, self.known, self.num_traces = session, Table(), 0

    def wanted(self) -> bool:
        """Whether some plan depends on costs that this rank's group can agree on."""
        entries = (entry for piece in self._pieces() for entry in piece.plans.all_entries())
        return len(self.session.communicators) == 1 and any(map(asks, entries))

    def _pieces(self) -> list[Piece]:
        """Those that run where a trace waits for nothing."""
        return [piece for piece in self.session.pieces if piece.runtime is None]

    def tell(self) -> bytes:
        """What the traces of the plans in use show here, for the other ranks."""
        book, told = CostBook(), Table()
        for piece in self._pieces():
            book.read(piece)
            if piece.traced is not None:
                seen = book.costs(piece, piece.traced.context).table.seconds
                told |= {key: {**told.get(key, {}), **dict(points)} for key, points in seen.items()}
        return json.dumps(CostTable.of(told).entries).encode()

    def hear(self, told: Sequence[bytes], where: str) -> None:
        """Take the largest of what all ranks tell; plans that depend on costs are written anew."""
        fresh: Table = {}
        for key, device, points in (entry for each in told for entry in json.loads(each)):
            for rows, seconds in points:
                by_rows = fresh.setdefault((key, device), {})
                by_rows[rows] = max(seconds, by_rows.get(rows, 0.0))
        self.known |= fresh  # of an op that was seen, what was seen at other sizes before is gone
        if fresh:
            machine = self.session.options.resolved_machine
            costs = Costs(machine, CostTable.of(self.known), about=f"measured, {where}")
            for piece in self._pieces():
                piece.take_costs(costs)

    def note_trace(self, entry: PlanEntry) -> None:
        """A plan of a model that talks with nobody was traced."""
        if asks(entry):
            self.num_traces += 1
            if self.num_traces & (self.num_traces - 1) == 0:
                self.hear([self.tell()], f"after {self.num_traces} traced plans")
