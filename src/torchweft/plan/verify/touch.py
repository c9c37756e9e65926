"""The `Rank`: its plan, and what each step does to the bytes, checked access by access."""

from __future__ import annotations

from typing import NamedTuple

from torchweft.plan.graph import Op
from torchweft.plan.plan import Plan, Range, Step, bracket
from torchweft.plan.verify.cells import (
    Access,
    ByteCell,
    CellStore,
    Clock,
    Location,
    Touch,
    reference,
)
from torchweft.plan.verify.coverage import Finding

MIXED = -(10**9)
"""The version of a copy whose sources had different versions: no reader expects it."""
Channel = tuple[object, ...]


class TalkWalk(NamedTuple):
    """A collective that has started: where, what it says, and what its rank knew then."""

    channel: Channel
    number: int
    says: object
    step: int
    lane: int
    clock: Clock


class Rank:
    """One rank's plan, its memory, and what has been said and done so far. Applies steps to the
    memory and reports every access that breaks a rule."""

    def __init__(self, number: int, plan: Plan, findings: list[Finding]) -> None:
        self.number, self.plan, self.graph, self.findings = number, plan, plan.graph, findings
        self.labels = [step.label for step in plan.steps]
        first = {label: index for index, label in reversed(list(enumerate(self.labels)))}
        self.targets = {first.get(step.target) for step in plan.steps if step.target is not None}
        self.ends: dict[str, Clock] = {}
        self.flying: dict[
            tuple[tuple[str, ...], Range | None], tuple[Access, Clock, list[TalkWalk]]
        ] = {}
        self.runs: dict[tuple[str, int], Access] = {}
        self.said: dict[Channel, list[TalkWalk]] = {}
        self.store = CellStore(plan, plan.graph)
        self.reference = reference(plan.graph, plan.num_parts)
        self.made_on: dict[str, str] = {}
        self.merged: dict[str, Location] = {}
        self.step = plan.steps[0] if plan.steps else Step("wait", "")
        self.access, self.clock = Access(0, 0, 0), list[int]()

    def run(self, step: Step, access: Access, clock: Clock) -> None:
        """A run or an issue: all its ops, one after another."""
        self.step, self.access, self.clock = step, access, clock
        device = self.plan.lane[step.lane].device
        inside: dict[str, Location] = {}
        for name in step.names:
            op = self.graph.op[name]
            for touch in self.reference.touches[name]:
                if touch.made:
                    self.make(touch, device, inside)
                else:
                    self.use(op, touch, device, inside)
            for made in op.makes:
                if self.graph.value[made].alias_of is not None:
                    self.made_on.setdefault(made, device)
                    for part in range(*self.store.cells_of(made, step.parts)):
                        self.write(self.store.handle(made, device, part), None, made, part)

    def make(self, touch: Touch, device: str, inside: dict[str, Location]) -> None:
        """Write a root that the op makes: into its place, or as a new loose piece."""
        root, store = touch.root, self.store
        cells = store.cells_of(root, self.step.parts if touch.by_part else None)
        before, after = touch.versions(*(self.step.parts or (0, self.plan.num_parts)))
        placed = root in store.places
        loose = placed and root in self.plan.copied
        if before is not None:  # a further part of a sum
            pieces = (store.loose if loose else store.homes).get((root, device), [])
            location = pieces[0] if pieces else None
            if location is None:
                self.report("race", f"{self.step.label} adds to {root!r} ahead of part 0.")
                return
            self.read(location.cells[0], before, root, 0)
            self.write(location.cells[0], after, root, 0, location)
            inside[root] = location
            return
        location = store.place(root, device) if placed else store.piece(root, device, cells)
        if location is not None and loose:
            location = store.piece(root, device, cells, loose=True)
        if location is None:
            self.report("memory", f"{self.step.label} cannot make {root!r} there: see its place.")
            return
        self.made_on.setdefault(root, device)
        inside[root] = location
        for part, cell in enumerate(location.take(*cells), cells[0]):
            self.write(cell, after, root, part, location)

    def use(self, op: Op, touch: Touch, device: str, inside: dict[str, Location]) -> None:
        """Read, and perhaps change, a root through the names that the op has for it."""
        parts = self.step.parts if touch.by_part else None
        before, after = touch.versions(*(self.step.parts or (0, self.plan.num_parts)))
        names = []
        for name in touch.names:
            cells = self.store.cells_of(name, parts)
            own = name == touch.root or touch.writes
            copied = None if own else self.store.where(name, device, cells)
            if copied is None:
                names.append(name)
                continue
            if name not in self.graph.maker:
                self.view(name, self.step.parts, device)
            for part, cell in enumerate(copied.take(*cells), cells[0]):
                self.read(cell, before, name, part)
        if not names:
            return
        for name in names:
            if name != touch.root and name not in self.graph.maker and device != self.store.home:
                self.missing(name, self.store.cells_of(name, parts), device)
                return
            self.view(name, self.step.parts, device)
        cells = self.store.cells_of(touch.root, parts)
        location = inside.get(touch.root) or self.store.where(touch.root, device, cells)
        if location is None:
            self.missing(touch.root, cells, device)
            return
        for part, cell in enumerate(location.take(*cells), cells[0]):
            self.read(cell, before, names[0], part)
            if touch.writes:
                self.write(cell, after, names[0], part, location)

    def view(self, name: str, parts: Range | None, device: str) -> None:
        """Read the handle of a view: an alias that an op made, or a part of a split input."""
        is_input = name not in self.graph.maker
        if is_input:
            device = self.store.home
            if parts is None or self.store.num_cells(name) == 1:
                return
        elif self.graph.value[name].alias_of is None:
            return
        for part in range(*self.store.cells_of(name, parts)):
            cell = self.store.handle(name, device, part)
            if cell.write is None:
                how = f"splits {name!r}" if is_input else f"makes the view {name!r} on {device!r}"
                text = f"{self.step.label} comes before anything {how}."
                self.report("race", text, f"Add: split {name}" if is_input else "")
                return
            self.read(cell, None, name, part)

    def move(self, step: Step, access: Access, clock: Clock) -> None:
        """A split, merge, copy or free."""
        self.step, self.access, self.clock = step, access, clock
        device, name = self.plan.lane[step.lane].device, step.names[0]
        cells = self.store.cells_of(name, step.parts)
        if step.kind == "split":
            for part in range(*cells):
                self.write(self.store.handle(name, self.store.home, part), None, name, part)
        elif step.kind == "merge":
            self.merge(name, cells, device)
        elif step.kind == "free":
            self.free(name, cells, device)
        else:
            self.copy(name, cells, device)

    def merge(self, name: str, cells: Range, device: str) -> None:
        """Hand out an output: all of it, in one location, in its final version."""
        root = self.graph.root[name]
        location = self.store.where(name, device, cells)  # an alias may have been copied here
        if location is None:
            self.view(name, None, device)
            location = self.store.where(root, device, self.store.cells_of(root, None))
        if location is None:
            self.missing(root, cells, device)
            return
        self.merged[name] = location
        for part, cell in enumerate(location.cells):
            self.read(cell, self.reference.final[root], name, part)

    def free(self, name: str, cells: Range, device: str) -> None:
        """Destroy cells, wherever on the device they are."""
        for part in range(*cells):
            location = self.store.where(name, device, (part, part + 1))
            if location is None:
                self.missing(name, (part, part + 1), device)
                return
            cell = location.take(part, part + 1)[0]
            if cell.lost is not None:
                self.destroyed("frees", self.at(name, part), cell.lost)
            if cell.version is None:
                self.report("order", f"{self.step.label} comes before anything makes it.")
            self.write(cell, cell.version, name, part, location)
            cell.lost = self.access

    def copy(self, name: str, cells: Range, device: str) -> None:
        """Copy cells into their place, or to another device."""
        store, root = self.store, self.graph.root[name]
        if self.step.on is None:
            pieces = [p for p in store.loose.get((name, device), ()) if p.holds(*cells)]
            source, target = (pieces[0] if pieces else None), store.place(name, device)
            source_cells = cells
        else:
            source, source_cells = store.where(name, device, cells), cells
            if source is None and name != root:
                parts = self.step.parts if store.num_cells(name) > 1 else None
                source_cells = store.cells_of(root, parts)
                source = store.where(root, device, source_cells)
            self.view(name, self.step.parts, device)
            target = store.piece(name, self.step.on, cells)
        if source is None:
            self.missing(name, cells, device)
            return
        if target is None:
            text = f"{self.step.label}: it is there already, or its place is elsewhere."
            self.report("coverage", text)
            return
        versions = []
        for part, cell in enumerate(source.take(*source_cells), source_cells[0]):
            self.read(cell, None, name, part)
            versions.append(MIXED if cell.version is None else cell.version)
        if len(versions) != cells[1] - cells[0]:
            versions = [versions[0] if len(set(versions)) == 1 else MIXED] * (cells[1] - cells[0])
        for part, cell in enumerate(target.take(*cells), cells[0]):
            if self.step.on is None and cell.version is not None:
                self.report("coverage", f"{self.step.label}: it is there already.")
            self.write(cell, versions[part - cells[0]], name, part, target)

    def finish(self) -> None:
        """After the last step: outputs and changed inputs have their final versions."""
        graph, store = self.graph, self.store
        for name in dict.fromkeys(graph.outputs):
            device = store.home if name not in graph.maker else self.made_on.get(name, store.home)
            whole = store.cells_of(graph.root[name], None)
            location = self.merged.get(name) or store.where(graph.root[name], device, whole)
            self.last(name, location)
        for name in graph.inputs:
            if name in graph.mutated:
                self.last(name, store.where(name, store.home, store.cells_of(name, None)))

    def last(self, name: str, location: Location | None) -> None:
        """Check what is handed back to the caller."""
        for cell in location.cells if location else [ByteCell()]:
            if cell.lost is not None:
                at = cell.lost.step
                text = f"{self.plan.steps[at].label} destroys {name!r}, which is handed out."
                self.findings.append(Finding("memory", text, at, "", self.number))
                return
            if cell.version != self.reference.final[self.graph.root[name]]:
                text = f"at the end {name!r} is not what the graph makes it."
                self.findings.append(Finding("order", text, None, "", self.number))
                return

    def read(self, cell: ByteCell, version: int | None, name: str, part: int) -> None:
        """Check one read: something is there, nobody is writing it, and it is the right version."""
        where = self.at(name, part)
        other = cell.unordered(self.access, self.clock, writing=False)
        if cell.lost is not None:
            self.destroyed("reads", where, cell.lost)
        elif other is not None:
            self.race("reads", where, other)
        elif cell.version is None and cell.write is None:
            self.report("race", f"{self.step.label} reads {where} before anything makes it.")
        elif version is not None and cell.version != version:
            text = f"{self.step.label} reads {where} after {cell.version} changes; "
            self.report("order", f"{text}in program order it comes after {version}.")
        cell.note(self.access, writing=False)

    def write(
        self,
        cell: ByteCell,
        version: int | None,
        name: str,
        part: int,
        location: Location | None = None,
    ) -> None:
        """Check one write: nobody else is at these bytes; whatever overlapped them is lost."""
        other = cell.unordered(self.access, self.clock, writing=True)
        if other is not None:
            self.race("writes", self.at(name, part), other)
        if location is not None and location.buffer is not None:
            for near in self.store.neighbours(location, cell):
                other = near.unordered(self.access, self.clock, writing=True)
                if other is not None:
                    self.race("writes over the bytes of", self.at(name, part), other)
                if near.write is self.access or self.access in near.reads:
                    text = f"{self.step.label} writes {self.at(name, part)} over what it touches."
                    self.report("memory", text, f"Give {name!r} another place.")
                if near.lost is None:
                    near.lost = self.access
        cell.version = version
        cell.note(self.access, writing=True)

    def at(self, name: str, part: int) -> str:
        return f"{name!r} of part {part}" if self.store.num_cells(name) > 1 else repr(name)

    def destroyed(self, does: str, where: str, lost: Access) -> None:
        """Say who destroyed bytes, and whether that came first or only may come first."""
        label = self.plan.steps[lost.step].label
        text = f"{self.step.label} {does} {where}, whose bytes {label}"
        if lost is self.access or lost.before(self.clock):
            cure = "Free it later, or give one of the two another place."
            self.report("memory", f"{text} has destroyed.", cure)
        else:
            cure = f"Run lower(plan), or put before {label}: wait {_end(self.step)}"
            self.report("race", f"{text} destroys, and nothing orders the two.", cure)

    def race(self, does: str, where: str, other: Access) -> None:
        step = self.plan.steps[other.step]
        text = (
            f"{self.step.label} on lane {self.step.lane!r} {does} {where}, "
            f"but nothing orders it behind {step.label} on lane {step.lane!r}."
        )
        self.report("race", text, f"Run lower(plan), or put before it: wait {_end(step)}")

    def missing(self, name: str, cells: Range, device: str) -> None:
        """Say why cells are not to be had on a device in one piece: not yet, or not at all."""
        which = name + (bracket(cells) if self.store.num_cells(name) > 1 else "")
        if any(self.brings(step, name, cells, device) for step in self.plan.steps):
            self.report("race", f"{self.step.label} needs {which} before anything makes it there.")
            return
        homes = [(len(at), where) for (key, where), at in self.store.homes.items() if key == name]
        there = ", ".join(f"{count} on {where!r}" for count, where in homes if count)
        text = (
            f"{self.step.label} needs {which} in one piece on {device!r}; it has {there or 'none'}."
        )
        self.report("memory", text, f"Run lower(plan), or give {name!r} a place.")

    def brings(self, step: Step, name: str, cells: Range, device: str) -> bool:
        """Whether a step makes or copies these cells of a value on a device, in one piece."""
        if step.kind == "copy":
            named, where = step.names == (name,), step.on or self.plan.lane[step.lane].device
        else:
            makes = [self.graph.op[op].makes for op in step.names if step.kind in ("run", "issue")]
            named, where = any(name in made for made in makes), self.plan.lane[step.lane].device
        start, stop = self.store.cells_of(name, step.parts)
        whole = name in self.store.places or (start <= cells[0] and cells[1] <= stop)
        return named and where == device and whole

    def report(self, rule: str, text: str, cure: str = "") -> None:
        self.findings.append(Finding(rule, text, self.access.step, cure, self.number))


def _end(step: Step) -> str:
    """The label of the step that ends what this one starts."""
    return f"complete {step.label[6:]}" if step.kind == "issue" else step.label
