"""Placing: what a recording asks for becomes a `Job` on the workers.

    Load -> Graph -> planner -> Placement -> Plan -> verified -> Script

Scripts are cached by structure (cells, rows and outputs of all groups), the devices that are alive
and the prices they were made for.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

from torchweft.placement import Planner, Problem, as_plan, graph_problem, plan
from torchweft.placement.learn.served import ServedRun
from torchweft.plan.trace import Trace
from torchweft.plan.verify import verify
from torchweft.run.driver.executor import Executor, Job
from torchweft.run.workers.graphing import HOME, Drawing, Load, draw
from torchweft.run.workers.program import Script, write_script

MAX_PLANS = 256


@dataclass(eq=False)
class Placer:
    """Decides where jobs run, for one executor."""

    executor: Executor
    planner: str | Planner = "portfolio"
    deadline_s: float = 0.01
    scripts: OrderedDict[Any, Script] = field(default_factory=OrderedDict)
    num_hits: int = 0
    num_planned: int = 0

    def planned(self, load: Load) -> Job:
        """A job whose groups are placed by the planner; new cells are measured before."""
        self.executor.measure(dict.fromkeys(group.cell for group in load.groups))
        return Job(lambda job: self._script(load), load)

    def _script(self, load: Load) -> Script:
        version = getattr(self.planner, "version", 0)  # of a planner that learns
        devices, epoch = tuple(self.executor.pool.names), self.executor.prices.epoch
        key = load.structure, devices, epoch, self.planner, version
        if (script := self.scripts.get(key)) is not None:
            self.num_hits += 1
            return script
        self.num_planned += 1
        drawing = draw(load, self.executor.weights)
        problem = self.problem(drawing)
        placement = plan(problem, self.planner, deadline_s=self.deadline_s)
        script = write_script(verify(as_plan(problem, placement)), drawing)
        if devices == tuple(self.executor.pool.names):  # none was lost meanwhile
            self.scripts[key] = script
        if len(self.scripts) > MAX_PLANS:
            self.scripts.popitem(last=False)
        return script

    def problem(self, drawing: Drawing) -> Problem:
        """A drawing as a problem, on the devices and at the prices of this moment."""
        with self.executor.lock:  # a worker may be lost meanwhile
            machine = self.executor.prices.machine()
            costs = self.executor.prices.costs(drawing, machine)
            return graph_problem(drawing.graph, machine, costs, home=HOME, resident=drawing.weights)

    def simulate(self, script: Script) -> Trace:
        """What the prices, as they are now, say of a script; weights are there already."""
        assert script.plan is not None and script.drawing is not None, "it was placed"
        with self.executor.lock:
            return self.executor.prices.rehearse(script.plan, script.drawing)

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
