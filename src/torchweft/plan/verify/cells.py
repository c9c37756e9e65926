"""What the walk compares: the versions of a graph's values, and the cells that a plan has them in.

The reference (`docs/plans.md`, "The reference"): which version of every value each op sees when ops
run in program order. Between two ops all cells of a root have one version, so a number a root is
enough; inside an op that runs part by part, part p sees what parts 0 .. p-1 left.

A cell is the bytes of one part of a value in one location, and who touched them last:

    CellStore (a rank's memory) -> Location (caller's bytes, a loose piece, a place) -> ByteCell

Every access is checked when the walk makes it: it must be ordered behind those it conflicts
with. The walk takes the steps in an order that lanes and waits allow, so of two accesses that
nothing orders, the later one is caught here, whichever it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torchweft.plan.graph import Graph, Op
from torchweft.plan.plan import Plan, Range
from torchweft.plan.verify.coverage import num_units


class Touch(NamedTuple):
    """How an op touches a root, by which names, and what versions it meets.

    by_part: a run touches the cells of its own parts, else all cells.
    before, rise: the version ahead of the op, and what the op adds; per_part: each part adds it.
    made: the op makes the root.
    """

    root: str
    names: tuple[str, ...]
    by_part: bool
    before: int
    rise: int
    per_part: bool
    made: bool

    @property
    def writes(self) -> bool:
        """Whether the op changes the bytes."""
        return self.made or self.rise > 0

    def versions(self, start: int, stop: int) -> tuple[int | None, int]:
        """(version it must see, version it leaves) when it runs over parts [start:stop]."""
        if self.per_part:
            before = self.before + start
            return (None if self.made and start == 0 else before), self.before + stop
        return (None if self.made else self.before), self.before + self.rise


class Reference(NamedTuple):
    """All touches of every op, the names it uses, and the final version of every root."""

    touches: dict[str, tuple[Touch, ...]]
    final: dict[str, int]


def reference(graph: Graph, num_parts: int) -> Reference:
    """Walk the ops in program order and note the versions."""
    version = {name: 0 for name, root in graph.root.items() if name == root}
    touches: dict[str, tuple[Touch, ...]] = {}
    for op in graph.ops:
        own, roots = [], dict[str, list[str]]()  # each with the names by which the op touches it
        makes = [name for name in op.makes if graph.value[name].alias_of is None]
        for name in (*op.touched, *makes):
            roots.setdefault(graph.root[name], []).append(name)
        for root, names in roots.items():
            touch = _touch(graph, op, root, names, version[root], num_parts)
            version[root] = touch.before + touch.rise * (num_parts if touch.per_part else 1)
            own.append(touch)
        touches[op.name] = tuple(own)
    return Reference(touches, version)


def _touch(
    graph: Graph, op: Op, root: str, names: list[str], version: int, num_parts: int
) -> Touch:
    batched = all(graph.value[name].batch is not None for name in [root, *names])
    by_part = batched and not op.whole
    made = root in op.makes
    mutated = any(graph.root[name] == root for name in op.mutates)
    if made and op.rows == "additive":
        return Touch(root, tuple(names), False, -num_parts, 1, True, True)
    if made or not mutated:
        return Touch(root, tuple(names), by_part, version, 0, False, made)
    return Touch(root, tuple(names), by_part, version, 1, not by_part and not op.whole, False)


Clock = list[int]
Region = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True, eq=False)
class Access:
    """One step's stay at some bytes; `end` is unknown (0) while a two-phase op is in flight."""

    step: int
    lane: int
    end: int

    def before(self, clock: Clock) -> bool:
        """Whether it has ended before whatever has this clock."""
        return 0 < self.end <= clock[self.lane]


@dataclass(slots=True, eq=False)
class ByteCell:
    """Version and last accesses; `lost` is the access that destroyed what was here."""

    version: int | None = None
    write: Access | None = None
    reads: list[Access] = field(default_factory=list)
    lost: Access | None = None
    region: Region | None = None

    def unordered(self, access: Access, clock: Clock, *, writing: bool) -> Access | None:
        """An earlier access that conflicts with this one and is not ordered before it."""
        if self.write is not None and self.write is not access and not self.write.before(clock):
            return self.write
        if writing:
            for read in self.reads:
                if read is not access and not read.before(clock):
                    return read
        return None

    def note(self, access: Access, *, writing: bool) -> None:
        """Remember an access that was checked."""
        if writing:
            self.write, self.reads = access, []
        elif self.write is not access and (not self.reads or self.reads[-1] is not access):
            self.reads.append(access)


class Location:
    """One contiguous home of cells `start` to `stop` of a value."""

    __slots__ = ("buffer", "cells", "name", "start", "stop")

    def __init__(self, name: str, start: int, stop: int, version: int | None = None) -> None:
        self.name, self.start, self.stop = name, start, stop
        self.cells = [ByteCell(version) for _ in range(stop - start)]
        self.buffer: list[ByteCell] | None = None

    def take(self, start: int, stop: int) -> list[ByteCell]:
        """Its cells `start` to `stop`."""
        return self.cells[start - self.start : stop - self.start]

    def holds(self, start: int, stop: int) -> bool:
        """Whether all these cells are here."""
        return self.start <= start and stop <= self.stop


class CellStore:
    """The memory of one rank: what is where."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.num_parts = plan.num_parts
        self.places = {place.value: place for place in plan.places}
        self.devices = {buffer.name: buffer.device for buffer in plan.buffers}
        self.buffers: dict[str, list[ByteCell]] = {buffer.name: [] for buffer in plan.buffers}
        self.homes: dict[tuple[str, str], list[Location]] = {}
        self.loose: dict[tuple[str, str], list[Location]] = {}
        self.handles: dict[tuple[str, str, int], ByteCell] = {}
        self.alone: dict[str, str] = {}
        self.home = plan.lanes[0].device
        for name in graph.inputs:
            if graph.value[name].alias_of is None:
                place = Location(name, 0, self.num_cells(name), version=0)
                self.homes[name, self.home] = [place]

    def num_cells(self, name: str) -> int:
        """How many cells a value has."""
        return 1 if self.graph.value[name].batch is None else self.num_parts

    def cells_of(self, name: str, parts: Range | None) -> Range:
        """The cells of a value that a range of parts means."""
        count = self.num_cells(name)
        return parts if parts is not None and count > 1 else (0, count)

    def where(self, name: str, device: str, cells: Range) -> Location | None:
        """The one location on a device that holds all these cells of a value, if there is one."""
        for location in self.homes.get((name, device), ()):
            if location.holds(*cells):
                return location
        return None

    def piece(
        self, name: str, device: str, cells: Range, *, loose: bool = False
    ) -> Location | None:
        """A new loose piece; None if some of its cells are on the device already."""
        pieces = (self.loose if loose else self.homes).setdefault((name, device), [])
        if any(piece.start < cells[1] and cells[0] < piece.stop for piece in pieces):
            return None
        pieces.append(Location(name, *cells))
        return pieces[-1]

    def place(self, name: str, device: str) -> Location | None:
        """The place of a root, opened by its first writer; None if it is on another device."""
        buffer = self.places[name].buffer
        where = self.alone.setdefault(name, device) if buffer is None else self.devices[buffer]
        if where != device:
            return None
        pieces = self.homes.setdefault((name, device), [])
        if not pieces:
            pieces.append(Location(name, 0, self.num_cells(name)))
            if buffer is not None:
                pieces[0].buffer = self.buffers[buffer]
                for part, cell in enumerate(pieces[0].cells):
                    cell.region = self.region(name, part)
        return pieces[0]

    def region(self, name: str, part: int) -> Region:
        """Where a cell starts and ends in its buffer, per row of each part (see docs/plans.md)."""
        place, value = self.places[name], self.graph.value[name]
        assert place.buffer is not None, "only places in a buffer have a region"
        units = num_units(self.plan, self.graph, name, place.buffer)
        assert units is not None, "the static rules refuse such a place"
        rows, leading = range(self.num_parts), False
        if value.batch is not None and self.num_parts > 1:
            ahead = (value.batch.outer, *value.shape[: value.batch.dim])
            once = value.bytes.terms[0][0].count(self.graph.batch or "") == 1
            leading = once and all(dim.constant == 1 for dim in ahead)
        if not leading:
            return tuple(place.offset for _ in rows), tuple(place.offset + units for _ in rows)
        start = tuple(place.offset + (units if row < part else 0) for row in rows)
        return start, tuple(place.offset + (units if row <= part else 0) for row in rows)

    def neighbours(self, location: Location, cell: ByteCell) -> list[ByteCell]:
        """Cells of other values whose bytes overlap this cell's, which is about to be written.

        Those that it covers whole are forgotten: what is ordered behind it is behind them too.
        Not so if parts interleave: then a sister of this cell overlaps them as well.
        """
        if location.buffer is None or cell.region is None:
            return []
        start, end = cell.region
        covers = sum(sister.region == cell.region for sister in location.cells) == 1
        kept, overlapping = [cell], []
        for other in location.buffer:
            if other is cell:
                continue
            assert other.region is not None, "cells of a buffer have a region"
            other_start, other_end = other.region
            apart = _below(end, other_start) or _below(other_end, start) or other in location.cells
            if not apart:
                overlapping.append(other)
            if apart or not (covers and _below(start, other_start) and _below(other_end, end)):
                kept.append(other)
        location.buffer[:] = kept
        return overlapping

    def handle(self, name: str, device: str, part: int) -> ByteCell:
        """The cell that stands for a view: written when it is made, read when it is used."""
        return self.handles.setdefault((name, device, part), ByteCell())


def _below(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return all(a <= b for a, b in zip(left, right, strict=True))
