"""The `Reading`: one rank's plan as actions on cells, taken word by word from docs/plans.md.

    Plan --read--> Reading: actions, what each wait waits for, which places overlap,
                            what the caller's bytes hold first, what every cell must hold at last

A reading says nothing about order; the two judges (`interleavings`, `closure`) add that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from torchweft.plan.graph import Collective, Op
from torchweft.plan.plan import Plan, Step
from torchweft.plan.sizes import ONE
from torchweft_tools.bench.oracle.content import (
    Action,
    Cell,
    Content,
    Move,
    OracleTalk,
    Overlaps,
    UnsafeError,
)
from torchweft_tools.bench.oracle.overlap import OracleSpan, overlap, units_of
from torchweft_tools.bench.oracle.reference import OracleReference, OracleSpot, follow
from torchweft_tools.bench.oracle.rules import check


@dataclass(frozen=True, eq=False)
class Reading:
    """What the steps of one rank's plan do. edges: what must have ended before an action begins."""

    rank: int
    plan: Plan
    actions: tuple[Action, ...]
    waits: dict[int, int]
    issues: dict[int, int]
    overlaps: Overlaps
    first: Content
    last: tuple[tuple[Cell, int], ...]
    edges: tuple[tuple[Action, Action], ...] = ()

    def opens(self, at: int, action: Action | None) -> int | None:
        """The issue that must have ended before a complete begins: one that talks itself, of what
        has landed; any other only waits."""
        return self.issues.get(at) if action is not None and action.late else None

    def check_last(self, content: Content) -> None:
        """Raise `UnsafeError` unless every output and mutated input has its final version."""
        for cell, version in self.last:
            held = content.get(cell)
            if held is None or held[1] != version:
                raise UnsafeError(f"in the end {cell} holds {held}, not version {version}")


def read(plan: Plan, rank: int = 0, num_ranks: int = 1) -> Reading:
    """The reading of a plan. Raises `UnsafeError` if it breaks a rule at any speed of its lanes."""
    check(plan)
    return _PlanReader(plan, rank, num_ranks).reading()


class _PlanReader:
    def __init__(self, plan: Plan, rank: int, num_ranks: int) -> None:
        self.plan, self.graph, self.rank, self.num_ranks = plan, plan.graph, rank, num_ranks
        self.reference: OracleReference = follow(plan.graph, plan.num_parts)
        self.home = plan.lanes[0].device
        self.copied: set[tuple[str, str, int | None]] = set()
        self.ran_on: dict[tuple[str, int | None], str] = {}
        self.own: set[str] = set()  # what the group of ops being read has made itself
        for step in plan.steps:
            self.note(step)
        self.place_device = {
            place.value: self.device_of_place(place.value) for place in plan.places
        }

    def note(self, step: Step) -> None:
        """Write down where copies go and where ops run: that decides where values are."""
        if step.kind == "copy":
            name, where = step.names[0], step.on or "its place"
            for part in self.parts(step, name):
                if (where, name, part) in self.copied:
                    raise UnsafeError(f"{step.label}: it is copied twice")
                self.copied.add((where, name, part))
        elif step.kind in ("run", "issue"):
            for name in step.names:
                for part in self.op_parts(step, self.graph.op[name]):
                    self.ran_on[name, part] = self.device(step)

    def device(self, step: Step) -> str:
        lane = step.on if step.kind == "issue" and step.on is not None else step.lane
        return self.plan.lane[lane].device

    def device_of_place(self, name: str) -> str:
        """The device of a buffer, or of the first step that makes the value of a lone place."""
        name_of_buffer = next(place.buffer for place in self.plan.places if place.value == name)
        for buffer in self.plan.buffers:
            if buffer.name == name_of_buffer:
                return buffer.device
        maker = self.graph.maker[name].name
        return next(device for (op, _), device in self.ran_on.items() if op == maker)

    def parts(self, step: Step, name: str) -> list[int | None]:
        """The parts of a value that a step means."""
        every = self.reference.parts_of(name)
        return every if step.parts is None or every == [None] else list(range(*step.parts))

    def op_parts(self, step: Step, op: Op) -> list[int | None]:
        if op.whole:
            return [None]
        return list(range(*(step.parts or (0, self.plan.num_parts))))

    # Where a value is.

    def location(self, device: str, name: str, part: int | None) -> Cell:
        """The location that holds a part of a value on a device, if any does."""
        value = self.graph.value[name]
        if value.alias_of is None:
            if self.place_device.get(name) == device:
                return self.birthplace(device, name) if name in self.own else ("place", name)
            if name in self.graph.inputs and device == self.home:
                return ("caller", name)
            return ("loose", device, name)
        if (device, name, part) in self.copied:
            return ("loose", device, name)
        if name in self.graph.inputs:
            at_home = device == self.home
            return ("caller", self.graph.root[name]) if at_home else ("loose", device, name)
        of = self.graph.value[value.alias_of]
        inner = None if of.batch is None else (part or 0)
        return self.location(device, of.name, inner)

    def cells(self, device: str, name: str, parts: Iterable[int | None]) -> dict[Cell, OracleSpot]:
        """The cells that hold parts of a value on a device, each with the spot that it is."""
        return {
            (*self.location(device, name, part), spot.cell): spot
            for part in parts
            for spot in self.reference.spots(name, part)
        }

    def birthplace(self, device: str, name: str) -> Cell:
        """The location into which a run on a device makes a root."""
        if name not in self.place_device:
            return ("loose", device, name)
        if self.place_device[name] != device:
            raise UnsafeError(f"{name} is made on {device}, but its place is on another device")
        maker = self.graph.maker[name].name
        by_kernel = any(step.by and maker in step.names for step in self.plan.steps)
        direct = self.graph.value[name].placeable and not by_kernel
        return ("place", name) if direct else ("made", device, name)

    # What a step does.

    def touch(self, step: Step, name: str, parts: list[int | None], ranged: bool) -> list[Move]:
        """Handles are there, and the cells are in one piece, whatever their versions."""
        device, value, moves = self.device(step), self.graph.value[name], []
        if name in self.graph.inputs:
            if ranged and value.batch is not None:
                moves.append(Move("see", (("split", name),)))
        elif value.alias_of is not None:
            for part in parts:
                if (device, name, part) not in self.copied:
                    moves.append(Move("see", (("view", device, name, part),)))
        return [*moves, Move("together", tuple(self.cells(device, name, parts)))]

    def run(self, step: Step, at: int) -> list[Move]:
        moves: list[Move] = []
        for name in step.names:
            op = self.graph.op[name]
            ranged = step.parts is not None and not op.whole
            for value in dict.fromkeys(op.reads + op.mutates):
                moves += self.touch(step, value, self.parts(step, value), ranged)
            for part in self.op_parts(step, op):
                moves += self.instance(op, part, self.device(step), ("step", self.rank, at))
            self.own.update(op.makes)
        self.own.clear()
        return moves

    def instance(
        self, op: Op, part: int | None, device: str, piece: tuple[str | int, ...]
    ) -> list[Move]:
        """One op on one part (None: on all): it sees versions, raises what it mutates, makes."""
        moves, needs = [], self.reference.needs[op.name, part]

        def parts(name: str) -> list[int | None]:
            every = self.reference.parts_of(name)
            return every if part is None or every == [None] else [part]

        for name in dict.fromkeys(op.reads + op.mutates):
            for cell, spot in self.cells(device, name, parts(name)).items():
                moves.append(Move("see", (cell,), version=needs[spot]))
        changed = {cell: 0 for name in op.mutates for cell in self.cells(device, name, parts(name))}
        moves += [Move("raise", (cell,)) for cell in changed]
        for name in op.makes:
            if any((device, name, one) in self.copied for one in parts(name)):
                raise UnsafeError(f"{name} is made on {device} and copied to it")
            if self.graph.value[name].alias_of is None:
                moves += self.make(op, part, device, name, piece)
            else:
                views: list[Cell] = [("view", device, name, one) for one in parts(name)]
                moves += [Move("make", (view,), piece, 0) for view in views]
        return moves

    def make(
        self, op: Op, part: int | None, device: str, name: str, piece: tuple[str | int, ...]
    ) -> list[Move]:
        where = self.birthplace(device, name)
        piece = piece if where[0] != "place" else ("place", name)
        spots = self.reference.spots(name, part)
        if op.rows != "additive":
            return [Move("make", ((*where, spot.cell),), piece, 0) for spot in spots]
        begin, cell = -self.plan.num_parts, (*where, 0)
        if part == 0:
            return [Move("make", (cell,), piece, begin + 1)]
        return [Move("see", (cell,), version=begin + (part or 0)), Move("raise", (cell,))]

    def copy(self, step: Step, at: int) -> list[Move]:
        name, device = step.names[0], self.device(step)
        parts = self.parts(step, name)
        if step.on is None:
            spots = [spot for part in parts for spot in self.reference.spots(name, part)]
            sources: list[Cell] = [("made", device, name, spot.cell) for spot in spots]
            moves = [Move("together", tuple(sources))]
            for cell in sources:
                place: Cell = ("place", name, cell[-1])
                moves.append(Move("copy", (cell, place), ("place", name)))
                moves.append(Move("clear", (cell,)))
            return moves
        at_home = name in self.graph.inputs and step.on == self.home
        if at_home or self.place_device.get(name) == step.on:
            raise UnsafeError(f"{step.label}: it is there already")
        moves = self.touch(step, name, parts, step.parts is not None)
        for cell in self.cells(device, name, parts):
            target: Cell = ("loose", step.on, name, cell[-1])
            moves.append(Move("copy", (cell, target), ("step", self.rank, at)))
        return moves

    def merge(self, step: Step) -> list[Move]:
        name, device = step.names[0], self.device(step)
        parts = self.reference.parts_of(name)
        moves = self.touch(step, name, parts, False)
        for cell, spot in self.cells(device, name, parts).items():
            moves.append(Move("see", (cell,), version=self.reference.final[spot]))
        return [*moves, Move("make", (("merged", name),), ("merged",), 0)]

    def free(self, step: Step) -> list[Move]:
        name, device, moves = step.names[0], self.device(step), []
        for part in self.parts(step, name):
            for spot in self.reference.spots(name, part):
                moves.append(Move("clear", ((*self.location(device, name, part), spot.cell),)))
        return moves

    def moves(self, step: Step, at: int) -> list[Move]:
        if step.kind == "split":
            return [Move("make", (("split", step.names[0]),), ("split",), 0)]
        if step.kind == "copy":
            return self.copy(step, at)
        if step.kind == "merge":
            return self.merge(step)
        return self.free(step) if step.kind == "free" else self.run(step, at)

    # All together.

    def talks(self, step: Step) -> list[OracleTalk]:
        talks = []
        spoken_in = ("run", "issue", "complete") if step.by is not None else ("run", "issue")
        ops = [self.graph.op[name] for name in step.names if step.kind in spoken_in]
        spoken = [(op.name, op.collective) for op in ops if op.collective is not None]
        for name, talk in self.said(step, spoken) if step.by is not None else spoken:
            cut = self.plan.cut if step.parts else None
            facts = (talk.tag or name, step.parts, cut)
            if talk.peer is not None:
                here = self.rank if self.num_ranks > 1 else -1
                ends = (here, talk.peer) if talk.kind == "send" else (talk.peer, here)
                talks.append(OracleTalk((talk.communicator, *ends), ends, facts))
            else:
                members = self.graph.members(talk.communicator, self.num_ranks)
                talks.append(OracleTalk((talk.communicator,), members, (talk.kind, *facts)))
        return talks

    def said(
        self, step: Step, replaced: list[tuple[str, Collective]]
    ) -> list[tuple[str, Collective]]:
        """What a kernel says in the place of the collectives that it replaces."""
        declared = [one for one in self.plan.declared if one.name == step.by]
        if replaced and not declared:
            raise UnsafeError(f"{step.label}: nobody knows what the kernel {step.by} says")
        told = declared[0].talks if replaced else ()
        talks = [(kind, phase) for kind, phase in told if step.kind in ("run", phase)]
        names = [replaced[min(at, len(replaced) - 1)] for at in range(len(talks))]
        return [
            (name, replace(talk, kind=kind))
            for (kind, _), (name, talk) in zip(talks, names, strict=True)
        ]

    def reading(self) -> Reading:
        actions, waits, issues = [], {}, {}
        first_of: dict[str, int] = {}
        for at, step in enumerate(self.plan.steps):
            first_of.setdefault(step.label, at)
        for at, step in enumerate(self.plan.steps):
            if step.kind == "wait":
                if step.target not in first_of:
                    raise UnsafeError(f"{step.label}: nothing has this label")
                waits[at] = first_of[step.target]
            elif step.kind == "complete":
                issues[at] = first_of[f"issue{step.label[len('complete') :]}"]
        ends = {issue: complete for complete, issue in issues.items()}
        for at, step in enumerate(self.plan.steps):
            if step.kind not in ("wait", "complete"):
                moves = tuple(self.moves(step, at))
                talks, end = tuple(self.talks(step)), ends.get(at, at)
                late = tuple(self.talks(self.plan.steps[end])) if end != at else ()
                actions.append(Action(self.rank, at, end, step.label, moves, talks, late))
        overlaps = self.overlaps()
        for action in actions:
            _check_alone(action, overlaps)
        first: Content = {}
        for name in self.graph.inputs:
            for spot in self.reference.spots(name, None):
                first["caller", spot.root, spot.cell] = (("caller", spot.root), 0)
        seen = (tuple(actions), waits, issues, overlaps, first, tuple(self.last()))
        return Reading(self.rank, self.plan, *seen, tuple(self.edges(actions)))

    def edges(self, actions: list[Action]) -> Iterator[tuple[Action, Action]]:
        """(earlier, later) for all that the plan says to come after something else."""
        steps = [self.plan.steps[action.first] for action in actions]
        for action, step in zip(actions, steps, strict=True):
            for name, parts in step.after:
                op = self.graph.op[name]
                wanted = [None] if op.whole else list(range(*(parts or (0, self.plan.num_parts))))
                for other, earlier in zip(actions, steps, strict=True):
                    runs = earlier.kind in ("run", "issue") and name in earlier.names
                    if runs and set(wanted) & set(self.op_parts(earlier, op)):
                        yield other, action

    def last(self) -> list[tuple[Cell, int]]:
        """The cells that must have a final version when all lanes have ended."""
        merged = {s.names[0]: self.device(s) for s in self.plan.steps if s.kind == "merge"}
        finals: list[tuple[Cell, int]] = []
        for name in self.graph.outputs:
            device = merged.get(name, self.home)
            if name not in merged and name in self.graph.maker:
                op = self.graph.maker[name]
                device = self.ran_on[op.name, None if op.whole else self.plan.num_parts - 1]
            cells = self.cells(device, name, self.reference.parts_of(name))
            finals += [(cell, self.reference.final[spot]) for cell, spot in cells.items()]
        for root in self.graph.mutated & set(self.graph.inputs):
            for spot in self.reference.spots(root, None):
                finals.append((("caller", root, spot.cell), self.reference.final[spot]))
        return finals

    def overlaps(self) -> Overlaps:
        """For each placed cell the cells of other values that share bytes with it."""
        spans: dict[Cell, tuple[str, OracleSpan]] = {}
        for place in self.plan.places:
            if place.buffer is None:
                continue
            value = self.graph.value[place.value]
            unit = next(buffer.unit for buffer in self.plan.buffers if buffer.name == place.buffer)
            units = units_of(value.bytes, unit)
            if units is None:
                raise UnsafeError(f"place {place.value}: not a whole number of units")
            leading = value.batch is not None and value.batch.dim == 0 and value.batch.outer == ONE
            for spot in self.reference.spots(place.value, None):
                span = OracleSpan(place.offset, units, spot.cell if leading else None)
                spans["place", place.value, spot.cell] = (place.buffer, span)
        sharing: dict[Cell, list[Cell]] = {}
        for (one, (buffer, span)), (two, (other, near)) in combinations(spans.items(), 2):
            if buffer == other and one[1] != two[1] and overlap(span, near, self.plan.num_parts):
                sharing.setdefault(one, []).append(two)
                sharing.setdefault(two, []).append(one)
        return {cell: tuple(others) for cell, others in sharing.items()}


def _check_alone(action: Action, overlaps: Overlaps) -> None:
    """A step must not write bytes that it also touches under another name."""
    for cell in action.writes if overlaps else ():
        if any(near in action.touches for near in overlaps.get(cell, ())):
            raise UnsafeError(f"{action.label}: it writes {cell} over bytes that it touches itself")
