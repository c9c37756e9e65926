"""The `Executor`: sends jobs to workers, brings their rows home, and plans anew what was lost.

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
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchweft.errors import RunError, WeftError
from torchweft.plan.trace import Span, Trace
from torchweft.run.driver.prices import Prices
from torchweft.run.workers.cell import Cell
from torchweft.run.workers.channel import Message
from torchweft.run.workers.grouping import Block
from torchweft.run.workers.pool import Mate, Spot, WorkerPool
from torchweft.run.workers.program import HOME, DevicePart, Load, Script, Task
from torchweft.run.workers.recorded import RecordedPart

MAX_TRIES = 5
SEEN = 4  # of the whole jobs of a device, one in so many moves the prices
Fact = tuple[str, str, str, float, float]  # label, lane, device, start, end


@dataclass(eq=False)
class Job:
    """One call: how its script is written (for the devices that are alive then), what it loads, and
    what came of its last try. `over` has the error if it failed."""

    write: Callable[[Job], Script]
    load: Load | None = None  # of a placed job
    over: Future[None] = field(default_factory=Future)
    tries: int = 0
    number: int = 0
    script: Script = field(default_factory=lambda: Script({}))
    waiting: set[str] = field(default_factory=set)
    written: dict[str, tuple[int, float]] = field(default_factory=dict)  # groups, seconds, by part
    taken_s: dict[str, list[float]] = field(default_factory=dict)  # from groups, by messages
    spans: list[Fact] = field(default_factory=list)
    began_s: float = 0.0
    ended_s: float = 0.0
    values: dict[int, Tensor] = field(default_factory=dict)  # answers of a recorded part
    busy_s: float = 0.0

    @staticmethod
    def ended(error: WeftError | None = None) -> Job:
        """A job that has nothing to send, or that failed before."""
        job = Job(lambda job: job.script)
        job.end(error)
        return job

    def end(self, error: WeftError | None = None) -> None:
        """Tell whoever waits for it."""
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    def trace(self) -> Trace:
        """What happened when, on every device."""
        spans = []
        for label, lane, device, start_s, end_s in self.spans:
            copy = label.startswith("copy ")
            where = ("copy" if copy else "run"), label, lane, device, "io" if copy else "compute"
            op = "" if copy else label
            times = start_s - self.began_s, end_s - self.began_s
            spans.append(Span(*where, op, None, *times, end_s - start_s))
        spans.sort(key=lambda span: (span.start_s, span.end_s))
        return Trace("dynamic", tuple(spans))


class Executor:
    """Jobs on workers, which it starts."""

    def __init__(
        self, spots: Sequence[Spot], weights: Mapping[str, Tensor], *, watchdog_s: float = 10.0
    ) -> None:
        self.weights = weights
        self.jobs: dict[int, Job] = {}
        self.cells: dict[Cell, None] = {}
        self.last = 0
        self.num_replanned = 0
        self.heard: Counter[str] = Counter()  # whole jobs of each device
        self.lock = threading.RLock()
        with self.lock:  # until there are prices
            self.pool = WorkerPool(
                spots, watchdog_s=watchdog_s, listen=self._hear, on_lost=self._lost
            )
            self.prices = Prices(self.pool)
        self.prices.measure_links()

    def submit(self, job: Job) -> Job:
        """Send a job to its devices."""
        with self.lock:
            self._send(job)
        return job

    def measure(self, cells: Iterable[Cell]) -> None:
        """Measure cells on all devices where they have not been measured yet."""
        for cell in cells:
            self.cells[cell] = None
            for device in self.pool.names:
                if (cell.name, device) not in self.prices.seconds:
                    self._measure(cell, device)

    def look_around(self) -> None:
        """Measure devices anew on which nothing has run since the last look: they may have changed,
        and nobody would see it."""
        idle = [name for name in self.pool.names if name not in self.prices.ran]
        for cell in list(self.cells):
            for device in idle:
                self._measure(cell, device)
        self.prices.ran.clear()

    def _measure(self, cell: Cell, device: str) -> None:
        try:
            self.prices.measure(cell, device, [self.weights[name] for name in cell.weights])
        except RunError:
            if not self.pool.mates[device].lost:
                raise

    def join(self, spot: Spot) -> None:
        """Bring in a new worker, and measure its links and every cell that is known."""
        self.pool.join(spot)
        self.prices.measure_links()
        self.measure(list(self.cells))

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
        job.tries, job.began_s, names = job.tries + 1, time.perf_counter(), self.pool.names
        if not names or job.tries > MAX_TRIES:
            why = "no worker is left" if not names else f"it was lost {MAX_TRIES} times"
            return self._end(job, RunError(f"run: {why}; join one and call again."))
        try:
            job.script = job.write(job)
        except WeftError as error:
            if self.pool.names != names:  # a worker was lost meanwhile
                return self._send(job)
            return self._end(job, error)
        self.last += 1
        job.number, job.waiting = self.last, set(job.script.parts)
        job.written, job.taken_s, job.spans = {}, {}, []
        job.began_s = time.perf_counter()
        self.jobs[job.number] = job
        for device, part in job.script.parts.items():
            mate = self.pool.mates[device]
            for cell in part.cells:
                self._ship(cell, mate)
            data, tensors = part.message
            names = job.script.inputs.get(device, [])
            message = {"kind": part.kind, "call": job.number, "part": data, "inputs": names}
            mate.send(message, [*tensors, *(job.load.rows(name) for name in names if job.load)])
            if isinstance(part, DevicePart):
                job.written[device] = len(part.tasks), time.perf_counter() - job.began_s
        return None

    def _end(self, job: Job, error: WeftError | None = None) -> None:
        self.jobs.pop(job.number, None)
        job.ended_s = time.perf_counter()
        job.end(error)

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
        assert job.load is not None and job.script.drawing is not None, "others answer"
        for value, rows in zip(message["values"], tensors, strict=True):
            spec, start, count = job.script.drawing.blocks[value]
            job.load.store.rows[spec][start : start + count] = rows.view(count, *spec.shape)
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
        assert job.load is not None and job.script.drawing is not None, "others answer"
        tasks, read_s = {}, {}
        for device, taken_s in job.taken_s.items():
            part, spans = job.script.parts[device], [s[3:] for s in job.spans if s[1] == device]
            assert isinstance(part, DevicePart), "other parts answer"
            tasks[device] = part.tasks
            if job.load.inputs.keys() >= set(part.tasks[0].needs):
                read_s[device] = spans[0][0] - job.began_s - job.written[device][1]
            groups = [task.group for task in part.tasks]
            self.prices.saw(device, [
                (group.cell, group.num_rows, end_s - start_s - late_s)
                for group, (start_s, end_s), late_s in zip(groups, spans, taken_s, strict=True)
            ])  # fmt: skip
        self.prices.started(job.written, read_s)
        copies = waited_copies(job.spans, job.script.drawing.blocks, tasks)
        for link, facts in copies.items():
            self.prices.carried(*link, facts)

    def _answer(self, job: Job, name: str, message: Message, tensors: list[Tensor]) -> None:
        part, runs = job.script.parts[name], tensors[0].tolist()  # rows, start, end
        assert isinstance(part, RecordedPart), "other parts are done"
        seen = list(zip(message["cells"], runs, strict=True))
        for at, (cell, (_, start_s, end_s)) in enumerate(seen):
            job.spans.append((f"{cell}.{at}", name, name, start_s, end_s))
        if self.heard[name] % SEEN == 0:
            cells = {cell.name: cell for cell in part.cells}
            self.prices.saw(name, [
                (cells[cell], int(num_rows), end_s - start_s)
                for cell, (num_rows, start_s, end_s) in seen
                if cell in cells  # else it is a gather of the worker's own
            ])  # fmt: skip
        self.heard[name] += 1
        job.busy_s = message["busy_s"]
        with torch.inference_mode(False):  # they are the caller's, who may change them in place
            job.values = part.answers(tensors[1:])
        self._end(job)

    def _cancel(self, job: Job, devices: set[str]) -> None:
        for device in devices:
            if not self.pool.mates[device].lost:
                self.pool.mates[device].send({"kind": "cancel", "call": job.number})

    def _lost(self, name: str) -> None:
        """Plan anew what the lost worker had not done."""
        with self.lock:
            self.prices.forget(name)
            hit = [job for job in self.jobs.values() if name in job.script.parts]
            for job in hit:
                if name in job.waiting or not job.waiting:
                    self._cancel(job, job.waiting - {name})
                    del self.jobs[job.number]
                    self.num_replanned += 1
                    self._send(job)


def _version(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def waited_copies(
    spans: Sequence[Fact],
    blocks: Mapping[str, Block],
    tasks: Mapping[str, Sequence[Task]],
) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """The messages of a placed call that a group or the caller waited for, by (source, target):
    bytes, and seconds from when they were sent until they were home, or the group began.

    What nobody waited for may take as long as it likes; so links are priced by the others.
    """
    num_bytes: Counter[tuple[str, float]] = Counter()  # of messages: (lane, when it was sent)
    there: dict[tuple[str, str], tuple[float, tuple[str, float]]] = {}  # (value, device)
    until_s: dict[tuple[str, float], float] = {}  # of those that were waited for
    for label, lane, _, start_s, end_s in spans:
        if label.startswith("copy "):
            _, value, _, target = label.split(" ")
            spec, _, count = blocks[value]
            num_bytes[lane, start_s] += count * spec.num_bytes
            there[value, target] = end_s, (lane, start_s)
            if target == HOME:
                until_s[lane, start_s] = end_s
    for device, mine in tasks.items():
        free_s, runs = 0.0, [span[3:] for span in spans if span[1] == device]
        for task, (start_s, end_s) in zip(mine, runs, strict=True):
            came = [there[v, device] for v in task.needs if (v, device) in there]
            if came and (last := max(came))[0] > free_s:
                until_s[last[1]] = start_s
            free_s = end_s
    by_link: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (lane, start_s), seen_s in until_s.items():
        source, _, target = lane.partition(".to.")
        facts = num_bytes[lane, start_s], seen_s - start_s
        by_link.setdefault((source, target), []).append(facts)
    return by_link
