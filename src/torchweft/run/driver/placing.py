"""Placing: what a recording asks for becomes a `Job` on the workers.

    Load -> Graph -> planner -> Placement -> Plan -> verified -> Script

Scripts are cached by structure (cells, rows and outputs of all groups), the devices that are alive
and the prices they were made for. The turns of a planner that learns fall between inputs:

    input ... answer  input ... answer | turn | input ... answer  input ...
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torchweft.placement import Planner, Problem, as_plan, graph_problem, plan
from torchweft.placement.learn.learner import Learner
from torchweft.placement.learn.served import ServedRun
from torchweft.plan.trace import Trace, format_s
from torchweft.plan.verify import verify
from torchweft.run.driver.executor import Executor, Job
from torchweft.run.workers.program import HOME, Drawing, Load, Script, draw, write_script

log = logging.getLogger("torchweft")
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


class Turns:
    """The turns of one learner, between the inputs of one model: `with turns:` is an input.

    A call that was placed tells the learner its problem; when a turn is due it starts in a thread
    of its own once the answer is on its way, and the next input waits for its end: at most the
    learner's `limit_s` and the step under way. So no gradient is computed in the middle of an
    input. Before a turn, devices that nothing has run on are measured anew, so that one that
    recovered is used again. A turn that fails is logged and counted; it never fails an input.
    """

    def __init__(self, learner: Learner, placer: Placer) -> None:
        self.learner, self.placer = learner, placer
        self.thread = ThreadPoolExecutor(1, "weft learner")
        self.under_way: Future[None] | None = None
        self.num_failed = 0
        self.waited_s = 0.0  # inputs, for turns to end

    def served(self, job: Job) -> None:
        """A placed call was answered: its problem can be learned from."""
        assert job.script.drawing is not None, "a placed call has a drawing"
        self.learner.served(partial(self.placer.problem, job.script.drawing))

    def begin(self) -> None:
        """Before an input: wait for the turn under way."""
        if self.under_way is not None:
            began_s = time.perf_counter()
            self.under_way.result()
            self.waited_s += time.perf_counter() - began_s
            self.under_way = None

    __enter__ = begin

    def __exit__(self, error: object, *more: object) -> None:
        """After an input: start a turn if one is due."""
        if error is None and self.learner.due:
            self.under_way = self.thread.submit(self._turn)

    def _turn(self) -> None:
        try:
            self.placer.executor.look_around()
            self.learner.turn()
        except Exception as error:
            self.num_failed += 1
            self.learner.last = self.learner.num_served  # not again with the very next input
            log.warning("learning: a turn failed, serving goes on: %s", error)

    def close(self) -> None:
        """Wait for the last turn, and end the thread."""
        self.thread.shutdown()

    def __str__(self) -> str:
        failed = f"; {self.num_failed} turns failed" if self.num_failed else ""
        return f"{self.learner}; inputs waited {format_s(self.waited_s)} for it{failed}"
