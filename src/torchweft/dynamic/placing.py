"""Placing: the pending groups of a recording become a `Job` on the workers.

    groups -> Graph -> planner -> Placement -> Plan -> verified -> parts of devices

Plans are cached by canonical structure (cells and rows of all groups, blocks of inputs, outputs),
the devices that are alive and the prices they were made for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.local import LocalRows, inputs_in, take
from torchweft.dynamic.recording import Recording
from torchweft.placement import Planner, Problem, as_plan, graph_problem, plan
from torchweft.placement.learn.served import ServedRun
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Trace
from torchweft.plan.verify import verify
from torchweft.run.workers.cell import Cell, Spec
from torchweft.run.workers.executor import Executor, Job, Parts
from torchweft.run.workers.graphing import HOME, Block, Drawing, draw, structure_of
from torchweft.run.workers.grouping import Group, group, place_inputs
from torchweft.run.workers.program import parts_of

MAX_PLANS = 256


@dataclass(eq=False)
class Load:
    """What a flush has to run: groups, input blocks with their rows, and the rows wanted."""

    groups: list[Group]
    blocks: dict[str, Block]
    tensors: dict[str, Tensor]
    outputs: dict[Spec, Tensor]
    held: LocalRows


def load(recording: Recording, wanted: Sequence[Lazy] | None, bundles: Sequence[int] = ()) -> Load:
    """Take what is pending; `wanted` None: the caller may ask for anything later."""
    state = recording.state
    if recording.store is None:
        recording.store = LocalRows(state.device, grad=False)
    held: LocalRows = recording.store
    before, first = dict(held.layout.num_rows), held.num_values
    pending = take(recording, held.layout)
    inputs = place_inputs(held.layout, inputs_in(recording, held.layout, pending))
    groups = group(held.layout, pending, bundles)
    held.store.reserve(held.layout.num_rows)
    blocks: dict[str, Block] = {}
    for spec, count in before.items():  # what earlier flushes made and these groups read
        blocks[f"in{len(blocks)}"] = spec, 0, count
    for spec, start, rows in inputs:
        held.store.write(spec, start, rows)
        blocks[f"in{len(blocks)}"] = spec, start, len(rows)
    read = {spec for each in groups for spec in each.cell.reads}
    blocks = {name: block for name, block in blocks.items() if block[0] in read}
    sent = {
        name: held.store.rows[spec][start : start + count]
        for name, (spec, start, count) in blocks.items()
    }
    if wanted is None:
        outputs = _all(groups)
    else:
        outputs = _rows(held, wanted, groups)
        held.stay(first, {lazy.id for lazy in wanted})
    return Load(groups, blocks, sent, outputs, held)


def _all(groups: Sequence[Group]) -> dict[Spec, Tensor]:
    rows: dict[Spec, list[Tensor]] = {}
    for each in groups:
        makes = each.cell.makes
        count = each.num_rows
        if each.cell.kind == "unpack":
            makes, count = makes[:1], count * len(makes)
        for spec, start in zip(makes, each.starts, strict=True):
            rows.setdefault(spec, []).append(torch.arange(start, start + count))
    return {spec: torch.cat(found) for spec, found in rows.items()}


def _rows(held: LocalRows, wanted: Sequence[Lazy], groups: Sequence[Group]) -> dict[Spec, Tensor]:
    """The rows behind lazy values, of those that groups make."""
    rows: dict[Spec, list[Tensor]] = {}
    for lazy in wanted:
        spec, found = held.place(lazy.id, lazy.spec)
        rows.setdefault(spec, []).append(found.reshape(-1))
    made = _all(groups)
    asked = {spec: torch.unique(torch.cat(found)) for spec, found in rows.items()}
    return {
        spec: found[torch.isin(found, made[spec])] for spec, found in asked.items() if spec in made
    }


@dataclass(eq=False)
class Placer:
    """Decides where jobs run, for one executor."""

    executor: Executor
    planner: str | Planner = "portfolio"
    deadline_s: float = 0.01
    plans: OrderedDict[Any, Plan] = field(default_factory=OrderedDict)
    num_hits: int = 0
    num_planned: int = 0

    def planned(self, loaded: Load) -> Job:
        """A job whose groups are placed by the planner."""
        self._measure(each.cell for each in loaded.groups)
        drawing = self._draw(loaded)
        outputs, inputs = drawing.graph.outputs, tuple(loaded.blocks.items())
        structure = structure_of(loaded.groups), inputs, outputs

        def write() -> Parts:
            found = self._plan(structure, drawing)
            return *parts_of(found, drawing, HOME), found

        return Job(write, loaded.tensors, loaded.held.store, drawing=drawing)

    def simulate(self, found: Plan, job: Job) -> Trace:
        """What the prices, as they are now, say of a plan of a job; weights are there already."""
        assert job.drawing is not None, "a job with a plan has a drawing"
        with self.executor.lock:
            return self.executor.prices.rehearse(found, job.drawing)

    def _measure(self, cells: Iterable[Cell]) -> None:
        """New cells are measured on every device, before anything is planned."""
        self.executor.measure(dict.fromkeys(cells), self.executor.pool.names)

    def _draw(self, loaded: Load) -> Drawing:
        weights = {each.cell.name: self._weight_bytes(each.cell.weights) for each in loaded.groups}
        rows = loaded.held.layout.num_rows
        return draw(loaded.groups, loaded.blocks, rows, loaded.outputs, weights)

    def _plan(self, structure: object, drawing: Drawing) -> Plan:
        prices, pool = self.executor.prices, self.executor.pool
        version = getattr(self.planner, "version", 0)  # of a planner that learns
        key = structure, tuple(pool.names), prices.epoch, self.planner, version
        if (known := self.plans.get(key)) is not None:
            self.num_hits += 1
            return known
        self.num_planned += 1
        problem = self.problem(drawing)
        found = as_plan(problem, plan(problem, self.planner, deadline_s=self.deadline_s))
        self.plans[key] = verify(found)
        while len(self.plans) > MAX_PLANS:
            self.plans.popitem(last=False)
        return found

    def problem(self, drawing: Drawing) -> Problem:
        """A drawing as a problem, on the devices and at the prices of this moment."""
        with self.executor.lock:  # a worker may be lost meanwhile
            prices = self.executor.prices
            machine = prices.machine()
            costs = prices.costs(drawing, machine)
            return graph_problem(drawing.graph, machine, costs, home=HOME, resident=drawing.weights)

    def served(self, drawing: Drawing, trace: Trace) -> ServedRun:
        """What was drawn and how it went, with the prices of this moment."""
        prices = self.executor.prices
        machine = prices.machine()
        table = prices.costs(drawing, machine).table
        devices = [
            replace(device, overhead_s=prices.start_s(device.name)) for device in machine.devices
        ]
        machine = replace(machine, devices=tuple(devices))
        weights = tuple(sorted(drawing.weights))
        return ServedRun(drawing.graph, machine, table, trace, HOME, weights)

    def _weight_bytes(self, names: Mapping[str, Any] | Sequence[str] | set[str]) -> int:
        weights = self.executor.weights
        return sum(weights[n].numel() * weights[n].element_size() for n in dict.fromkeys(names))
