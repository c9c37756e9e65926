"""The `Executor`: sends calls to the workers of a pool and brings their rows home.

    submit:  cells and weights that are missing there  ->  each device its part  ->  Job
    rows come home while others compute; the job is over when every part is done

When a worker is lost, every job that needs it is cancelled on the others, planned anew for the
devices that are left, and sent again; its inputs are kept until it is answered. A job fails (with
the reason) only if no device is left, or its ops themselves fail.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchweft.errors import RunError, WeftError
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Span, Trace
from torchweft.run.workers.cell import Cell, Spec
from torchweft.run.workers.channel import Message
from torchweft.run.workers.graphing import HOME, Drawing
from torchweft.run.workers.pool import Mate, WorkerPool
from torchweft.run.workers.prices import Prices
from torchweft.run.workers.program import DevicePart
from torchweft.run.workers.recorded import RecordedPart
from torchweft.run.workers.store import RowStore
from torchweft.run.workers.traffic import Traffic

MAX_TRIES = 5
SEEN = 4  # of the whole jobs of a device, one in so many moves the prices
Parts = tuple[Mapping[str, DevicePart | RecordedPart], dict[str, list[str]], Plan | None]
Measure = Callable[[Cell, str, Sequence[Tensor]], None]


@dataclass(eq=False)
class Job:
    """One call: how it is planned, what it was given, and what came of it."""

    write: Callable[[], Parts]  # (parts, inputs of each device, plan), for the devices alive now
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    store: RowStore | None = None  # where rows go
    drawing: Drawing | None = None
    number: int = 0
    parts: Mapping[str, DevicePart | RecordedPart] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)  # answers of a recorded part
    runs: tuple[str, list[str], Tensor] | None = None  # its device, cells, [rows, start, end]
    busy_s: float = 0.0
    plan: Plan | None = None
    waiting: set[str] = field(default_factory=set)
    written: dict[str, tuple[int, float]] = field(default_factory=dict)  # groups, seconds, by part
    taken_s: dict[str, list[float]] = field(default_factory=dict)  # from groups, by messages
    spans: list[tuple[str, str, str, float, float]] = field(default_factory=list)
    blocks: dict[str, tuple[Spec, int, int]] = field(default_factory=dict)
    tries: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    error: WeftError | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait for the end. Raises the job's error if it failed."""
        self.over.wait()
        if self.error is not None:
            raise self.error

    def trace(self) -> Trace:
        """What happened when, on every device."""
        spans, found = [], list(self.spans)
        if self.runs is not None:
            device, cells, runs = self.runs
            for at, (cell, (_, *times)) in enumerate(zip(cells, runs.tolist(), strict=True)):
                found.append((f"{cell}.{at}", device, device, *times))
        for label, lane, device, start_s, end_s in found:
            copy = label.startswith("copy ")
            where = ("copy" if copy else "run"), label, lane, device, "io" if copy else "compute"
            op = "" if copy else label
            times = start_s - self.began_s, end_s - self.began_s
            spans.append(Span(*where, op, None, *times, end_s - start_s))
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        return Trace("dynamic", tuple(spans))


class Executor:
    """Jobs on the workers of a pool."""

    def __init__(self, pool: WorkerPool, weights: Mapping[str, Tensor]) -> None:
        self.pool, self.weights = pool, weights
        self.prices = Prices(pool)
        self.jobs: dict[int, Job] = {}
        self.cells: dict[Cell, None] = {}
        self.last = 0
        self.num_replanned = 0
        self.heard: Counter[str] = Counter()  # whole jobs of each device
        self.lock = threading.RLock()
        self.ended = threading.Condition()  # a job has
        pool.listen, pool.on_lost = self._hear, self._lost
        self.prices.measure_links()

    def submit(self, job: Job) -> Job:
        """Send a job to its devices."""
        with self.lock:
            self._send(job)
        return job

    def measure(self, cells: Iterable[Cell], devices: Sequence[str]) -> None:
        """Measure cells on devices, those that have not been."""
        for cell in cells:
            self.cells[cell] = None
            new = [device for device in devices if (cell.name, device) not in self.prices.seconds]
            if new:
                self._measure(self.prices.measure, cell, new)

    def look_around(self) -> None:
        """Measure devices anew on which nothing has run since the last look: they may have changed,
        and nobody would see it."""
        idle = [name for name in self.pool.names if name not in self.prices.ran]
        for cell in list(self.cells):
            self._measure(self.prices.measure_again, cell, idle)
        self.prices.ran.clear()

    def _measure(self, how: Measure, cell: Cell, devices: Sequence[str]) -> None:
        weights = [self.weights[name] for name in cell.weights]
        for device in devices:
            try:
                how(cell, device, weights)
            except RunError:
                if not self.pool.mates[device].lost:
                    raise

    def welcome(self, device: str) -> None:
        """Measure a device that has just joined: its links, and every cell that is known."""
        self.prices.measure_links()
        self.measure(list(self.cells), [device])

    def _ship(self, cell: Cell, mate: Mate) -> None:
        """A cell, and those of its weights that the worker lacks or has in an older version."""
        versions = {name: _version(self.weights[name]) for name in cell.weights}
        missing = [name for name, version in versions.items() if mate.weights.get(name) != version]
        if cell.name in mate.cells and not missing:
            return
        tensors = [self.weights[name] for name in missing]
        mate.send({"kind": "cell", "cell": cell.to_data(), "weights": missing}, tensors)
        mate.cells.add(cell.name)
        mate.weights.update(versions)

    def _send(self, job: Job) -> None:
        """Plan a job for the devices that are alive, and send the parts."""
        job.tries += 1
        if not self.pool.names or job.tries > MAX_TRIES:
            why = "no worker is left" if not self.pool.names else f"it was lost {MAX_TRIES} times"
            return self._end(job, RunError(f"run: {why}; join one and call again."))
        try:
            parts, given, job.plan = job.write()
        except WeftError as error:
            return self._end(job, error)
        self.last += 1
        job.number, job.parts, job.waiting = self.last, parts, set(parts)
        job.written, job.taken_s = {}, {}
        job.spans, job.began_s = [], time.perf_counter()
        self.jobs[job.number] = job
        for device, part in parts.items():
            mate = self.pool.mates[device]
            job.blocks |= part.blocks if isinstance(part, DevicePart) else {}
            for cell in part.cells:
                self._ship(cell, mate)
            data, rows = part.to_data()
            names = given.get(device, [])
            message = {"kind": part.kind, "call": job.number, "part": data, "inputs": names}
            mate.send(message, [*rows, *(job.inputs[name] for name in names)])
            if isinstance(part, DevicePart):
                job.written[device] = len(part.tasks), time.perf_counter() - job.began_s
        return None

    def _end(self, job: Job, error: WeftError | None = None) -> None:
        self.jobs.pop(job.number, None)
        job.ended_s, job.error = time.perf_counter(), error
        job.write = _ended  # what it holds is let go; it may hold the job, and that is a circle
        with self.ended:
            job.over.set()
            self.ended.notify_all()

    # What workers say.

    def _hear(self, name: str, message: Message, tensors: list[Tensor]) -> None:
        with self.lock, torch.inference_mode():  # the caller's rows may be inference tensors
            job = self.jobs.get(message.get("call", -1))
            if job is None:
                return
            if message["kind"] == "rows":
                self._rows(job, name, message, tensors)
            elif message["kind"] == "done":
                self._done(job, name, message)
            elif message["kind"] == "answer":
                self._answer(job, name, message, tensors)
            elif message["kind"] == "failed":
                self._cancel(job, job.waiting)
                text = f"run: worker {name!r} failed."
                self._end(job, RunError(text, story=message["error"], lane=name))

    def _rows(self, job: Job, name: str, message: Message, tensors: list[Tensor]) -> None:
        assert job.store is not None, "rows come for jobs with a store"
        for value, rows in zip(message["values"], tensors, strict=True):
            spec, start, count = job.blocks[value]
            job.store.rows[spec][start : start + count] = rows.view(count, *spec.shape)
            lane, now_s = f"{name}.to.{HOME}", time.perf_counter()
            job.spans.append((f"copy {value} to {HOME}", lane, name, message["sent_s"], now_s))

    def _done(self, job: Job, name: str, message: Message) -> None:
        for label, lane, start_s, end_s in message["spans"]:
            job.spans.append((label, lane, name, start_s, end_s))
        job.taken_s[name] = message["taken_s"]
        job.waiting.discard(name)
        if not job.waiting:
            self._price(job)
            self._end(job)

    def _price(self, job: Job) -> None:
        """Prices follow what a placed call took."""
        traffic, read_s = Traffic(job.spans, job.blocks), {}
        for device, taken_s in job.taken_s.items():
            part, spans = job.parts[device], [s[3:] for s in job.spans if s[1] == device]
            assert isinstance(part, DevicePart), "other parts answer"
            if job.inputs.keys() >= set(part.tasks[0].needs):
                read_s[device] = spans[0][0] - job.began_s - job.written[device][1]
            groups = [task.group for task in part.tasks]
            self.prices.saw(device, [
                (group.cell, group.num_rows, end_s - start_s - late_s)
                for group, (start_s, end_s), late_s in zip(groups, spans, taken_s, strict=True)
            ])  # fmt: skip
            traffic.await_at(device, part.tasks, spans)
        self.prices.started(job.written, read_s)
        for (source, target), copies in traffic.waited().items():
            self.prices.carried(source, target, copies)
        taken = {name: (traffic.num[name], sum(job.taken_s[name])) for name in job.taken_s}
        self.prices.ended(taken, time.perf_counter() - max(traffic.home_s, job.began_s))

    def _answer(self, job: Job, name: str, message: Message, tensors: list[Tensor]) -> None:
        part, runs = job.parts[name], tensors[0]
        assert isinstance(part, RecordedPart), "other parts are done"
        job.runs = name, message["cells"], runs
        if self.heard[name] % SEEN == 0:
            cells = {cell.name: cell for cell in part.cells}
            found = [
                (cells[cell], int(rows), end_s - start_s)
                for cell, (rows, start_s, end_s) in zip(
                    message["cells"], runs.tolist(), strict=True
                )
                if cell in cells  # else it is a gather of the worker's own
            ]
            self.prices.saw(name, found)
        self.heard[name] += 1
        job.busy_s = message["busy_s"]
        with torch.inference_mode(False):  # they are the caller's, who may change them in place
            job.values = part.answers(tensors[1:])
        self._end(job)

    def _cancel(self, job: Job, devices: set[str]) -> None:
        for device in devices:
            if not self.pool.mates[device].lost:
                self.pool.mates[device].send({"kind": "cancel", "call": job.number})

    def _lost(self, name: str, reason: str) -> None:
        """Plan anew what the lost worker had not done."""
        with self.lock:
            self.prices.forget([name])
            hit = [job for job in self.jobs.values() if name in job.parts]
            for job in hit:
                if name in job.waiting or not job.waiting:
                    self._cancel(job, job.waiting - {name})
                    del self.jobs[job.number]
                    self.num_replanned += 1
                    self._send(job)


def _ended() -> Parts:
    raise AssertionError("a job that has ended is not sent again")


def _version(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
