"""Conflicts: which earlier steps each step of a plan must come behind, in the recorded order.

A strategy records steps in an order that is right when they run one by one. Two steps conflict if
they touch the same bytes and not both only read; then their recorded order has to be kept.

    ledger.before(step) -> indices of earlier steps         ledger.note(index, step)

A two-phase op that is issued holds its bytes until its complete: it is asked for at the issue and
noted at the complete.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchweft.plan.graph import Graph
from torchweft.plan.plan import Plan, Step
from torchweft.plan.precedence import touches

Touch = tuple[str, int, bool]
"""One cell that a step touches: a root (or a view), a part, and whether it is written."""


class Ledger:
    """Who wrote and who read each cell last."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.graph, self.num_parts = graph, plan.num_parts
        self.device = {lane.name: lane.device for lane in plan.lanes}
        self.writer: dict[tuple[str, int], int] = {}
        self.readers: dict[tuple[str, int], list[int]] = {}
        self._op_cells: dict[tuple[str, tuple[int, int] | None], tuple[Touch, ...]] = {}

    def before(self, step: Step) -> list[int]:
        """The earlier steps that this one must come behind."""
        earlier: list[int] = []
        for name, part, writes in self.touched(step):
            cell = (name, part)
            if cell in self.writer:  # read after write, write after write
                earlier.append(self.writer[cell])
            if writes:  # write after read
                earlier += self.readers.get(cell, ())
        return earlier

    def note(self, index: int, step: Step) -> None:
        """Remember what a step touched."""
        for name, part, writes in self.touched(step):
            if writes:
                self.writer[name, part], self.readers[name, part] = index, []
            else:
                self.readers.setdefault((name, part), []).append(index)

    def touched(self, step: Step) -> list[Touch]:
        """The cells that a step touches, and whose copies on which device."""
        if step.kind == "wait":
            return []
        runs = step.kind in ("run", "issue", "complete")
        ops = (touch for name in step.names for touch in self._op(name, step))
        cells = list(ops if runs else self._move(step))
        sent = step.on if step.kind == "copy" else None  # who reads it there comes behind
        here = f"on {sent or self.device[step.lane]}"
        return cells + [(f"{name} {here}", part, sent is not None) for name, part, _ in cells]

    def _op(self, name: str, step: Step) -> tuple[Touch, ...]:
        key = (name, step.parts)
        if key not in self._op_cells:
            self._op_cells[key] = tuple(self._op_touches(name, step))
        return self._op_cells[key]

    def _op_touches(self, name: str, step: Step) -> Iterator[Touch]:
        graph, op = self.graph, self.graph.op[name]
        for root, (by_part, writes) in touches(graph, op).items():
            for part in self._cells(root, step if by_part else None):
                yield root, part, writes
        for value in op.touched + op.makes:
            split = value in graph.inputs and step.parts is not None
            if split or (value not in graph.inputs and graph.value[value].alias_of is not None):
                for part in self._cells(value, step):
                    yield f"view {value}", part, value in op.makes

    def _move(self, step: Step) -> Iterator[Touch]:
        graph, name = self.graph, step.names[0]
        root = graph.root[name]
        sent = step.kind == "copy" and step.on is not None and name not in graph.inputs
        if step.kind in ("split", "merge") or sent:
            view = step.kind == "split" or graph.value[name].alias_of is not None
            for part in self._cells(name, step) if view else ():
                yield f"view {name}", part, step.kind == "split"
        if step.kind != "split":
            # A copy to another device only reads here; into its place it is the value's last maker.
            writes = step.kind == "free" or (step.kind == "copy" and step.on is None)
            for part in self._cells(root, step):
                yield root, part, writes

    def _cells(self, name: str, step: Step | None) -> range:
        if self.graph.value[name].batch is None:
            return range(1)
        return range(*((step and step.parts) or (0, self.num_parts)))


def conflicts(plan: Plan) -> list[list[int]]:
    """For each step the earlier steps that it must come behind (not only the nearest)."""
    ledger, before = Ledger(plan, plan.graph), []
    for index, step in enumerate(plan.steps):
        before.append(ledger.before(step))
        ledger.note(index, step)
    return before
