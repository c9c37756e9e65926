"""The `Feed` of streams: which inputs make the next job, and which worker gets it.

    turn     a worker with a free slot, and how many inputs it should get
    whole    the job of these inputs, for that worker
    wait     until fewer jobs are under way

A worker has two *slots*: one job runs while the next one waits there already. A large job costs
less an input (a job takes about fixed_s + op_s * ops, learned for each worker), but whoever gets
the last one is waited for. So jobs are as large as asked for, with two exceptions: a worker that
has nothing to do gets a small one, and then one twice as large, so that it does not wait while a
large one is recorded; and when it is known how many inputs are left, no worker gets more than the
share with which all of them end together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from math import ceil

from torchweft.errors import PlacementError
from torchweft.run.driver.executor import Executor, Job
from torchweft.run.workers.program import Script
from torchweft.run.workers.recorded import RecordedPart

SLOTS = 2
FIRST = 4  # a worker that has nothing to do gets a job so many times smaller
FADE = 0.95  # of what is known of a worker's jobs, with every new one
NUM_HALVINGS = 12


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
            self._settle()
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

    def _settle(self) -> None:
        """Jobs that have ended: devices are free of them, and what they take is known better."""
        for job in [job for job in self.sent if job.over.done()]:
            sent = self.sent.pop(job)
            self.freed_s[sent.device] = job.ended_s
            if job.busy_s:
                self.lines.setdefault(sent.device, Line()).saw(sent.num_ops, job.busy_s)
        for gone in set(self.lines) - set(self.executor.pool.names):
            del self.lines[gone]  # another worker of that name is another one

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
