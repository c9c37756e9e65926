"""`Trials`: which strategy serves which kind of call, found by trying, equal on all ranks.

    trials = Trials(session, [None, "sequential", overlap(parts=2)])
    outputs = trials.call(("prefill", 16), stock, by_plans, args, kwargs)

The first calls of a kind (a phase, a power of two of rows) take the strategies in turn, round by
round, and are timed: they are the kind's warm-up. Then the fastest stays. None stands for the
host's own way, without plans. The first of the strategies stays unless another is faster by more
than `GAIN`. A time is that of the slowest rank, the best of all rounds: a call that compiles
decides nothing, nor does one that fell back. On an accelerator it is the device's time, from event
to event, looked at when the choice is made: the host's clock would measure launches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any

import torch

from torchweft.errors import StrategyError, clip
from torchweft.plan.context import phase_of
from torchweft.plan.write.strategy import Strategy, as_strategy
from torchweft.private.core import tree_leaves
from torchweft.ranks.talk import slowest
from torchweft.run.accelerator.accelerator import Accelerator, accelerator_of, devices_of
from torchweft.serve.session import Session, context

NUM_ROUNDS = 6
GAIN = 1.02
Wanted = str | Strategy | Callable[..., None] | None
Way = Callable[..., Any]
Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def wanted_by(options: Any, auto: Sequence[Wanted]) -> tuple[Wanted, ...]:
    """The strategies that a configuration names: "auto", "stock" (the host's own way), a name, or
    several with their options: {"overlap": {"parts": 4}, "sequential": {}}.

    Raises `StrategyError` for anything else."""
    if options in ("auto", "stock"):
        return tuple(auto) if options == "auto" else (None,)
    named = {options: {}} if isinstance(options, str) else options
    known = isinstance(named, Mapping) and all(isinstance(e, Mapping) for e in named.values())
    if not known or not named:
        raise StrategyError(
            f"strategy: {clip(options)} names no strategy. Say 'auto', 'stock', its name, "
            "or several with their options: {'overlap': {'parts': 4}}.",
            rule="option",
        )
    return tuple(as_strategy(name)(**given) for name, given in named.items())


class Trials:
    """Trials of one session. Ranks that make the same calls make the same choices."""

    def __init__(
        self, session: Session, strategies: Sequence[Wanted], *, num_rounds: int = NUM_ROUNDS
    ) -> None:
        self.session = session
        self.strategies = [each if each is None else as_strategy(each) for each in strategies]
        self.num_calls = num_rounds * len(self.strategies)
        self.times: dict[Hashable, list[list[tuple[Any, Any]]]] = {}  # start and end of each call
        self.chosen: dict[Hashable, Strategy | None] = {}

    def forget(self) -> None:
        """Begin anew: what was found holds for the machine as it was."""
        self.times.clear()
        self.chosen.clear()

    def call(
        self, kind: Hashable, stock: Way, by_plans: Way, args: Args, kwargs: Kwargs, **told: Any
    ) -> Any:
        """One call of a kind, by the strategy whose turn it is. told: what `weft.context` takes."""
        devices = () if kind in self.chosen else devices_of(tree_leaves((args, kwargs)))
        with self.turn(kind, *devices) as strategy, context(strategy=strategy, **told):
            return (stock if strategy is None else by_plans)(*args, **kwargs)

    @contextmanager
    def turn(self, kind: Hashable, *devices: torch.device) -> Iterator[Strategy | None]:
        """The strategy for the one call inside; it is timed as long as the choice is open.

        devices: the accelerators that it works on. A call that a host captures is the first's.
        """
        if kind in self.chosen:
            yield self.chosen[kind]
            return
        device = accelerator_of(*devices) if len(devices) == 1 else None
        if device is not None and device.is_capturing():
            self.session.fallbacks["trials: the host captures this call"] += 1
            yield self.strategies[0]
            return
        times = self.times.setdefault(kind, [[] for _ in self.strategies])
        number = min(range(len(times)), key=lambda at: len(times[at]))
        fallen, start = self.session.fallbacks.total(), _moment(device)
        yield self.strategies[number]
        lost = self.session.fallbacks.total() > fallen
        times[number].append((0.0, math.inf) if lost else (start, _moment(device)))
        if sum(map(len, times)) >= self.num_calls:
            self.chosen[kind] = self._choose([min(starmap(_seconds, each)) for each in times])

    def _choose(self, own_s: Sequence[float]) -> Strategy | None:
        graphs = (piece.graph for piece in self.session.pieces)
        best_s = slowest(graphs, own_s, self.session.options.watchdog_s)
        best = best_s.index(min(best_s))
        return self.strategies[best if best_s[0] > GAIN * best_s[best] else 0]


def _moment(device: Accelerator | None) -> Any:
    """Now: as an event of the work that the device has, or by the host's clock."""
    return device.now() if device is not None else time.perf_counter()


def _seconds(start: Any, end: Any) -> float:
    """From one moment to another; waits for a device."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


class Phases:
    """Trials for the steps of a serving engine: each phase has strategies of its own."""

    def __init__(self, session: Session, strategies: Mapping[str, Sequence[Wanted]]) -> None:
        self.session = session
        self.trials = {phase: Trials(session, each) for phase, each in strategies.items()}
        self.rehearsed = False

    @property
    def chosen(self) -> dict[str, str]:
        """What was found to be fastest, by the kind of step."""
        chosen = [item for trials in self.trials.values() for item in trials.chosen.items()]
        return {str(kind): str(strategy) for kind, strategy in chosen}

    def call(
        self, tokens: Sequence[int], stock: Way, by_plans: Way, args: Args, kwargs: Kwargs
    ) -> Any:
        """One step: its phase and a power of two of its tokens are its kind.

        tokens: of each request; without any it is a warm-up, which is the host's own, and counted.
        """
        if not tokens:  # expected, so no fallback that is warned of or forbidden
            self.session.fallbacks["warm-up: no request is in this call"] += 1
            if not self.rehearsed:
                self.rehearsed = True
                self._rehearse(by_plans, args, kwargs)
            return stock(*args, **kwargs)
        phase = phase_of(tokens)
        kind, told = (phase, sum(tokens).bit_length()), {"tokens_per_request": tokens}
        return self.trials[phase].call(kind, stock, by_plans, args, kwargs, phase=phase, **told)

    def _rehearse(self, by_plans: Way, args: Args, kwargs: Kwargs) -> None:
        """Run the first warm-up by every strategy too, for their peak of memory and their buffers:
        a host sizes its caches by what it sees there, with as many rows as a step may have."""
        trials = self.trials.values()
        for strategy in dict.fromkeys(each for trial in trials for each in trial.strategies):
            if strategy is not None:
                with context(strategy=strategy):
                    by_plans(*args, **kwargs)
