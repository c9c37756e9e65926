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
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self

import torch
from torch import nn

from torchweft.dynamic.baton import run_in_turns
from torchweft.dynamic.feed import SLOTS, Feed
from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.learning import Turns
from torchweft.dynamic.local import RemoteRows, Weights, flush_here, take_all
from torchweft.dynamic.placing import Placer, load
from torchweft.dynamic.recording import Recording
from torchweft.dynamic.reporting import DynamicReport
from torchweft.dynamic.state import State
from torchweft.errors import CaptureError, MachineError, WeftError, clip
from torchweft.placement import Planner
from torchweft.placement.learn.learner import Learner
from torchweft.placement.learn.served import ServedRun
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Trace
from torchweft.private.core import pytree
from torchweft.run.workers.executor import Executor, Job
from torchweft.run.workers.pool import Spot, WorkerPool

BUNDLES = 4  # bundles of inputs for each worker, in a map
KEPT = 4  # windows of answers that a stream keeps until those before them are there


Asked = tuple[Job | None, list[Any], WeftError | None]


@dataclass(frozen=True)
class Answer:
    """What became of one input of a stream: its outputs, or why it failed; where and how fast."""

    outputs: Any
    error: WeftError | None
    devices: tuple[str, ...]
    latency_s: float


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
            raise CaptureError(f"dynamic: {clip(model)} is no nn.Module.")
        self.state = State(model, tuple(inline))
        self.weights = Weights(self.state)
        self.num_groups = self.num_ops = 0
        self.state.flush = self._flush
        self.pool = WorkerPool(workers, watchdog_s=watchdog_s) if workers else None
        self.placer: Placer | None = None
        self.feed: Feed | None = None
        if self.pool is not None:
            executor = Executor(self.pool, self.state.weights)
            self.placer, self.feed = Placer(executor, planner, deadline_s), Feed(executor)
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
        with self._between_turns(), self.state.record() as recording:
            given, options = recording.inputs_of((args, kwargs))
            return self._real(recording, self.state.model.forward(*given, **options))

    def map(self, inputs: Iterable[Any]) -> list[Any]:
        """The outputs of each input (a tuple is taken as several arguments), in order."""
        forward = self.state.model.forward
        with self._between_turns(), self.state.record() as recording:
            given = [_arguments(recording, each) for each in inputs]
            bundles: list[int] = []
            if self.state.online and len(given) > 1:
                outputs = run_in_turns(self.state, [partial(forward, *args) for args in given])
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
        asked: deque[Asked] = deque()
        source, num_left = iter(inputs), len(inputs) if isinstance(inputs, Sized) else None
        while True:
            jobs = [job for job, *_ in asked if job is not None and not job.over.is_set()]
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
            feed.wait([job for job, *_ in asked if job is not None], limit - 1)
            # A slow worker's answer is waited for only if too many others would have to wait.
            while asked and (_over(asked[0][0]) or len(asked) > KEPT * limit):
                yield from self._finish(feed, *asked.popleft())
        while asked:
            yield from self._finish(feed, *asked.popleft())

    def _start(self, feed: Feed, device: str, given: list[Any]) -> Asked:
        """A job of these inputs; none if they ran while they were recorded, or failed then."""
        if self.turns is not None:
            self.turns.begin()
        try:
            return *self._ask(feed, device, given), None
        except WeftError as error:  # it is the answer to these; others are under way
            return None, [None] * len(given), error

    def _ask(self, feed: Feed, device: str, given: list[Any]) -> tuple[Job | None, list[Any]]:
        with self.state.record() as recording:
            outputs = []
            for each in given:
                outputs.append(self.state.model.forward(*_arguments(recording, each)))
            if recording.store is not None or not recording.used:  # it ran already, in part
                if recording.used or recording.packs:
                    self._flush(recording, _lazies(outputs))
                return None, outputs
            job = feed.whole(take_all(recording, _lazies(outputs)), device, len(given))
            recording.store = RemoteRows(job, recording.next)
            return feed.executor.submit(job), outputs

    def _finish(
        self, feed: Feed, job: Job | None, outputs: list[Any], error: WeftError | None
    ) -> Iterator[Answer]:
        devices: tuple[str, ...] = ()
        latency_s = 0.0
        if job is not None:
            feed.wait([job], 0)
            self.job = job
            error, devices = job.error, tuple(job.parts)
            latency_s = job.ended_s - job.began_s
        for each in outputs:
            found = None if error else pytree.tree_map(self.state.real, each)
            yield Answer(found, error, devices, latency_s)

    def join(self, spot: Spot) -> None:
        """Bring in a new worker: it is measured, and takes part from the next plan on."""
        placer, pool = self._workers()
        pool.join(spot)
        placer.executor.welcome(spot.name)

    @contextmanager
    def _between_turns(self) -> Iterator[None]:
        """A planner that learns does so before and after this, never meanwhile."""
        if self.turns is None:
            yield
            return
        self.turns.begin()
        yield
        self.turns.end()

    def plan(self) -> Plan:
        """The plan of the last call that was placed."""
        if self.job is None or self.job.plan is None:
            raise WeftError("plan: no call has been placed by a planner yet.", rule="plan")
        return self.job.plan

    def trace(self) -> Trace:
        """What happened in the last call on the workers."""
        if self.job is None:
            raise WeftError("trace: no call has run on workers yet.", rule="trace")
        return self.job.trace()

    def served(self) -> ServedRun:
        """The last call that was placed, as data that a policy can be fine-tuned on."""
        self.plan()  # or its error
        placer, _ = self._workers()
        assert self.job is not None and self.job.drawing is not None, "a plan has a drawing"
        return placer.served(self.job.drawing, self.job.trace())

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
            reasons=tuple(self.state.reasons.most_common()),
            learning=str(self.turns or ""),
        )

    def _workers(self) -> tuple[Placer, WorkerPool]:
        if self.placer is None or self.pool is None:
            raise MachineError("dynamic: there are no workers; give workers=[Spot(...), ...].")
        return self.placer, self.pool

    def close(self) -> None:
        """Give the model's modules back as they were, and send the workers home."""
        self.state.close()
        if self.turns is not None:
            self.turns.close()
        if self.pool is not None:
            self.pool.stop()

    def _real(self, recording: Recording, outputs: Any, bundles: Sequence[int] = ()) -> Any:
        if recording.used or recording.inputs or recording.apart or recording.packs:
            self._flush(recording, _lazies(outputs), bundles)
        leaves, tree = pytree.tree_flatten(outputs)
        mine = [
            number
            for number, leaf in enumerate(leaves)
            if type(leaf) is Lazy and leaf.home is recording and leaf.id not in recording.given
        ]
        if mine:
            made = recording.store.values([leaves[number] for number in mine])
            for number, tensor in zip(mine, made, strict=True):
                leaves[number] = tensor
        return pytree.tree_unflatten(map(self.state.real, leaves), tree)

    def _flush(
        self,
        recording: Recording,
        wanted: Sequence[Lazy] | None = None,
        bundles: Sequence[int] = (),
    ) -> None:
        grad = torch.is_grad_enabled() and any(
            weight.requires_grad for weight in self.state.weights.values()
        )
        if self.placer is None or grad or not recording.used:
            groups = flush_here(recording, self.weights)
        else:
            loaded = load(recording, wanted, bundles)
            groups = loaded.groups
            self.job = self.placer.executor.submit(self.placer.planned(loaded))
            self.job.wait()
            if self.turns is not None:
                self.turns.served(self.job)
        self.num_groups += len(groups)
        self.num_ops += sum(group.num_rows for group in groups)


def _lazies(outputs: Any) -> list[Lazy]:
    return [each for each in pytree.tree_leaves(outputs) if type(each) is Lazy]


def _over(job: Job | None) -> bool:
    return job is None or job.over.is_set()


def _arguments(recording: Recording, given: Any) -> Any:
    return recording.inputs_of(given if isinstance(given, tuple) else (given,))
