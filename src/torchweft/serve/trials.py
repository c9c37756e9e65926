"""`Trials`: which way serves which kind of call, found by timing, equal on all ranks.

    trials = Trials(session, [None, "sequential", overlap(parts=2)])
    outputs = trials.call(("prefill", 16), stock, by_plans, args, kwargs)

A way is a strategy, or None: the model as the user or the host wrote it. The first calls of a kind
(a phase, a power of two of rows) are a `Race`: after some calls to warm up the ways take turns,
round by round, and are timed. A way that is far behind leaves. The first way stays unless another
is faster by more than `GAIN` in the median of the rounds, and in most of them. A time is that of
the slowest rank, told to all ranks at the end of a round, so all of them decide alike; a call that
fell back decides nothing. On an accelerator it is the device's time, from event to event, looked at
when the round is over: the host's clock would measure launches.

Then the `Choice` is held to it: now and then the chosen way and its rival are timed again, one
after the other, and a way that has fallen behind is given up for the other, which is counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from torchweft.errors import StrategyError, clip
from torchweft.plan.context import phase_of
from torchweft.plan.write.strategy import Strategy, as_strategy
from torchweft.private.core import tree_leaves
from torchweft.ranks.talk import slowest
from torchweft.run.accelerator.accelerator import Accelerator, accelerator_of, devices_of
from torchweft.serve.session import Session, context

log = logging.getLogger("torchweft")
NUM_ROUNDS = 8
GAIN = 1.02
BEHIND = ((2, 0.90), (4, 0.97))
"""After so many rounds a way that has less than this share of the best one's speed leaves."""
PATIENCE_S, MAX_ROUNDS, FAR_BEHIND = 8.0, 32, ((4, 0.85), (8, 0.95))
"""Of a race that nobody waits for: its seconds, and rounds, as long as noise may decide it."""
WARM = 2  # calls of a plan that do not count: it is made in the first and traced in the second
GUARD_EVERY, GUARD_PAIRS = 256, 5
MAX_TOLD, MAX_ERRORS = 16, 3
Wanted = str | Strategy | Callable[..., None] | None
Way = Strategy | None
Call = Callable[..., Any]


def _no_plan(s: Any) -> None:
    raise AssertionError("torch.compile runs without our plans")


COMPILED = Strategy("torch.compile", _no_plan)
"""The way of stock torch.compile, with Inductor."""
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


class Race:
    """The calls of one kind while the choice is open. The first way stays if none is better.

    last: a way that ends each round, if one is to: ranks see there that they count alike.
    is_patient: whether its rounds go on until the best way is ahead, or behind, beyond the noise.
    """

    is_patient = False

    def __init__(self, ways: Sequence[Way], num_rounds: int = NUM_ROUNDS, last: Way = None) -> None:
        self.first, self.last, self.num_rounds = ways[0], last, num_rounds
        self.ways: list[Way] = []
        self.warm: dict[Way, int] = {}  # calls left that do not count
        self.rounds: list[dict[Way, float]] = []
        self.times: dict[Way, tuple[Any, Any]] = {}  # start and end of the calls of this round
        self.errors: Counter[Way] = Counter()  # calls of a way that raised, one behind the other
        self.num_calls = self.num_heats = 0
        self.speeds: dict[Way, float] = {}  # of all ways that were timed, in their last heat
        self.add(ways)

    def add(self, ways: Sequence[Way]) -> None:
        """Let more ways take part, in a new heat. Of those that were there the best stay."""
        self.num_heats += 1
        self.spent_s = 0.0  # of this heat's rounds
        if self.rounds:
            self.ways = [way for way in self.ways if way in self.kept or way == self.winner()]
            self.rounds.clear()
        new = [way for way in ways if way not in self.warm]
        self.ways = sorted([*self.ways, *new], key=lambda way: bool(self.last and way == self.last))
        self.warm |= {way: 1 if way is None else WARM for way in new}

    @property
    def kept(self) -> tuple[Way, ...]:
        """The ways that do not leave."""
        return (self.first, self.last)

    def next(self) -> Way:
        """The way whose turn it is."""
        warming = (way for way in self.ways if self.warm[way])
        timed = (way for way in self.ways if way not in self.times)
        return next(warming, next(timed, self.first))

    def note(self, way: Way, start: Any, end: Any) -> None:
        """A call has run."""
        self.num_calls += 1
        self.errors[way] = 0
        if self.warm[way]:
            self.warm[way] -= 1
        else:
            self.times[way] = start, end

    def fail(self, way: Way) -> None:
        """A call has raised. It does not count, but a way that only raises leaves."""
        self.errors[way] += 1
        if self.errors[way] >= MAX_ERRORS and way not in self.kept and way in self.ways:
            self.ways.remove(way)
            self.warm[way] = 0
            self.times.pop(way, None)

    @property
    def has_warmed_up(self) -> bool:
        """Whether the ways of the first heat have just warmed up."""
        begun = self.times or self.rounds or self.num_heats > 1
        return not begun and not any(self.warm.values())

    @property
    def is_round_over(self) -> bool:
        """Whether every way has been timed in this round."""
        return len(self.times) == len(self.ways)

    def close_round(self, seconds: Mapping[Way, float]) -> None:
        """Count a round, by times that all ranks have; ways that are far behind leave."""
        self.rounds.append(dict(seconds))
        self.spent_s += sum(seconds.values())
        self.times.clear()
        self.speeds |= {way: self.speed(way) for way in self.ways}
        best = max(self.speeds[way] for way in self.ways)
        for least_rounds, share in FAR_BEHIND if self.is_patient else BEHIND:
            if len(self.rounds) >= least_rounds:
                self.ways = [
                    way for way in self.ways
                    if way in self.kept or self.speed(way) >= share * best
                ]  # fmt: skip

    def speed(self, way: Way) -> float:
        """How fast a way is, in the median of its rounds; the first way has 1."""
        return median(each[self.first] / each[way] for each in self.rounds if way in each)

    @property
    def is_over(self) -> bool:
        """Whether enough is known."""
        if self.is_patient and len(self.ways) > 1:
            is_late = len(self.rounds) >= MAX_ROUNDS or self.spent_s > PATIENCE_S
            return len(self.rounds) >= self.num_rounds and (is_late or self._is_beyond_noise)
        if len(self.rounds) >= self.num_rounds or len(self.ways) == 1:
            return True
        if len(self.rounds) >= BEHIND[0][0] and all(way in self.kept for way in self.ways):
            behind = [way for way in self.ways if self.speed(way) < BEHIND[0][1]]
            if len(behind) == len(self.ways) - 1:
                return True
        best = max(self.ways, key=self.speed)
        clear = min(each[self.first] / each[best] for each in self.rounds) > 1.1
        return len(self.rounds) >= BEHIND[-1][0] and clear and len(self.ways) == 2

    @property
    def _is_beyond_noise(self) -> bool:
        """Whether the 95 % interval of the best way's speed is on one side of what wins."""
        best = max((way for way in self.ways if way != self.first), key=self.speed)
        speeds = sorted(each[self.first] / each[best] for each in self.rounds if best in each)
        reach = 0.98 * math.sqrt(len(speeds))  # of the median's, by the binomial distribution
        low, high = math.floor(len(speeds) / 2 - reach), math.ceil(len(speeds) / 2 + reach)
        return speeds[max(0, low)] > GAIN or speeds[min(high, len(speeds) - 1)] < GAIN

    def winner(self) -> Way:
        """The fastest way, if it is ahead of the first by more than noise."""
        if not self.rounds:
            return self.first
        best = max(self.ways, key=self.speed)
        num_won = sum(each[self.first] > each[best] for each in self.rounds if best in each)
        is_ahead = self.speed(best) > GAIN and 3 * num_won >= 2 * len(self.rounds)
        return best if is_ahead else self.first


@dataclass
class Choice:
    """The way that serves a kind of calls.

    speeds: of all ways that were tried, the first way having 1. rival: what it is compared with now
    and then, if it is guarded: the first way, or the best of the others.
    """

    way: Way
    speeds: Mapping[Way, float] = field(default_factory=dict)
    rival: Way = None
    is_guarded: bool = False
    speed: float = 1.0  # of the way, as far as it is known
    note: str = ""
    num_calls: int = 0
    pairs: list[tuple[float, float]] = field(default_factory=list)
    timed: dict[Way, tuple[Any, Any]] = field(default_factory=dict)

    @staticmethod
    def known(way: Way, speeds: Mapping[Way, float]) -> Choice:
        """A choice by the speeds of a race, whose first way has 1."""
        first = next((each for each, speed in speeds.items() if speed == 1), None)
        others = [each for each in speeds if each != way]
        rival = first if first != way else max(others, key=speeds.__getitem__, default=None)
        is_near = rival in speeds and speeds[rival] > BEHIND[0][1]
        return Choice(way, speeds, rival, bool(others) and is_near, speeds.get(way, 1.0))

    @property
    def is_due(self) -> bool:
        """Whether the next call is one of the two that are timed now and then."""
        return self.is_guarded and self.num_calls % GUARD_EVERY >= GUARD_EVERY - 2

    def next(self) -> tuple[Way, bool]:
        """The way of the next call, and whether it is timed; the last of two is one by a plan, in
        which ranks see that they count alike."""
        is_timed = self.is_due
        self.num_calls += 1
        is_first = self.num_calls % GUARD_EVERY == GUARD_EVERY - 1
        plain_first = (self.way, self.rival) if self.way is None else (self.rival, self.way)
        return (plain_first[not is_first] if is_timed else self.way), is_timed

    def switch(self) -> bool:
        """Take the rival if it has been faster; whether that is so."""
        faster = median(own / rival for own, rival in self.pairs)
        self.pairs.clear()
        if faster < 1 / BEHIND[1][1]:
            return False
        self.note = (
            f"{name_of(self.way)} was given up after {self.num_calls} calls, for "
            f"{name_of(self.rival)} was {faster:.2f} times as fast"
        )
        self.way, self.rival, self.speed = self.rival, self.way, 1.0
        return True


def name_of(way: Way) -> str:
    """A way as people read it."""
    return "as it is" if way is None else str(way)


class Trials:
    """Trials of one session. Ranks that make the same calls make the same choices.

    propose: asked when the ways of a kind have warmed up, and at the end of each heat: more ways to
    try, or the choice itself.
    """

    def __init__(
        self,
        session: Session,
        strategies: Sequence[Wanted],
        *,
        num_rounds: int = NUM_ROUNDS,
        propose: Callable[[Hashable, Race], Sequence[Way] | Choice] = lambda kind, race: (),
    ) -> None:
        self.last: Way = None  # the way that ends the rounds of all races
        self.skips = False  # whether the call under way does not count
        self.session, self.propose, self.num_rounds = session, propose, num_rounds
        self.ways: list[Way] = [way if way is None else as_strategy(way) for way in strategies]
        self.races: dict[Hashable, Race] = {}
        self.choices: dict[Hashable, Choice] = {}
        self.on_choice: Callable[[Hashable, Choice], None] = lambda kind, choice: None

    @property
    def num_calls(self) -> int:
        """How many calls of a kind may pass until its choice is made."""
        return (self.num_rounds + WARM) * len(self.ways)

    @property
    def chosen(self) -> dict[Hashable, Way]:
        """What was found to be fastest, by kind."""
        return {kind: choice.way for kind, choice in self.choices.items()}

    def forget(self) -> None:
        """Begin anew: what was found holds for the machine as it was."""
        self.races.clear()
        self.choices.clear()

    def call(
        self, kind: Hashable, stock: Call, by_plans: Call, args: Args, kwargs: Kwargs, **told: Any
    ) -> Any:
        """One call of a kind, by the way whose turn it is. told: what `weft.context` takes."""
        with (
            self.turn(kind, lambda: devices_of(tree_leaves((args, kwargs)))) as way,
            context(strategy=way, **told),
        ):
            return (stock if way is None else by_plans)(*args, **kwargs)

    @contextmanager
    def turn(
        self, kind: Hashable, devices: Callable[[], Collection[torch.device]] = tuple
    ) -> Iterator[Way]:
        """The way of the one call inside; it is timed as long as the choice is open.

        devices: the accelerators that it works on. A call that a host captures is the first's.
        """
        choice = self.choices.get(kind)
        if choice is not None:
            way, is_timed = choice.next()
            if not is_timed:
                yield way
                return
        race = self._race(kind) if choice is None else None
        used = devices()
        device = accelerator_of(*used) if len(used) == 1 else None
        if device is not None and device.is_capturing():
            self.session.fallbacks["trials: the host captures this call"] += 1
            yield self.ways[0]
            return
        if race is not None:
            way = race.next()
        self.skips = False
        limits = {device.no_graphs, device.one_stream, device.no_times} if device else set()
        fallen, start = _fallen(self.session.fallbacks, limits), _moment(device)
        try:
            yield way
        except Exception:
            if race is not None:
                race.fail(way)
            raise
        if self.skips:
            return
        lost = _fallen(self.session.fallbacks, limits) > fallen
        moments = (0.0, math.inf) if lost else (start, _moment(device))
        if race is not None:
            self._note(kind, race, way, *moments)
        elif choice is not None:
            self._guard(kind, choice, way, *moments)

    def _race(self, kind: Hashable) -> Race:
        if kind not in self.races:
            self.races[kind] = Race(self.ways, self.num_rounds, self.last)
        return self.races[kind]

    def _note(self, kind: Hashable, race: Race, way: Way, start: Any, end: Any) -> None:
        race.note(way, start, end)
        if race.has_warmed_up and self._ask(kind, race):
            return
        if race.is_round_over:
            own_s = [_seconds(*race.times[way]) for way in race.ways]
            race.close_round(dict(zip(race.ways, self.agreed(own_s), strict=True)))
            if race.is_over and not self._ask(kind, race):
                choice = Choice.known(race.winner(), race.speeds)
                self._choose(kind, choice)
                self.on_choice(kind, choice)

    def _ask(self, kind: Hashable, race: Race) -> bool:
        """Ask what else to try; whether there is something, or nothing is left to be tried."""
        proposed = self.propose(kind, race)
        if isinstance(proposed, Choice):
            self._choose(kind, proposed)
        elif proposed:
            race.add(proposed)
        return bool(proposed)

    def _choose(self, kind: Hashable, choice: Choice) -> None:
        self.choices[kind] = choice
        self.races.pop(kind, None)
        log.info("%s: calls of kind %s run %s", self.session, kind, name_of(choice.way))

    def _guard(self, kind: Hashable, choice: Choice, way: Way, start: Any, end: Any) -> None:
        choice.timed[way] = start, end
        if len(choice.timed) < 2:
            return
        timed = [choice.timed[each] for each in (choice.way, choice.rival)]
        own_s, rival_s = self.agreed([_seconds(*moments) for moments in timed])
        choice.timed.clear()
        choice.pairs.append((own_s, rival_s))
        if len(choice.pairs) >= GUARD_PAIRS and choice.switch():
            log.warning("calls of kind %s: %s", kind, choice.note)
            self.on_choice(kind, choice)

    def agreed(self, own: Sequence[float]) -> list[float]:
        """The largest of these numbers on all ranks that the model talks with."""
        return slowest(self.session.communicators, own, self.session.options.watchdog_s)

    def lines(self, worth: Callable[[Hashable, Choice], str] = lambda *choice: "") -> list[str]:
        """What was chosen and why, for people. worth: what else is said of a choice."""
        told = []
        for kind, choice in list(self.choices.items())[:MAX_TOLD]:
            more = worth(kind, choice)
            told.append(f"{kind}: {_told(choice)}" + (f"; {more}" if more else ""))
        for kind, race in list(self.races.items())[:MAX_TOLD]:
            told.append(f"{kind}: {len(race.rounds)} rounds so far")
        num_more = len(self.choices) + len(self.races) - len(told)
        return told + ([f"... and {num_more} more kinds of calls"] if num_more else [])


def _told(choice: Choice) -> str:
    others = [
        f"{name_of(way)} {speed:.2f}" for way, speed in choice.speeds.items() if way != choice.way
    ]
    speed = f" {choice.speeds[choice.way]:.2f}" if choice.way in choice.speeds else ""
    against = f" (others: {', '.join(others)})" if others else ""
    return f"{name_of(choice.way)}{speed}{against}" + (f"; {choice.note}" if choice.note else "")


def _fallen(fallbacks: Mapping[str, int], limits: Collection[str]) -> int:
    """How many calls fell back for another reason than what the device cannot do at all."""
    return sum(count for why, count in fallbacks.items() if why not in limits)


def _moment(device: Accelerator | None) -> Any:
    """Now: as an event of the work that the device has, or by the host's clock."""
    if device is not None and device.no_times:
        device.synchronize()
        return time.perf_counter()
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
        self, tokens: Sequence[int], stock: Call, by_plans: Call, args: Args, kwargs: Kwargs
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

    def _rehearse(self, by_plans: Call, args: Args, kwargs: Kwargs) -> None:
        """Run the first warm-up by every strategy too, for their peak of memory and their buffers:
        a host sizes its caches by what it sees there, with as many rows as a step may have."""
        trials = self.trials.values()
        for strategy in dict.fromkeys(each for trial in trials for each in trial.ways):
            if strategy is not None:
                with context(strategy=strategy):
                    by_plans(*args, **kwargs)
