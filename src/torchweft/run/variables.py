"""The `Variables` of a program: which of them holds a piece of a value, and the rows to take of it.

    v12         value 12, whole                 p12     the same, in its place
    v12_0_1     its rows of part 0              z[3]    a size that a body needs, for its parts

Each is noted with the lanes that use it: what several use lives in a list that they share.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchweft.errors import PlanError
from torchweft.plan.plan import Plan, Range
from torchweft.plan.sizes import Size
from torchweft.run.program import reads_of
from torchweft.run.rows import taker
from torchweft.source import Source


class Variables:
    """The names that a writer gives to the values of a plan, in the lane that it writes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.graph = plan, plan.graph
        self.index = {value.name: number for number, value in enumerate(self.graph.values)}
        self.placed = {place.value for place in plan.places}
        self.source = Source("program")
        self.space = self.source.names
        self.made: dict[str, list[Range | None]] = {}
        self.split: dict[str, set[Range]] = {}
        self.aliases: dict[str, list[str]] = {}
        self.users: dict[str, set[int]] = {}
        self.sizes: dict[tuple[Size, int, int], int] = {}
        self.lane = 0
        self._look()

    def _look(self) -> None:
        """Note which pieces are made of each value, and which ranges of each input are read."""
        for name, root in self.graph.root.items():
            self.aliases.setdefault(root, []).append(name)
        for step in self.plan.steps:
            if step.kind not in ("run", "issue"):
                continue
            for op in step.names:
                for name in self.graph.op[op].makes:
                    pieces = self.made.setdefault(name, [])
                    piece = self._piece(name, step.parts)
                    if piece not in pieces:
                        pieces.append(piece)
            if step.parts is not None:
                for name in reads_of(self.graph, step):
                    if name in self.graph.inputs:
                        self.split.setdefault(name, set()).add(step.parts)

    def _numbers(self, sizes: Sequence[Size], parts: Range) -> str:
        keys = [(size, *parts) for size in sizes]
        return ", ".join(f"z[{self.sizes.setdefault(key, len(self.sizes))}]" for key in keys)

    def _piece(self, name: str, parts: Range | None) -> Range | None:
        return None if self.graph.value[name].batch is None else parts

    def _variable(self, name: str, parts: Range | None) -> str:
        return f"v{self.index[name]}" + (f"_{parts[0]}_{parts[1]}" if parts else "")

    def _use(self, variable: str) -> str:
        self.users.setdefault(variable, set()).add(self.lane)
        return f"{{{variable}}}"

    def _read(self, name: str, parts: Range | None) -> str:
        parts = self._piece(name, parts)
        if name in self.graph.inputs:
            # Every lane gets the inputs whole; their parts come from the split.
            whole = self._variable(name, None)
            return whole if parts is None else self._use(self._variable(name, parts))
        if name in self.placed:
            return self._take(name, f"p{self.index[name]}", None, parts)
        for piece in self.made[name]:
            if piece is None or (parts and piece[0] <= parts[0] and parts[1] <= piece[1]):
                return self._take(name, self._variable(name, piece), piece, parts)
        raise PlanError(f"memory: {name!r} is in no single piece for {parts}.", rule="memory")

    def _take(self, name: str, variable: str, piece: Range | None, parts: Range | None) -> str:
        held = self._use(variable)
        if piece == parts:
            return held
        start, stop = piece or (0, self.plan.num_parts)
        first, last = parts or (0, self.plan.num_parts)
        rows = f"b{stop} - b{start}, b{first} - b{start}, b{last} - b{start}"
        return f"{self._taker(name)}({held}, {rows})"

    def _taker(self, name: str) -> str:
        self.space[f"t{self.index[name]}"] = taker(self.graph.value[name])
        return f"t{self.index[name]}"
