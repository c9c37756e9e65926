"""The random draft: the steps of a plan in program order, each on a device, safe in that order.

    Graph --draft--> Draft: split x, op0[0], op0[1], copy v0[0] to gpu0, op1[0], ..., merge y

Ranges, devices, places, copies and frees are decided here; lanes, order and waits come later
(`random_plans`). A draft is a plan with one lane per device, so the oracle's `read` can tell what
each of its steps touches. Some draws cannot be completed (a cell that is needed in one piece but
lies on two devices): these raise `ImpossibleError` and are drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from torchweft.plan.context import Cut
from torchweft.plan.graph import USES, Graph, Op
from torchweft.plan.machine import Lane
from torchweft.plan.plan import Buffer, Place, Plan, Range, Step
from torchweft.plan.sizes import ONE, Size
from torchweft_tools.bench.oracle.overlap import OracleSpan, overlap, units_of
from torchweft_tools.bench.oracle.reading import Reading, read
from torchweft_tools.bench.oracle.reference import OracleSpot, parts_of, spots

Ranges = dict[str, list[Range | None]]
UNITS = {True: ("rows", Size.parse("4*s0")), False: ("flat", Size.of(4))}


class ImpossibleError(Exception):
    """What was drawn so far cannot become a safe plan."""


@dataclass
class PlanDraft:
    """Steps in program order; the lane of each is named after its device."""

    graph: Graph
    cut: Cut
    devices: tuple[str, ...]
    steps: list[Step] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def plan(self) -> Plan:
        """The draft as a plan with one lane a device."""
        lanes = tuple(Lane(device, device, USES) for device in self.devices)
        facts = (self.graph.name, self.graph.digest, self.cut, lanes, tuple(self.steps))
        return Plan(*facts, tuple(self.buffers), tuple(self.places), bound=self.graph)

    def reading(self) -> Reading:
        """What each step touches; action i is step i, because a draft has no waits."""
        return read(self.plan())


def random_ranges(rng: Random, graph: Graph, num_parts: int) -> Ranges:
    """Each op's parts, in runs of adjacent parts; None means all of them."""
    ranges: Ranges = {}
    share = rng.choice((0.0, 0.25, 0.5, 1.0))
    for op in graph.ops:
        ranges[op.name] = [None]
        if not op.whole and num_parts > 1:
            cuts = [part for part in range(1, num_parts) if rng.random() >= share * 0.6]
            borders = [0, *cuts, num_parts]
            pairs = list(pairwise(borders))
            ranges[op.name] = [*pairs] if len(pairs) > 1 else [None]
    return ranges


class Drafter:
    """Draws a draft: ops one by one in program order, each on a device that has what it needs."""

    def __init__(
        self, rng: Random, graph: Graph, cut: Cut, takers: dict[str, set[str]], ranges: Ranges
    ) -> None:
        self.rng, self.graph, self.ranges, self.takers = rng, graph, ranges, takers
        self.num_parts = len(cut.fractions)
        self.draft = PlanDraft(graph, cut, tuple(takers))
        self.homes: dict[OracleSpot, str] = {}
        self.version: dict[OracleSpot, int] = {}
        self.copies: dict[tuple[str, str], list[dict[OracleSpot, int]]] = {}
        self.demands: list[tuple[str, set[int]]] = []
        self.ranged: set[str] = set()
        for name in graph.inputs:
            for spot in self.spots(name, None):
                self.homes[spot], self.version[spot] = self.draft.devices[0], 0

    def spots(self, name: str, parts: Range | None) -> list[OracleSpot]:
        if parts is None or self.graph.value[name].batch is None:
            return spots(self.graph, self.num_parts, name, None)
        by_part = [spots(self.graph, self.num_parts, name, part) for part in range(*parts)]
        return list(dict.fromkeys(spot for some in by_part for spot in some))

    def run(self) -> PlanDraft:
        """The draft. Raises `ImpossibleError` if the draw cannot be completed."""
        for op in self.graph.ops:
            device = None
            for parts in self.ranges[op.name]:
                device = self.add(op, parts, device)
        self.add_merges()
        self.add_splits()
        self.add_places()
        self.add_frees()
        self.add_offsets()
        return self.draft

    # Ops, and the copies that bring what they read.

    def add(self, op: Op, parts: Range | None, last: str | None) -> str:
        fixed = set(op.mutates) | {self.graph.value[name].alias_of for name in op.makes}
        touched = list(dict.fromkeys(op.reads + op.mutates))
        good = [
            device
            for device, names in self.takers.items()
            if op.name in names
            and all(self.can_touch(device, name, parts, name in fixed) for name in touched)
            and not (op.rows == "additive" and last not in (None, device))
        ]
        if not good:
            raise ImpossibleError
        device = last if last in good and self.rng.random() < 0.8 else self.rng.choice(good)
        for name in touched:
            self.bring(device, name, parts)
        self.draft.steps.append(Step("run", device, (op.name,), parts))
        if parts is not None:
            self.ranged.update(touched)
        for spot in {spot for name in op.mutates for spot in self.spots(name, parts)}:
            self.version[spot] += 1
        for name in op.makes:
            if self.graph.value[name].alias_of is None:
                for spot in self.spots(name, parts):
                    self.homes[spot], self.version[spot] = device, 0
        return device

    def at_home(self, device: str, name: str, parts: Range | None) -> bool:
        return all(self.homes[spot] == device for spot in self.spots(name, parts))

    def has_copy(self, device: str, name: str, parts: Range | None) -> bool:
        """Whether one fresh copy on the device holds it all."""
        wanted = self.spots(name, parts)
        return any(
            all(copy.get(spot) == self.version[spot] for spot in wanted)
            for copy in self.copies.get((device, name), ())
        )

    def can_touch(self, device: str, name: str, parts: Range | None, fixed: bool) -> bool:
        if self.at_home(device, name, parts):
            return True
        value, root = self.graph.value[name], self.graph.value[self.graph.root[name]]
        if fixed or (value.batch is None) != (root.batch is None):
            return False
        if self.has_copy(device, name, parts):
            return True
        wanted = self.spots(name, parts)
        old = any(spot in copy for copy in self.copies.get((device, name), ()) for spot in wanted)
        homes = {self.homes[spot] for spot in wanted}
        return not old and len(homes) == 1

    def bring(self, device: str, name: str, parts: Range | None) -> None:
        """Copy a value to the device if it is not there."""
        if self.graph.value[name].batch is None:
            parts = None
        if self.has_copy(device, name, parts):
            return
        if not self.at_home(device, name, parts):
            everything = self.spots(name, None)
            apart = {self.homes[spot] for spot in everything}
            if len(apart) == 1 and (device, name) not in self.copies and self.rng.random() < 0.5:
                parts = None
            home = self.homes[self.spots(name, parts)[0]]
            self.draft.steps.append(Step("copy", home, (name,), parts, on=device))
            copy = {spot: self.version[spot] for spot in self.spots(name, parts)}
            self.copies.setdefault((device, name), []).append(copy)
            if parts is not None:
                self.ranged.add(name)
        self.demands.append((self.graph.root[name], {s.cell for s in self.spots(name, parts)}))

    def add_merges(self) -> None:
        for name in self.graph.outputs if self.num_parts > 1 else ():
            if self.graph.value[name].batch is not None:
                good = [
                    device
                    for device in self.draft.devices
                    if self.at_home(device, name, None) or self.has_copy(device, name, None)
                ]
                if not good:
                    raise ImpossibleError
                self.draft.steps.append(Step("merge", self.rng.choice(good), (name,)))
                root = self.graph.root[name]
                self.demands.append((root, {spot.cell for spot in self.spots(name, None)}))

    def add_splits(self) -> None:
        views = {name for name in self.graph.inputs if self.graph.value[name].batch is not None}
        for name in sorted(views):
            aliases = {one for one in self.ranged if self.graph.root[one] == self.graph.root[name]}
            if self.num_parts > 1 and (aliases or self.rng.random() < 0.05):
                self.draft.steps.insert(0, Step("split", self.draft.devices[0], (name,)))

    # Places, frees, offsets.

    def add_places(self) -> None:
        """Give a place to what is needed in one piece but made in several, and to some others."""
        for op in self.graph.ops:
            for name in op.makes:
                if self.graph.value[name].alias_of is None:
                    self.add_place(op, name)

    def add_place(self, op: Op, name: str) -> None:
        ranges = [set(range(*(r or (0, self.num_parts)))) for r in self.ranges[op.name]]
        wanted = [cells for root, cells in self.demands if root == name]
        batched = self.graph.value[name].batch is not None
        needed = batched and any(not any(c <= r for r in ranges) for c in wanted)
        value = self.graph.value[name]
        has_alias = any(self.graph.root[one] == name for one in op.makes if one != name)
        possible = (
            value.dtype != "opaque"
            and len({self.homes[spot] for spot in self.spots(name, None)}) == 1
            and (value.placeable or not (has_alias or op.rows == "additive"))
        )
        if needed and not possible:
            raise ImpossibleError
        if not possible or not (needed or self.rng.random() < 0.4):
            return
        self.draft.places.append(Place(name))
        if not value.placeable:
            self.add_copies(op, name)

    def add_copies(self, op: Op, name: str) -> None:
        """After each run that makes a value which is not placeable: copies into its place."""
        steps: list[Step] = []
        for step in self.draft.steps:
            steps.append(step)
            if step.kind != "run" or step.names != (op.name,):
                continue
            ranges: list[Range | None] = [step.parts]
            if self.graph.value[name].batch is not None and self.num_parts > 1:
                start, stop = step.parts or (0, self.num_parts)
                if stop > start + 1 and self.rng.random() < 0.3:
                    ranges = [(part, part + 1) for part in range(start, stop)]
            for parts in ranges:
                steps.append(Step("copy", step.lane, (name,), parts))
        self.draft.steps = steps

    def add_frees(self) -> None:
        """Free some values on some devices after their last use."""
        touched: dict[tuple[str, str], dict[int, int]] = {}  # (device, root): cell, last step
        whole: dict[tuple[str, str], list[Range | None]] = {}
        placed = {place.value for place in self.draft.places}
        for at, action in enumerate(self.draft.reading().actions):
            for cell in action.touches:
                if cell[0] in ("place", "loose", "made"):
                    device = (
                        str(cell[1])
                        if cell[0] != "place"
                        else self.homes[OracleSpot(str(cell[1]), 0)]
                    )
                    last = touched.setdefault((device, str(cell[-2])), {})
                    last[int(cell[-1] or 0)] = at
        for step in self.draft.steps:
            if step.kind == "run":
                for name in self.graph.op[step.names[0]].makes:
                    parts = step.parts if self.graph.value[name].batch is not None else None
                    whole.setdefault((step.lane, name), []).append(parts)
            elif step.kind == "copy" and step.on is not None:
                whole.setdefault((step.on, step.names[0]), []).append(step.parts)
        kept = {self.graph.root[name] for name in self.graph.outputs} | set(self.graph.inputs)
        copied = {(device, self.graph.root[n]) for device, n in whole if n in self.graph.root}
        aliased = {(d, self.graph.root[n]) for d, n in self.copies if self.graph.root[n] != n}
        behind: list[tuple[int, Step]] = []
        for device, name in sorted((copied & touched.keys()) - aliased):
            if name not in kept and self.rng.random() < 0.5:
                pieces = list(dict.fromkeys(whole[device, name]))
                if name in placed and self.rng.random() < 0.5:
                    pieces = [None]
                for parts in pieces:
                    cells = [spot.cell for spot in self.spots(name, parts)]
                    last_use = max(touched[device, name].get(cell, -1) for cell in cells)
                    behind.append((last_use, Step("free", device, (name,), parts)))
        for at, step in sorted(behind, key=lambda pair: -pair[0]):
            self.draft.steps.insert(at + 1, step)

    def add_offsets(self) -> None:
        """Move some places into shared buffers, over what is dead by then."""
        lives: dict[tuple[str, int], tuple[int, int]] = {}
        kept = {self.graph.root[name] for name in self.graph.outputs}
        for at, action in enumerate(self.draft.reading().actions):
            for cell in action.touches:
                if cell[0] == "place":
                    key = (str(cell[1]), int(cell[2] or 0))
                    end = len(self.draft.steps) if key[0] in kept else at
                    lives[key] = (lives.get(key, (at, at))[0], end)
        for number, place in enumerate(self.draft.places):
            if self.rng.random() < 0.75:
                self.draft.places[number] = self.moved(place, lives)
        used = {place.buffer for place in self.draft.places}
        for device in self.draft.devices:
            for kind, unit in UNITS.values():
                if f"{kind}.{device}" in used:
                    self.draft.buffers.append(Buffer(f"{kind}.{device}", device, unit))

    def moved(self, place: Place, lives: dict[tuple[str, int], tuple[int, int]]) -> Place:
        batched = self.graph.value[place.value].batch is not None
        buffer = f"{UNITS[batched][0]}.{self.homes[OracleSpot(place.value, 0)]}"
        for _ in range(4):
            shared = Place(place.value, buffer, self.rng.randrange(5))
            if not any(self.clash(shared, other, lives) for other in self.draft.places):
                return shared
        return place

    def clash(self, one: Place, two: Place, lives: dict[tuple[str, int], tuple[int, int]]) -> bool:
        """Whether two places share bytes while both are in use, in the order of the draft."""
        if one.value == two.value or one.buffer != two.buffer or one.buffer is None:
            return False
        for part, span in spans(self.graph, self.num_parts, one):
            for other, near in spans(self.graph, self.num_parts, two):
                if overlap(span, near, self.num_parts):
                    start, end = lives[one.value, part]
                    other_start, other_end = lives[two.value, other]
                    if start <= other_end and other_start <= end:
                        return True
        return False


def spans(graph: Graph, num_parts: int, place: Place) -> list[tuple[int, OracleSpan]]:
    """The span of each cell of a place in a buffer."""
    value = graph.value[place.value]
    units = units_of(value.bytes, UNITS[value.batch is not None][1]) or 0
    leading = value.batch is not None and value.batch.dim == 0 and value.batch.outer == ONE
    parts = [part or 0 for part in parts_of(graph, num_parts, place.value)]
    return [(part, OracleSpan(place.offset, units, part if leading else None)) for part in parts]
