"""Placing: what a recording asks for becomes a `Job`, and which workers get it.

    Placer   one call: Load -> Graph -> planner -> Placement -> Plan -> verified -> Script
    Turns    of a planner that learns:  input ... answer | turn | input ... answer  input ...
    Feed     a stream: which inputs make the next job, and which worker gets all of it

Scripts are cached by structure (cells, rows and outputs of all groups), the devices that are alive
and the prices they were made for.

In a stream a worker has two *slots*: one job runs while the next one waits there already. A large
job costs less an input (a job takes about fixed_s + op_s * ops, learned for each worker), but
whoever gets the last one is waited for. So jobs are as large as asked for, with two exceptions: a
worker that has nothing to do gets a small one, and then one twice as large, so that it does not
wait while a large one is recorded; and when it is known how many inputs are left, no worker gets
more than the share with which all of them end together.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from typing import Any

from torchweft.errors import PlacementError
from torchweft.placement import Planner, Problem, as_plan, graph_problem, plan
from torchweft.placement.graph_problem import ServedRun
from torchweft.placement.learn.learner import Learner
from torchweft.plan.trace import Trace, format_s
from torchweft.plan.verify import verify
from torchweft.run.driver.executor import Executor, Job
from torchweft.run.workers.program import HOME, Drawing, Load, Script, draw, write_script
from torchweft.run.workers.recorded import RecordedPart

log = logging.getLogger("torchweft")
MAX_PLANS = 256
SLOTS = 2
FIRST = 4  # a worker that has nothing to do gets a job so many times smaller
FADE = 0.95  # of what is known of a worker's jobs, with every new one
NUM_HALVINGS = 12


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
        devices, epoch = tuple(self.executor.pool.names), self.executor.prices.drift.epoch
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


class Line:
    """Seconds of jobs as a line over their ops: sums of what was seen, older jobs count less."""

    def __init__(self) -> None:
        self.sums = [0.0] * 5  # of 1, ops, seconds, ops * ops, ops * seconds

    def saw(self, num_ops: int, seconds: float) -> None:
        """A job of so many ops took so long."""
        new = 1, num_ops, seconds, num_ops**2, num_ops * seconds
        self.sums = [FADE * old + more for old, more in zip(self.sums, new, strict=True)]

    def fit(self) -> tuple[float, float]:
        """(fixed_s, op_s). If all jobs were of one size, nothing is known to be fixed."""
        weight, ops, seconds, squares, products = self.sums
        mean_s, spread = seconds / ops, weight * squares - ops**2
        if spread < 0.01 * ops**2:
            return 0.0, mean_s
        slope = (weight * products - ops * seconds) / spread
        op_s = min(mean_s, max(0.1 * mean_s, slope))
        return (seconds - op_s * ops) / weight, op_s


@dataclass(frozen=True)
class SentJob:
    """A job that is under way: where, what it should take there, and since when."""

    device: str
    seconds: float
    num_ops: int
    num_inputs: int
    began_s: float


@dataclass(eq=False)
class Feed:
    """Decides about the whole jobs of one executor."""

    executor: Executor
    sent: dict[Job, SentJob] = field(default_factory=dict)  # in order
    lines: dict[str, Line] = field(default_factory=dict)
    input_ops: float = 0.0  # of an input, on average
    freed_s: dict[str, float] = field(default_factory=dict)  # when a job ended there last

    def turn(self, num_left: int | None, most: int) -> tuple[str, int]:
        """The worker to be fed next, and with how many inputs: at most so many, of those left
        (None: nobody knows). 0: wait until another worker has a free slot."""
        with self.executor.lock:
            for job in [job for job in self.sent if job.over.done()]:
                ended = self.sent.pop(job)
                self.freed_s[ended.device] = job.ended_s
                if job.busy_s:  # what its device takes is known better now
                    self.lines.setdefault(ended.device, Line()).saw(ended.num_ops, job.busy_s)
            for gone in set(self.lines) - set(self.executor.pool.names):
                del self.lines[gone]  # another worker of that name is another one
            names, now_s = self.executor.pool.names, time.perf_counter()
            busy_s = {name: self._busy_s(name, now_s) for name in names}
            free = sorted(
                (name for name in names if len(self._at(name)) < SLOTS), key=busy_s.__getitem__
            )
            first = {name: min(most, self._first(name, most)) for name in free}
            lines = {name: self.lines[name].fit() for name in names if name in self.lines}
        if not free:
            return "", most
        if num_left is None or len(names) < 2 or len(lines) < len(names):
            return free[0], first[free[0]]
        lines = {name: (fixed_s, op_s * self.input_ops) for name, (fixed_s, op_s) in lines.items()}
        ends_s = _end(lines, busy_s, num_left, most)
        for name in free:
            share = round(_done(lines[name], ends_s - busy_s[name], most))
            if share > most:
                return name, min(first[name], ceil(share / ceil(share / most)))
            if share:
                return name, share
        return "", 0

    def whole(self, recorded: RecordedPart, device: str = "", num_inputs: int = 1) -> Job:
        """A job that runs on one device: on this one, or where it would be done first."""
        self.executor.measure(recorded.cells)
        num_ops = recorded.num_ops
        ops = num_ops / num_inputs
        self.input_ops = FADE * self.input_ops + (1 - FADE) * ops if self.input_ops else ops

        def write(job: Job) -> Script:
            name = self._device(recorded, num_ops, device)
            seconds = self._seconds(recorded, num_ops, name)
            self.sent[job] = SentJob(name, seconds, num_ops, num_inputs, time.perf_counter())
            return Script({name: recorded})

        return Job(write)

    def wait(self, jobs: Iterable[Job], num_left: int) -> None:
        """Wait until no more than `num_left` of these jobs are under way."""
        under_way = {job.over for job in jobs if not job.over.done()}
        while len(under_way) > num_left:
            under_way = wait(under_way, return_when=FIRST_COMPLETED).not_done

    def _at(self, device: str) -> list[SentJob]:
        return [sent for sent in self.sent.values() if sent.device == device]

    def _first(self, device: str, most: int) -> int:
        """How many inputs can be recorded while a device is busy with what it has."""
        jobs = self._at(device)
        return 2 * jobs[-1].num_inputs if jobs else ceil(most / FIRST)

    def _busy_s(self, device: str, now_s: float) -> float:
        """Seconds until a device should be done with what it has."""
        jobs = self._at(device)
        if not jobs:
            return 0.0
        ran_s = now_s - max(jobs[0].began_s, self.freed_s.get(device, 0.0))
        return sum(job.seconds for job in jobs) - min(ran_s, jobs[0].seconds)

    def _device(self, recorded: RecordedPart, num_ops: int, device: str) -> str:
        """This device if it is alive and has room, else the one that would be done first."""
        executor, now_s = self.executor, time.perf_counter()
        names = {name for cell in recorded.cells for name in cell.weights}
        need = recorded.num_bytes + sum(executor.weights[name].nbytes for name in names)
        choices = []
        for name in executor.pool.names:
            room = executor.pool.mates[name].spot.memory_bytes
            if room is None or need <= room:
                done_s = self._busy_s(name, now_s) + self._seconds(recorded, num_ops, name)
                choices.append((name != device, done_s, name))
        if not choices:
            raise PlacementError(
                f"memory: this input needs {need} bytes on one device, and none has room for them. "
                "Raise memory_bytes, or let a planner spread it: call the model without stream().",
                rule="memory",
            )
        return min(choices)[2]

    def _seconds(self, recorded: RecordedPart, num_ops: int, device: str) -> float:
        """What a job should take: as those before it did; at first, as if each cell ran once."""
        if device in self.lines:
            fixed_s, op_s = self.lines[device].fit()
            return fixed_s + op_s * num_ops
        prices = self.executor.prices
        return sum(prices.of(ops.cell, ops.num_ops, device) for ops in recorded.ops)


def _done(line: tuple[float, float], seconds: float, most: int) -> float:
    """How many inputs this time is enough for, in jobs of at most so many."""
    fixed_s, input_s = line
    jobs, rest_s = divmod(max(0.0, seconds), fixed_s + input_s * most)
    return jobs * most + max(0.0, rest_s - fixed_s) / input_s


def _end(
    lines: Mapping[str, tuple[float, float]], busy_s: Mapping[str, float], num_left: int, most: int
) -> float:
    """Seconds until all inputs are done, if every worker takes as many as it can until then."""
    low = 0.0
    high = min(
        busy_s[name] + fixed_s * ceil(num_left / most) + input_s * num_left
        for name, (fixed_s, input_s) in lines.items()
    )
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        done = sum(_done(line, middle - busy_s[name], most) for name, line in lines.items())
        low, high = (low, middle) if done >= num_left else (middle, high)
    return high
