"""Precedence: which op must come before which, and which step, as they touch the same bytes.

    precedence(graph, 2)["mlp0", 1] == [("reduce0", 1)]       op and part: what it comes behind

Three kinds of dependency, all through roots, so aliases count: read after write, write after read,
write after write. Parts that change the same bytes (a sum over rows) go in part order. Messages of
one direction go in program order, each part by part: both ranks know that order without a word.

A strategy records steps in an order that is right when they run one by one. Two steps conflict if
they touch the same bytes and not both only read; then their recorded order has to be kept.

    ledger.before(step) -> indices of earlier steps         ledger.note(index, step)

So has that of a step and what its author wants it to come after. A two-phase op that is issued
holds its bytes until its complete: it is asked for at the issue and noted at the complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchweft.plan.graph import Collective, Graph, Op
from torchweft.plan.machine import Lane
from torchweft.plan.plan import Pair, Step, pairs_of


def precedence(graph: Graph, num_parts: int = 1) -> dict[Pair, list[Pair]]:
    """For each op and part, in program order, the ops and parts that it must come behind."""
    ledger, before = Ledger(graph, num_parts), dict[Pair, list[Pair]]()
    pairs = [(op, p) for op in graph.ops for p in range(1 if op.whole else num_parts)]
    said: dict[Collective, Pair] = {}
    for index, (op, part) in enumerate(pairs):
        parts = None if op.whole or num_parts == 1 else (part, part + 1)
        step = Step("run", "", (op.name,), parts)
        earlier = [pairs[other] for other in dict.fromkeys(ledger.before(step))]
        before[op.name, part] = [(other.name, each) for other, each in earlier]
        if op.collective is not None and op.collective.peer is not None:
            direction = replace(op.collective, tag="")
            if (last := said.get(direction)) is not None and last not in before[op.name, part]:
                before[op.name, part].append(last)
            said[direction] = op.name, part
        ledger.note(index, step)
    return before


def touches(graph: Graph, op: Op) -> dict[str, tuple[bool, bool]]:
    """For each root that an op touches: (only the rows of its own part, does it change them)."""
    how: dict[str, tuple[bool, bool]] = {}
    root, value = graph.root, graph.value
    for names, writes in ((op.reads, False), (op.mutates, True), (op.makes, True)):
        for name in names:
            if writes and value[name].alias_of is not None and name not in op.mutates:
                continue
            base = root[name]
            own, wrote = how.get(base, (not op.whole and value[base].batch is not None, False))
            how[base] = (own and value[name].batch is not None, wrote or writes)
    return how


Touch = tuple[str, int, bool]
"""One cell that a step touches: a root (or a view), a part, and whether it is written."""


class Ledger:
    """Who wrote and who read each cell last, by steps on these lanes."""

    def __init__(self, graph: Graph, num_parts: int, lanes: Sequence[Lane] = ()) -> None:
        self.graph, self.num_parts = graph, num_parts
        self.device = {lane.name: lane.device for lane in lanes}
        self.several, self.inputs = len(set(self.device.values())) > 1, set(graph.inputs)
        self.writer: dict[tuple[str, int], int] = {}
        self.readers: dict[tuple[str, int], list[int]] = {}
        self._op_cells: dict[tuple[str, tuple[int, int] | None], tuple[Touch, ...]] = {}
        self.ended: dict[Pair, int] = {}

    def before(self, step: Step) -> list[int]:
        """The earlier steps that this one must come behind."""
        earlier: list[int] = []
        for name, part, writes in self.touched(step):
            cell = (name, part)
            if cell in self.writer:  # read after write, write after write
                earlier.append(self.writer[cell])
            if writes:  # write after read
                earlier += self.readers.get(cell, ())
        for name, parts in step.after:  # as its author asked for
            pairs = pairs_of(self.graph, self.num_parts, (name,), parts)
            earlier += [self.ended[pair] for pair in pairs if pair in self.ended]
        return earlier

    def note(self, index: int, step: Step) -> None:
        """Remember what a step touched, and that it has ended."""
        if step.kind in ("run", "complete"):
            pairs = pairs_of(self.graph, self.num_parts, step.names, step.parts)
            self.ended |= dict.fromkeys(pairs, index)
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
        if not self.several:
            return cells
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
        for value in map(graph.value.__getitem__, op.touched + op.makes):
            split = value.batch is not None and step.parts is not None
            if split if value.name in self.inputs else value.alias_of is not None:
                for part in self._cells(value.name, step):
                    yield f"view {value.name}", part, value.name in op.makes

    def _move(self, step: Step) -> Iterator[Touch]:
        graph, name = self.graph, step.names[0]
        root = graph.root[name]
        sent = step.kind == "copy" and step.on is not None and name not in self.inputs
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
