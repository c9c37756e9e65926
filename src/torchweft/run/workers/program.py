"""A `DevicePart`: what one device has to do of a plan, as plain data, and how it is read back.

    Plan, groups --parts_of--> {device: DevicePart} --to_data--> message, tensors --> DevicePart

A part is the lane of its device: the groups in the plan's order, what each waits for from other
devices, and where its results go (the copy steps of the lanes of its links).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import CaptureError
from torchweft.plan.plan import Plan
from torchweft.run.workers.cell import ROOM, Cell, Spec, count_of, reading, spec_named
from torchweft.run.workers.graphing import Drawing
from torchweft.run.workers.grouping import Group


@dataclass(eq=False)
class Task:
    """One group on a device: values it waits for, and (value, device) it sends when it is done."""

    label: str
    group: Group
    needs: list[str] = field(default_factory=list)
    sends: list[tuple[str, str]] = field(default_factory=list)

    def messages(self) -> dict[str, list[str]]:
        """The values that each device is sent, in one message."""
        found: dict[str, list[str]] = {}
        for value, target in self.sends:
            found.setdefault(target, []).append(value)
        return found


@dataclass(eq=False)
class DevicePart:
    """The lane of one device in one call; `blocks` says where the values are that it touches."""

    tasks: list[Task] = field(default_factory=list)
    blocks: dict[str, tuple[Spec, int, int]] = field(default_factory=dict)  # first row, rows
    num_rows: dict[Spec, int] = field(default_factory=dict)

    kind = "call"

    @property
    def cells(self) -> list[Cell]:
        """The cells that its device needs."""
        return list(dict.fromkeys(task.group.cell for task in self.tasks))

    def to_data(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The part as plain data, and the row numbers of all its groups in one tensor."""
        specs = list(self.num_rows)
        tasks = [
            {
                "label": task.label, "cell": task.group.cell.name, "rows": task.group.num_rows,
                "starts": task.group.starts, "needs": task.needs, "sends": task.sends,
            }
            for task in self.tasks
        ]  # fmt: skip
        blocks = {
            name: [specs.index(spec), start, count]
            for name, (spec, start, count) in self.blocks.items()
        }
        rows = [[list(spec.shape), str(spec.dtype), n] for spec, n in self.num_rows.items()]
        data = {"tasks": tasks, "blocks": blocks, "num_rows": rows}
        return data, [torch.cat([task.group.rows.reshape(-1) for task in self.tasks])]

    @staticmethod
    def from_data(data: Mapping[str, Any], rows: Tensor, cells: Mapping[str, Cell]) -> DevicePart:
        """The part of plain data. Raises `CaptureError` for data that is none."""
        with reading("part"):
            return _read_part(data, rows, cells)


def _read_part(data: Mapping[str, Any], rows: Tensor, cells: Mapping[str, Cell]) -> DevicePart:
    specs = [spec_named(shape, dtype) for shape, dtype, _ in data["num_rows"]]
    counts = [count_of(count, ROOM) for _, _, count in data["num_rows"]]
    num_rows = dict(zip(specs, counts, strict=True))
    blocks = {}
    for name, (at, start, count) in data["blocks"].items():
        spec = specs[count_of(at, len(specs) - 1)]
        start = count_of(start, num_rows[spec])
        blocks[name] = spec, start, count_of(count, num_rows[spec] - start)
    if rows.dtype != torch.int64:
        raise CaptureError(f"part: rows of groups cannot be {rows.dtype}.")
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < max(counts):
        raise CaptureError("part: its groups read rows that are not there.")
    tasks = []
    sizes = [len(cells[item["cell"]].reads) * item["rows"] for item in data["tasks"]]
    for item, flat in zip(data["tasks"], torch.split(rows, sizes), strict=True):
        cell, mine = cells[item["cell"]], flat.view(-1, item["rows"])
        makes = cell.makes if cell.kind != "unpack" else cell.makes[:1]
        most = item["rows"] * (len(cell.makes) if cell.kind == "unpack" else 1)
        starts = tuple(
            count_of(start, num_rows[spec] - most)
            for spec, start in zip(makes, item["starts"], strict=True)
        )
        sends = [(value, device) for value, device in item["sends"]]
        if not blocks.keys() >= {*item["needs"], *(value for value, _ in sends)}:
            raise CaptureError("part: a group needs or sends a value that is nowhere.")
        group = Group(cell, item["rows"], mine, starts)
        tasks.append(Task(str(item["label"]), group, item["needs"], sends))
    return DevicePart(tasks, blocks, num_rows)


def parts_of(
    plan: Plan, drawing: Drawing, home: str
) -> tuple[dict[str, DevicePart], dict[str, list[str]]]:
    """What each device does, and the inputs that the home sends to each of them."""
    parts: dict[str, DevicePart] = {}
    task_of: dict[str, Task] = {}
    device_of: dict[str, str] = {}
    inputs: dict[str, list[str]] = {}
    for step in plan.steps:
        device = plan.lane[step.lane].device
        if step.kind == "run" and device != home:
            name = step.names[0]
            task_of[name], device_of[name] = Task(name, drawing.groups[name]), device
            part = parts.setdefault(device, DevicePart(num_rows=drawing.num_rows))
            part.tasks.append(task_of[name])
            for value in plan.graph.op[name].makes:
                part.blocks[value] = drawing.blocks[value]
    for step in plan.steps:
        if step.kind != "copy" or step.on is None or step.names[0] in drawing.weights:
            continue
        value, target = step.names[0], step.on
        if target in parts:
            parts[target].blocks[value] = drawing.blocks[value]
        maker = plan.graph.maker.get(value)
        if maker is None:
            inputs.setdefault(target, []).append(value)
        else:
            task_of[maker.name].sends.append((value, target))
        for reader in plan.graph.readers[value]:
            if device_of.get(reader.name) == target:
                task_of[reader.name].needs.append(value)
    return parts, inputs
