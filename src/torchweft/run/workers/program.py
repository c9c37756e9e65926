"""A `Script`: a plan for workers, with a `DevicePart` for each device: its lanes, and its message.

    Load (groups, inputs, rows wanted) --draw--> Drawing (a Graph, and its rows) --planner--> Plan
    Plan, Drawing --write_script--> Script --message--> data, tensors --> DevicePart of the worker

In the graph a group is an op, and each of its results a value. Inputs start on the home device;
`answer`, the last op, runs there and reads every output, so a plan brings them home.

The plan is the lowered, verified one; a device gets its own lanes of it as text, and does what they
say in the order in which they say it, waits included:

    one          wait copy leaf.0.out0 to one    until these rows have arrived
    one          composer.3                      run the group of this name
    one.to.two   wait composer.3                 done: the steps of a device stand in order
    one.to.two   copy composer.3.out0 to two     sent beside compute, with the other copies there

Rows live until the call ends, so that a `free` has nothing to do. What a cell needs of weights is
*resident*: it was sent before. A script serves all calls of its plan, so that messages are written
once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import CaptureError, PlanError, clip
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.plan import Plan
from torchweft.plan.sizes import Size
from torchweft.run.workers.cell import ROOM, Cell, Spec, count_of, reading, spec_named
from torchweft.run.workers.channel import bytes_of
from torchweft.run.workers.grouping import Block, Group
from torchweft.run.workers.recorded import RecordedPart, RowStore

HOME = "home"


@dataclass(frozen=True, eq=False)
class Load:
    """What is to run: groups, the blocks of rows that are there, and the rows wanted, by spec.
    The store has the rows of these blocks, and gets those wanted."""

    groups: list[Group]
    inputs: dict[str, Block]
    outputs: dict[Spec, Tensor]
    num_rows: dict[Spec, int]
    store: RowStore

    def rows(self, name: str) -> Tensor:
        """The rows of an input."""
        spec, start, count = self.inputs[name]
        return self.store.rows[spec][start : start + count]

    @cached_property
    def structure(self) -> tuple[object, ...]:
        """Equal for loads that one plan can serve: equal cells on equal rows, for equal outputs."""
        groups = tuple([(group.cell, group.num_rows, group.starts) for group in self.groups])
        read = [group.rows.reshape(-1) for group in self.groups]
        digest = hashlib.sha256(bytes_of(torch.cat([*read, *self.outputs.values()]))).digest()
        sizes = tuple((spec, len(rows)) for spec, rows in self.outputs.items())
        facts = groups, sizes, tuple(self.inputs.items()), tuple(self.num_rows.items())
        return *facts, digest


@dataclass(frozen=True, eq=False)
class Drawing:
    """A graph of groups, with the groups and the blocks of rows behind its names."""

    graph: Graph
    groups: dict[str, Group]
    blocks: dict[str, Block]
    weights: frozenset[str]
    num_rows: dict[Spec, int]


def draw(load: Load, weights: Mapping[str, Tensor]) -> Drawing:
    """The drawing of a load; `weights`: all that its cells may need, by name."""
    blocks: dict[str, Block] = {}
    owner = {spec: torch.full((count,), -1) for spec, count in load.num_rows.items()}
    names: list[str] = []

    def add(name: str, spec: Spec, start: int, count: int) -> Value:
        blocks[name] = spec, start, count
        owner[spec][start : start + count] = len(names)
        names.append(name)
        return Value(name, (Size.of(count * spec.num_bytes),), "uint8")

    def owners(spec: Spec, rows: Tensor) -> list[str]:
        return [names[at] for at in sorted(set(owner[spec][rows].flatten().tolist()))]

    values = [add(name, *block) for name, block in load.inputs.items()]
    groups = {f"{group.cell.name}.{at}": group for at, group in enumerate(load.groups)}
    makes: dict[str, list[Value]] = {}
    resident: dict[str, int] = {}  # bytes
    for name, group in groups.items():
        makes[name] = [add(f"{name}.out{at}", *block) for at, block in enumerate(group.results)]
        values += makes[name]
        if group.cell.weights:
            sizes = [weights[each].nbytes for each in dict.fromkeys(group.cell.weights)]
            resident[f"weights.{group.cell.name}"] = sum(sizes)
    ops = []
    for name, group in groups.items():
        reads = [f"weights.{group.cell.name}"] if group.cell.weights else []
        for spec, rows in zip(group.cell.reads, group.rows, strict=True):
            reads += owners(spec, rows)
        reads, made_here = list(dict.fromkeys(reads)), tuple(value.name for value in makes[name])
        ops.append(Op(name, tuple(reads), made_here, rows="batch-free", body=body_of(group)))
    wanted = dict.fromkeys(
        name for spec, rows in load.outputs.items() for name in owners(spec, rows)
    )
    ops.append(Op("answer", tuple(wanted), uses="io", rows="batch-free", body="answer"))
    values += [Value(name, (Size.of(size),), "uint8") for name, size in resident.items()]
    graph = Graph("dynamic", tuple(values), tuple(ops), (*load.inputs, *resident), tuple(wanted))
    return Drawing(graph, groups, blocks, frozenset(resident), load.num_rows)


def body_of(group: Group) -> str:
    """The key of a group's cost: its cell, for this number of rows."""
    return f"{group.cell.name}.rows{group.num_rows}"


@dataclass(eq=False)
class Task:
    """One group on a device: values it waits for, and (value, device) it sends when it is done."""

    label: str
    group: Group
    needs: list[str] = field(default_factory=list)
    sends: list[tuple[str, str]] = field(default_factory=list)

    def messages(self) -> dict[str, list[str]]:
        """The values that each device is sent, in one message."""
        by_device: dict[str, list[str]] = {}
        for value, target in self.sends:
            by_device.setdefault(target, []).append(value)
        return by_device


@dataclass(frozen=True, eq=False)
class DevicePart:
    """The lanes of one device: the groups that they run, where the values are that they touch, and
    the rows of each spec. Raises `CaptureError` if they cannot be run."""

    lanes: Plan
    groups: Mapping[str, Group]
    blocks: dict[str, Block]
    num_rows: dict[Spec, int]
    resident: Collection[str] = ()

    kind = "call"

    def __post_init__(self) -> None:
        _ = self.tasks  # or its error

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells that its device needs."""
        return list(dict.fromkeys(task.group.cell for task in self.tasks))

    @cached_property
    def message(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The part as plain data, and the row numbers of all its groups in one tensor."""
        specs = list(self.num_rows)
        groups = [
            [task.label, task.group.cell.name, task.group.num_rows, task.group.starts]
            for task in self.tasks
        ]
        blocks = {
            name: [specs.index(spec), start, count]
            for name, (spec, start, count) in self.blocks.items()
        }
        rows = [[list(spec.shape), str(spec.dtype), n] for spec, n in self.num_rows.items()]
        data = {
            "plan": str(self.lanes), "groups": groups, "blocks": blocks, "num_rows": rows,
            "resident": list(self.resident),
        }  # fmt: skip
        return data, [torch.cat([task.group.rows.reshape(-1) for task in self.tasks])]

    @staticmethod
    @reading("part")
    def from_message(
        data: Mapping[str, Any], tensors: Sequence[Tensor], cells: Mapping[str, Cell]
    ) -> DevicePart:
        """The part of a message. Raises `CaptureError` for data that is none."""
        specs = [spec_named(shape, dtype) for shape, dtype, _ in data["num_rows"]]
        counts = [count_of(count, ROOM) for _, _, count in data["num_rows"]]
        num_rows = dict(zip(specs, counts, strict=True))
        blocks = {}
        for name, (at, start, count) in data["blocks"].items():
            spec = specs[count_of(at, len(specs) - 1)]
            start = count_of(start, num_rows[spec])
            blocks[name] = spec, start, count_of(count, num_rows[spec] - start)
        rows = tensors[0]
        if rows.dtype != torch.int64:
            raise CaptureError(f"part: rows of groups must be int64; got {rows.dtype}.")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < max(counts):
            raise CaptureError("part: its groups read rows that are not there.")
        groups = {}
        sizes = [len(cells[name].reads) * count for _, name, count, _ in data["groups"]]
        flat = torch.split(rows, sizes)
        for (label, name, count, given), mine in zip(data["groups"], flat, strict=True):
            made = zip(cells[name].rows_made(count), given, strict=True)
            starts = tuple([count_of(start, num_rows[spec] - most) for (spec, most), start in made])
            groups[label] = Group(cells[name], count, mine.view(-1, count), starts)
        resident = frozenset(data["resident"])
        return DevicePart(_lanes(data["plan"]), groups, blocks, num_rows, resident)

    @cached_property
    def tasks(self) -> list[Task]:
        """The steps of its lanes, by the groups that they run."""
        devices = {lane.device for lane in self.lanes.lanes}
        here = f" to {devices.pop()}" if len(devices) == 1 else ""
        arrivals = {f"copy {value}{here}": value for value in self.blocks}
        there = {f"copy {value}{here}" for value in self.resident}
        tasks: list[Task] = []
        needs: list[str] = []
        for step in self.lanes.steps:
            if step.kind == "run" and step.label in self.groups and here:
                tasks.append(Task(step.label, self.groups[step.label], needs))
                there.add(step.label)
                needs = []
            elif step.kind == "wait" and step.target in arrivals:
                needs.append(arrivals[step.target])
            elif step.kind == "copy" and step.on and step.names[0] in self.blocks and tasks:
                tasks[-1].sends.append((step.names[0], step.on))
            elif step.kind != "free" and not (step.kind == "wait" and step.target in there):
                raise CaptureError(f"part: its device cannot do this step: {clip(step)}.")
        return tasks


@lru_cache(maxsize=64)
def _lanes(text: str) -> Plan:
    """Lanes from their text; those of equal calls are read once."""
    try:
        return Plan.parse(text)
    except PlanError as error:
        raise CaptureError(f"part: {error}") from None


@dataclass(frozen=True, eq=False)
class Script:
    """What each device does, in the order of their first groups; the inputs that the lanes of the
    home send to each of them; and, if a planner placed it, the plan and its drawing."""

    parts: Mapping[str, DevicePart | RecordedPart]
    inputs: Mapping[str, list[str]] = field(default_factory=dict)
    plan: Plan | None = None
    drawing: Drawing | None = None


def write_script(plan: Plan, drawing: Drawing) -> Script:
    """The script of a lowered plan."""
    blocks: dict[str, dict[str, Block]] = {}
    inputs: dict[str, list[str]] = {}
    resident: dict[str, list[str]] = {}
    runs: dict[str, None] = {}  # in order
    for step in plan.steps:
        device = plan.lane[step.lane].device
        if step.kind == "run" and device != HOME:
            runs[device] = None
            for value in plan.graph.op[step.names[0]].makes:
                blocks.setdefault(device, {})[value] = drawing.blocks[value]
        elif step.kind == "copy" and step.on is not None and step.on != HOME:
            value = step.names[0]
            if value in drawing.weights:
                resident.setdefault(step.on, []).append(value)
                continue
            if device == HOME:
                inputs.setdefault(step.on, []).append(value)
            blocks.setdefault(step.on, {})[value] = drawing.blocks[value]
    parts = {}
    for device in runs:
        lanes = tuple(lane for lane in plan.lanes if lane.device == device)
        steps = tuple(step for step in plan.steps if plan.lane[step.lane].device == device)
        mine = replace(plan, lanes=lanes, steps=steps, history=(), bound=None)
        known = resident.get(device, ())
        parts[device] = DevicePart(mine, drawing.groups, blocks[device], drawing.num_rows, known)
    return Script(parts, inputs, plan, drawing)
