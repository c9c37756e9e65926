"""`Dynamic`: a model whose graph depends on its input, run batch by batch of equal ops.

    model = weft.dynamic(model)
    y = model(tree)                      one input: equal ops of one depth run together
    ys = model.map(trees)                many inputs: over all of them

    with weft.dynamic(model, workers=[Spot("fast", cores=(0,)), Spot("slow", cores=(1,))]) as model:
        y = model(tree)                  groups are placed over the workers, by a plan
        for answer in model.stream(trees): ...      inputs in turn, all workers busy

The user's code is ordinary PyTorch with Python recursion and control flow. Where it needs numbers
(an early exit, a router), inputs of a `map` wait for each other, each in a thread of its own of
which one runs at a time, so that what they ask for still runs together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchweft.dynamic.lazy import Lazy, real
from torchweft.dynamic.recording import Recording, run_in_turns
from torchweft.dynamic.state import State
from torchweft.errors import CaptureError, MachineError, WeftError, clip
from torchweft.placement import Planner
from torchweft.placement.graph_problem import ServedRun
from torchweft.placement.learn.learner import Learner
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Trace
from torchweft.private.core import pytree
from torchweft.run.driver.executor import Executor, Job
from torchweft.run.driver.placing import SLOTS, Feed, Placer, Turns
from torchweft.run.workers.cell import Cell, Spec
from torchweft.run.workers.grouping import Block
from torchweft.run.workers.pool import Spot, WorkerPool
from torchweft.run.workers.program import Load
from torchweft.run.workers.recorded import RecordedRows, away

BUNDLES = 4  # bundles of inputs for each worker, in a map
KEPT = 4  # windows of answers that a stream keeps until those before them are there


class Weights:
    """What cells make of weights alone, computed once while the weights stay the same."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.known: dict[Cell, tuple[Any, Sequence[Any]]] = {}

    @property
    def grad(self) -> bool:
        """Whether gradients of them are wanted now."""
        return torch.is_grad_enabled() and any(w.requires_grad for w in self.weights.values())

    def __call__(self, cell: Cell) -> Sequence[Any]:
        weights = [self.weights[name] for name in cell.weights]
        prepare = cell.functions[0]
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return prepare(self.device, *weights)  # type: ignore[no-any-return]
        now = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if cell not in self.known or self.known[cell][0] != now:
            with torch.no_grad():
                self.known[cell] = now, prepare(self.device, *weights)
        return self.known[cell][1]


class RemoteRows:
    """The values of a recording that ran elsewhere, as one job: those that were wanted."""

    def __init__(self, job: Job, num_values: int) -> None:
        self.job, self.num_values = job, num_values

    def value(self, number: int, spec: Spec) -> Tensor:
        """The tensor of a value, when the job is over."""
        self.job.over.result()
        if number not in self.job.values:
            raise away(spec)
        return self.job.values[number]


@dataclass(frozen=True)
class Answer:
    """What became of one input of a stream: its outputs, or why it failed; where and how fast."""

    outputs: Any
    error: WeftError | None
    devices: tuple[str, ...]
    latency_s: float


@dataclass(frozen=True)
class DynamicReport:
    """What became of a dynamic model. `str(report)` is the readable form.

    lost: why each worker that is gone is. reasons: what ran at once, unrecorded, and how often.
    learning: what a planner that learns has learned from; "" if it does not.
    """

    num_ops: int
    num_groups: int
    workers: tuple[str, ...]
    lost: tuple[str, ...]
    num_planned: int
    num_hits: int
    num_replanned: int
    reasons: tuple[tuple[str, int], ...]
    learning: str

    def __str__(self) -> str:
        lines = [f"dynamic: {self.num_ops} ops ran in {self.num_groups} groups"]
        lines += [f"  worker {label}" for label in self.workers]
        lines += [f"  lost: {reason}" for reason in self.lost]
        if self.workers or self.lost:
            again = f"{self.num_hits} calls by a plan from the cache"
            anew = f"{self.num_replanned} planned anew for a lost worker"
            lines.append(f"  plans: {self.num_planned} made, {again}, {anew}")
        if self.learning:
            lines.append(f"  {self.learning}")
        lines += [f"  ran at once, {count} x: {reason}" for reason, count in self.reasons]
        return "\n".join(lines)


class Dynamic:
    """A dynamic model: call it with one input, or `map` it over many."""

    def __init__(
        self,
        model: nn.Module,
        *,
        inline: Iterable[type[nn.Module]] = (),
        workers: Sequence[Spot] = (),
        planner: str | Planner = "portfolio",
        deadline_s: float = 0.01,
        watchdog_s: float = 10.0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise CaptureError(f"dynamic: the model must be an nn.Module; got {clip(model)}.")
        self.state = State(model, tuple(inline), self._flush)
        self.weights = Weights(self.state.book.weights, self.state.device)
        self.num_groups = self.num_ops = 0
        self.pool: WorkerPool | None = None
        self.placer: Placer | None = None
        self.feed: Feed | None = None
        if workers:
            executor = Executor(workers, self.weights.weights, watchdog_s=watchdog_s)
            self.placer, self.feed = Placer(executor, planner, deadline_s), Feed(executor)
            self.pool = executor.pool
        self.turns: Turns | None = None
        if self.placer is not None and isinstance(planner, Learner):
            self.turns = Turns(planner, self.placer)
        self.job: Job | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of one input."""
        with self.turns or nullcontext(), self.state.record() as recording:
            given, options = recording.inputs_of((args, kwargs))
            return self._real(recording, self.state.model.forward(*given, **options))

    def map(self, inputs: Iterable[Any]) -> list[Any]:
        """The outputs of each input (a tuple is taken as several arguments), in order."""
        forward = self.state.model.forward
        with self.turns or nullcontext(), self.state.record() as recording:
            given = [_arguments(recording, each) for each in inputs]
            bundles: list[int] = []
            if self.state.online and len(given) > 1:
                turns = [partial(forward, *args) for args in given]
                outputs = run_in_turns(turns, recording.threads, partial(self._flush, recording))
            else:
                outputs = []
                for args in given:
                    bundles.append(recording.next)
                    outputs.append(forward(*args))
            if self.placer is not None:
                num = min(len(bundles), BUNDLES * len(self.placer.executor.pool.names))
                bundles = [bundles[len(bundles) * at // num] for at in range(num)]
            return self._real(recording, outputs, bundles)  # type: ignore[no-any-return]

    def stream(
        self, inputs: Iterable[Any], *, window: int | None = None, batch: int = 1
    ) -> Iterator[Answer]:
        """An answer for each input, in order; inputs run whole, each on the worker that is out of
        work first. window: how many jobs are under way at once, by default two a worker.
        batch: how many inputs make one job, at most; jobs are smaller at the end of inputs that
        have a length, so that all workers end together.
        """
        _, pool = self._workers()
        feed = self.feed
        assert feed is not None, "there are workers"
        asked: deque[tuple[Job, list[Any]]] = deque()  # jobs, and the outputs of their inputs
        source, num_left = iter(inputs), len(inputs) if isinstance(inputs, Sized) else None
        while True:
            jobs = [job for job, _ in asked if not job.over.done()]
            device, size = ("", 1) if num_left == 0 else feed.turn(num_left, batch)
            if not size and jobs:
                feed.wait(jobs, len(jobs) - 1)
                continue
            given = list(islice(source, max(1, size)))
            if not given:
                break
            num_left = None if num_left is None else max(0, num_left - len(given))
            limit = window or SLOTS * len(pool.names) or 1
            asked.append(self._start(feed, device, given))
            feed.wait([job for job, _ in asked], limit - 1)
            # A slow worker's answer is waited for only if too many others would have to wait.
            while asked and (asked[0][0].over.done() or len(asked) > KEPT * limit):
                yield from self._finish(*asked.popleft())
        while asked:
            yield from self._finish(*asked.popleft())

    def _start(self, feed: Feed, device: str, given: list[Any]) -> tuple[Job, list[Any]]:
        """A job of these inputs; it is over if they ran while they were recorded, or failed."""
        if self.turns is not None:
            self.turns.begin()
        outputs: list[Any] = []
        try:
            with self.state.record() as recording:
                for each in given:
                    outputs.append(self.state.model.forward(*_arguments(recording, each)))
                if recording.store is None and recording.used:
                    part = recording.take(_lazies(recording, outputs))
                    job = feed.whole(part, device, len(given))
                    recording.store = RemoteRows(job, recording.next)
                    return feed.executor.submit(job), outputs
                if recording.used or recording.packs:  # it ran already, in part
                    self._flush(recording, _lazies(recording, outputs))
                return Job.ended(), outputs
        except WeftError as error:  # it is the answer to these; others are under way
            return Job.ended(error), [None] * len(given)

    def _finish(self, job: Job, outputs: list[Any]) -> Iterator[Answer]:
        error = job.over.exception()
        assert error is None or isinstance(error, WeftError), "a job fails with our errors"
        if job.tries:  # it was sent
            self.job = job
        for each in outputs:
            made = None if error else pytree.tree_map(real, each)
            yield Answer(made, error, tuple(job.script.parts), job.ended_s - job.began_s)

    def join(self, spot: Spot) -> None:
        """Bring in a new worker: it is measured, and takes part from the next plan on."""
        placer, _ = self._workers()
        placer.executor.join(spot)

    def plan(self) -> Plan:
        """The plan of the last call that was placed."""
        if self.job is None or self.job.script.plan is None:
            raise WeftError("plan: no call has been placed by a planner yet.", rule="plan")
        return self.job.script.plan

    def trace(self) -> Trace:
        """What happened in the last call on the workers."""
        if self.job is None:
            raise WeftError("trace: no call has run on workers yet.", rule="trace")
        return self.job.trace()

    def served(self) -> ServedRun:
        """The last call that was placed, as data that a policy can be fine-tuned on."""
        self.plan()  # or its error
        placer, _ = self._workers()
        assert self.job is not None and self.job.script.drawing is not None, "it has a plan"
        return placer.served(self.job.script.drawing, self.job.trace())

    def report(self) -> DynamicReport:
        """What became of the calls so far; `weft.report(model)` gives the same."""
        placer, pool = self.placer, self.pool
        return DynamicReport(
            num_ops=self.num_ops,
            num_groups=self.num_groups,
            workers=tuple(m.spot.label for m in pool.mates.values() if not m.lost) if pool else (),
            lost=tuple(m.lost for m in pool.mates.values() if m.lost) if pool else (),
            num_planned=placer.num_planned if placer else 0,
            num_hits=placer.num_hits if placer else 0,
            num_replanned=placer.executor.num_replanned if placer else 0,
            reasons=tuple(self.state.book.reasons.most_common()),
            learning=str(self.turns or ""),
        )

    def _workers(self) -> tuple[Placer, WorkerPool]:
        if self.placer is None or self.pool is None:
            raise MachineError("dynamic: this needs workers; give workers=[Spot(...), ...].")
        return self.placer, self.pool

    def close(self) -> None:
        """Give the model's modules back as they were, and stop the workers."""
        self.state.close()
        if self.turns is not None:
            self.turns.close()
        if self.pool is not None:
            self.pool.stop()

    def _real(self, recording: Recording, outputs: Any, bundles: Sequence[int] = ()) -> Any:
        if recording.used or recording.inputs or recording.apart or recording.packs:
            self._flush(recording, _lazies(recording, outputs), bundles)
        leaves, tree = pytree.tree_flatten(outputs)
        mine = [
            number
            for number, leaf in enumerate(leaves)
            if type(leaf) is Lazy and leaf.home is recording and leaf.id not in recording.given
        ]
        if mine:
            made = recording.store.values([(leaves[n].id, leaves[n].spec) for n in mine])
            for number, tensor in zip(mine, made, strict=True):
                leaves[number] = tensor
        return pytree.tree_unflatten(map(real, leaves), tree)

    def _flush(
        self,
        recording: Recording,
        wanted: Sequence[Lazy] | None = None,
        bundles: Sequence[int] = (),
    ) -> None:
        if self.placer is None or self.weights.grad or not recording.used:
            rows = rows_of(recording, grad=self.weights.grad)
            with torch.autocast(self.weights.device.type, enabled=False):
                groups = rows.add(recording.take())
                cells = dict.fromkeys(each.cell for each in groups)
                ready = {cell: self.weights(cell) for cell in cells}
                for each in groups:
                    rows.store.run(each, ready.__getitem__)
        else:
            pending = load(recording, wanted, bundles)
            groups = pending.groups
            self.job = self.placer.executor.submit(self.placer.planned(pending))
            self.job.over.result()
            if self.turns is not None:
                self.turns.served(self.job)
        self.num_groups += len(groups)
        self.num_ops += sum(group.num_rows for group in groups)


def _lazies(home: Recording, outputs: Any) -> list[Lazy]:
    leaves = pytree.tree_leaves(outputs)
    return [leaf for leaf in leaves if type(leaf) is Lazy and leaf.home is home]


def _arguments(recording: Recording, given: Any) -> Any:
    return recording.inputs_of(given if isinstance(given, tuple) else (given,))


def rows_of(recording: Recording, *, grad: bool) -> RecordedRows:
    """Where the rows of a recording are, here."""
    if recording.store is None:
        recording.store = RecordedRows(recording.device, grad=grad)
    rows: RecordedRows = recording.store
    return rows


def load(recording: Recording, wanted: Sequence[Lazy] | None, bundles: Sequence[int] = ()) -> Load:
    """Take what is pending, to be placed; `wanted` None: the caller may ask for anything later."""
    rows = rows_of(recording, grad=False)
    first = rows.num_values
    groups = rows.add(recording.take(), bundles)
    made: dict[Spec, list[Tensor]] = {}
    for each in groups:
        for spec, start, count in each.results:
            made.setdefault(spec, []).append(torch.arange(start, start + count))
    outputs, num_rows = {spec: torch.cat(each) for spec, each in made.items()}, rows.num_rows
    inputs: dict[str, Block] = {}  # of specs that are read: given now, or made by earlier flushes
    for spec in dict.fromkeys(spec for each in groups for spec in each.cell.reads):
        if count := num_rows[spec] - len(outputs.get(spec, ())):
            inputs[f"in{len(inputs)}"] = spec, 0, count
    if wanted is not None:
        rows.first_away, rows.brought = first, frozenset(lazy.id for lazy in wanted)
        asked: dict[Spec, list[Tensor]] = {}
        for lazy in wanted:
            spec = rows.packs.get(lazy.id, (lazy.spec,))[0]
            asked.setdefault(spec, []).append(rows.rows_of(lazy.id).reshape(-1))
        unique = {spec: torch.unique(torch.cat(each)) for spec, each in asked.items()}
        outputs = {
            spec: each[torch.isin(each, outputs[spec])]
            for spec, each in unique.items()
            if spec in outputs
        }
    return Load(groups, inputs, outputs, dict(num_rows), rows.store)
