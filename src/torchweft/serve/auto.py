"""`Auto`: a model that finds out by itself how it runs best, and never loses to what it was.

    first calls     the model as it is, until a trial is a small share of their seconds (`Budget`)
    then one        captured, and run by the plan without parts
    further calls   a race (`Trials`) for each kind of inputs: the model as it is, the plan without
                    parts, and the strategies that the simulator expects to be faster; between its
                    calls, as many as the budget asks for run by what is best so far

All of these calls give right answers; they are only timed. Kinds are shapes by powers of two. What
is captured shows which strategies can gain at all: those that split, where something waits for a
network; `branches`, where ops can run side by side. The best few by simulation are raced.

Ranks race together: times are exchanged, and a call of a race is told to the other ranks with its
kind, so that ranks whose calls are of different kinds notice it before the first collective. Then
all of them run that call as it is. A call that runs as it is on one rank does so on all: it says so
in a message that it does not wait for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed import get_world_size, is_initialized

from torchweft.errors import PlanError, RunError, WeftError
from torchweft.plan.context import TOLD, HostFacts
from torchweft.plan.improve import replay
from torchweft.plan.improve.predict import candidates
from torchweft.plan.machine import FORMULAS
from torchweft.plan.strategies import sequential
from torchweft.plan.write.strategy import Strategy
from torchweft.private.core import has_mkldnn, tree_leaves
from torchweft.ranks.faults import EagerError, LostError
from torchweft.ranks.ranks import RANKS
from torchweft.ranks.speakers import number_of
from torchweft.ranks.talk import Ear, announce, meet
from torchweft.run.accelerator.accelerator import devices_of
from torchweft.run.compare import leaves_of
from torchweft.serve.book.costbook import Calls, CostBook, same_on_all
from torchweft.serve.budget import Budget
from torchweft.serve.piece import Piece, remember
from torchweft.serve.session import Session
from torchweft.serve.trials import COMPILED, Choice, Race, Trials, Way
from torchweft.serve.tuned import Tuned

NUM_PROPOSED = 3
MIN_GAIN, MIN_SEARCHED = 1.03, 1.01
MAX_DISAGREED, MAX_UNCAPTURED, MAX_KINDS, MAX_NAME = 3, 3, 256, 32
TOO_MANY = "auto: the calls are of too many kinds; those of further kinds run as they are"
NO_FACTS = HostFacts()
COMPILERS = ("torch._dynamo", "torch._inductor")  # whose errors are theirs, not the model's


class Auto:
    """The calls of one model. `plain`: the model as it is; `woven`: by plans, as TOLD says."""

    def __init__(
        self, session: Session, plain: Callable[..., Any], woven: Callable[[Any, Any], Any]
    ) -> None:
        self.session, self.plain, self.woven = session, plain, woven
        self.book = CostBook()
        self.trials = Trials(session, (None, sequential), propose=self._propose)
        self.trials.on_choice = self._keep
        self._tuned: dict[Hashable, Tuned] = {}
        self.traced: dict[Hashable, Calls] = {}  # by kind: the call that was looked at
        self._steady: dict[object, Choice] = {}  # by exact sizes: a settled call is one look-up
        self.tries_compiled = False  # only where nobody minds that a call compiles for long
        self.is_trial = False  # whether this call tries something in traffic
        self.is_open = False  # whether some call may have been planned
        self.is_forced = False  # to run by plans, whatever is faster
        self.retired = ""
        self.budget = Budget()
        self.num_calls = self.num_attempts = self.num_disagreed = 0
        self._racing = threading.Lock()  # one call at a time is timed, and none inside of another
        self._compiled: Callable[..., Any] | None = None
        self.trains: bool | None = None  # whether results have gradients; None: not known yet
        self._facts: dict[object, HostFacts] = {}

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One call."""
        self.num_calls, self.is_trial = self.num_calls + 1, False
        if self.num_calls & (self.num_calls - 1) == 0 and self.num_calls > 1:
            self._meet()
        if not self.is_open:  # until then no rank may have a plan, so nobody needs to be told
            asked = self.is_forced or self.tries_compiled
            self.is_open = asked or self.num_calls >= self.budget.starts[True]
        exact: Hashable = None
        if not kwargs and not self.is_forced and TOLD.get() is None:
            exact = _exact(args)
            choice = self._steady.get(exact)
            if choice is not None and not choice.is_due:
                return self._settled(choice, args, kwargs)
        facts = TOLD.get()
        if facts is not None and facts.strategy is not None:  # the host knows better
            self.is_open = True
            return self.woven(args, kwargs)
        kind = self._kind(args, kwargs)
        choice = self.trials.choices.get(kind)
        if self.is_forced:
            way = choice.way if choice is not None and choice.way is not COMPILED else None
            return self._run(way or sequential, args, kwargs)
        if self.retired:
            return self._stock(None, args, kwargs)
        if torch.is_grad_enabled() and self.trains is not False:
            return self._train(args, kwargs)
        if kind is None:
            self.session.fallbacks[TOO_MANY] += 1
            return self._stock(None, args, kwargs)
        if choice is not None and not choice.is_due:
            if exact is not None:
                remember(self._steady, exact, choice)
            return self._settled(choice, args, kwargs)
        if not self._racing.acquire(blocking=False):
            return self._run(choice.way if choice is not None else None, args, kwargs)
        try:
            return self._counted(kind, choice, args, kwargs)
        finally:
            self._racing.release()

    def _counted(
        self, kind: Hashable, choice: Choice | None, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """A call without a choice, or one of a pair that is timed: a trial, if that is allowed."""
        if choice is None and not self._may_try(kind):
            return self._wait(kind, args, kwargs)
        start, self.trials.skips = time.perf_counter(), False
        self.is_trial = not self.tries_compiled
        way, outputs = self._try(kind, args, kwargs)
        if self.trials.skips or self.tries_compiled or way is COMPILED:
            return outputs
        if way is None:
            self.budget.note_usual(kind, time.perf_counter() - start)
        else:  # ranks have seen in the call that they count alike
            self.budget.note_trial(kind, time.perf_counter() - start)
            self.budget.agree(self.num_calls, self.trials.agreed)
        return outputs

    def _settled(self, choice: Choice, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call of a kind whose choice is made."""
        choice.num_calls += 1
        start, speed = time.perf_counter(), choice.speed
        outputs = self._run(choice.way, args, kwargs)
        self.budget.note(time.perf_counter() - start, speed)
        return outputs

    def _may_try(self, kind: Hashable) -> bool:
        """Whether this call may be a trial: of any call in a warm-up, else of what is not dear."""
        if self.num_calls == 1:
            return False  # it shows whom the model talks with
        return self.tries_compiled or self.budget.allows(kind, self.num_calls)

    def _wait(self, kind: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call by the best way so far, for a trial would cost too much now."""
        race = self.trials.races.get(kind)
        way = race.winner() if race is not None else None
        start, begun = time.perf_counter(), time.thread_time()
        outputs = self._run(way, args, kwargs)
        if race is None or way is None:
            busy_s = time.thread_time() - begun
            self.budget.note_usual(kind, time.perf_counter() - start, busy_s)
        else:
            self.budget.note(time.perf_counter() - start, race.speed(way))
        return outputs

    def _meet(self) -> None:
        """Between two calls: ranks tell each other what theirs have taken."""
        if torch.is_grad_enabled() and self.trains is not False:
            return  # nothing is tried there, and pipelines that train do not call in step
        names, session = self.session.communicators, self.session
        try:
            meet(names, self.num_calls, session.speaker, session.options.watchdog_s)
            self.budget.agree(self.num_calls - 1, self.trials.agreed)
        except WeftError as error:
            if isinstance(error, PlanError) and error.rule == RANKS:
                self._disagree(isinstance(error, EagerError))
            elif session.pieces:
                raise
            else:  # perhaps nobody but this rank has such a model
                self.retired = f"the other ranks do not count its calls: {error}"

    def _try(self, kind: Hashable, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Way, Any]:
        """A call of a race, or of the guard of a choice; with its way."""
        if not self.session.pieces:
            if self.num_attempts >= MAX_UNCAPTURED:
                self.retired = "nothing of the model could be captured"
                return None, self._stock(None, args, kwargs)
            outputs = self._run(sequential, args, kwargs)
            self.num_attempts += 1
            return sequential, outputs
        self.trials.last = sequential if self._communicators() else None
        race, choice = self.trials.races.get(kind), self.trials.choices.get(kind)
        service, given = self.session.service, (args, kwargs)
        number = race.num_calls if race is not None else choice.num_calls if choice else 0
        with self.trials.turn(kind, lambda: devices_of(tree_leaves(given))) as way:
            is_plan = way is not None and way is not COMPILED
            warms_up = race is not None and race.warm.get(way) == 1 and is_plan
            if any(piece.device and piece.device.no_times for piece in self.session.pieces):
                warms_up = False  # there is nothing to trace with
            service.salt = number_of(f"{kind} {number}")
            num_stock = service.num_stock
            for piece in self.session.pieces if warms_up else ():
                piece.traced = None
            try:
                with service.collect() if warms_up else nullcontext():
                    return way, self._run(way, args, kwargs)
            finally:
                service.salt = 0
                self.trials.skips |= service.num_stock > num_stock  # disabled: not by its plan

    def _run(self, way: Way, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if way is None or way is COMPILED:
            return self._stock(way, args, kwargs)
        facts = TOLD.get() or NO_FACTS
        mine = self._facts.get((facts, way))
        if mine is None:
            mine = replace(facts, strategy=way)
            remember(self._facts, (facts, way), mine)
        token = TOLD.set(mine)
        own: BaseException | None = None
        try:
            outputs = self.woven(args, kwargs)
        except PlanError as error:
            if error.rule != RANKS or not self._may_repeat():
                raise
            self._disagree(isinstance(error, EagerError))
            return self.plain(*args, **kwargs)
        except RunError as error:
            own = error.__cause__
            if not error.story or own is None or isinstance(own, WeftError | LostError):
                raise
            own.add_note(str(error))
        finally:
            TOLD.reset(token)
        if own is not None:  # the model's own error, whichever way its turn was
            raise own
        if self.trains is False and torch.is_grad_enabled() and _has_gradients(outputs):
            self.trains = True  # since the weights or an input have been told to
            self._steady.clear()
        return outputs

    def _train(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call with gradients on. Where they flow it stays as it is: what the backward takes is
        not raced, so nobody could say that it does not lose."""
        outputs = self._stock(None, args, kwargs)
        if self.trains is None:
            self.trains = _has_gradients(outputs)
        return outputs

    def _stock(self, way: Way, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The model as it is, or by torch.compile; no rank may run it by a plan then."""
        if is_initialized() and self.session.heard is None:
            with Ear() as ear:
                outputs = self.plain(*args, **kwargs)
            self.session.heard = ear.names
            return outputs
        if self.is_open and is_initialized() and (names := self._communicators()):
            announce(names, self.session.speaker, self.session.options.watchdog_s)
        if way is None:
            return self.plain(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self.plain)
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            if not type(error).__module__.startswith(COMPILERS):
                raise
            line = str(error).strip().partition("\n")[0]
            self.session.fallbacks[f"torch.compile: {type(error).__name__}: {line}"] += 1
            return self.plain(*args, **kwargs)

    @contextmanager
    def tuning(self) -> Iterator[None]:
        """Calls inside may take long: torch.compile takes part in their races."""
        self.tries_compiled = True
        try:
            yield
        finally:
            self.tries_compiled = False

    @contextmanager
    def by_plans(self) -> Iterator[None]:
        """Calls inside run by plans: the chosen one, or that without parts."""
        self.is_forced = True
        try:
            yield
        finally:
            self.is_forced = False

    def strategies(self) -> list[Strategy]:
        """The strategies that were chosen for some calls."""
        chosen = dict.fromkeys(self.trials.chosen.values())
        return [way for way in chosen if way is not None and way is not COMPILED]

    def is_settled(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether it is known how calls of this kind run best."""
        trains, kind = torch.is_grad_enabled() and bool(self.trains), self._kind(args, kwargs)
        return bool(self.retired) or trains or kind is None or kind in self.trials.choices

    def _kind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
        """The kind of a call. Where there are too many, names and numbers are told by their types
        alone, and after that a call that is like no other has none."""
        known: tuple[Mapping[Hashable, Any], ...] = self.trials.choices, self.trials.races
        for by_type in (False, True):
            kind = kind_of(args, kwargs, by_type)
            if any(kind in each for each in known):
                return kind
            if sum(map(len, known)) < MAX_KINDS * (1 + by_type):
                return kind
        return None

    def forget(self) -> None:
        """Begin anew: what was found holds for the machine as it was."""
        self.trials.forget()
        self.book.clear()
        self.traced.clear()
        self._steady.clear()

    def lines(self) -> list[str]:
        """What was chosen for which calls, and why, for people."""
        told = [f"auto: {self.retired}"] if self.retired else []
        if self.trains:
            told.append("auto: calls that train run as they are; name a strategy to plan them")
        if not self.session.pieces and not told:
            told.append(self.budget.line())
        return told + self.trials.lines(self._worth)

    def _worth(self, kind: Hashable, choice: Choice) -> str:
        """What a choice is worth: how near it is to what no schedule can beat, at the costs that
        were seen."""
        if not (calls := self.traced.get(kind)):
            return ""
        for piece, _ in calls:
            self.book.read(piece)
        way = sequential if choice.way in (None, COMPILED) else choice.way
        assert way is not None, "what runs without a plan was looked at as sequential"
        plain_s, own_s = (
            sum(self.book.predict(piece, each, context) for piece, context in calls)
            for each in (replace(sequential, inner=way.inner), way)
        )
        if own_s == math.inf:
            return ""  # no plan of it fits the memory
        return self.book.bound(calls, way.inner).sentence(own_s, plain_s)

    def _communicators(self) -> set[str]:
        return self.session.communicators

    def _may_repeat(self) -> bool:
        """Whether a call that no collective of was started may be run once more."""
        return not any(piece.writes or piece.splitters for piece in self.session.pieces)

    def _disagree(self, by_turns: bool) -> None:
        """Ranks have calls of different kinds: this one runs as it is, and after some, all do."""
        reason = "auto: the ranks have calls of different kinds"
        self.session.fallbacks[reason] += 1
        self.trials.skips = True
        self.num_disagreed += not by_turns
        if self.num_disagreed > MAX_DISAGREED:
            self.retired = f"{reason}; name a strategy that suits all of them"
            self._steady.clear()

    def _propose(self, kind: Hashable, race: Race) -> Sequence[Way] | Choice:
        """What else to try: what is predicted to be faster; in a warm-up what a search makes of
        the winner, at the costs that parts have shown; then other kernels for the winner."""
        race.is_patient = self.tries_compiled
        if race.num_heats == 1 and not race.rounds:
            pieces = [piece for piece in self.session.pieces if piece.traced is not None]
            for piece in pieces:
                self.book.read(piece)
            self.traced[kind] = [(p, p.traced.context) for p in pieces if p.traced is not None]
            self._share_costs(self.traced[kind])
            return self._known(kind, pieces) or self._predicted(pieces)
        if race.num_heats <= 3 and all(way.inner is None for way in race.speeds if way):
            best = race.winner() or sequential
            searches = self.tries_compiled and race.num_heats <= 2
            if searches and (found := self._searched(kind, best)):
                return found
            others = ["onednn"] * has_mkldnn + ["inductor"] * self.tries_compiled
            ways: list[Way] = [replace(best, inner=inner) for inner in others]
            return [*ways, COMPILED] if self.tries_compiled else ways
        return ()

    def _share_costs(self, calls: Calls) -> None:
        """Let strategies ask for what was seen, once, if all ranks have seen the same ops."""
        told = [(piece.graph.digest, piece.plans.costs.about) for piece, _ in calls]
        if not same_on_all(told, self.trials.agreed):
            return
        for piece, context in calls:
            if piece.plans.costs.about == FORMULAS:
                costs = self.book.agreed_costs(piece, context, self.trials.agreed)
                if costs is not None:
                    piece.take_costs(replace(costs, about="measured by auto"))

    def _known(self, kind: Hashable, pieces: Sequence[Piece]) -> Choice | None:
        """What a race in an earlier process has shown, if all ranks know the same."""
        if not self.session.options.remember:
            return None
        rate, size = self.trials.agreed([self.book.link_rate(pieces), self._num_ranks()])
        facts = f"{self.session.options.inner}, {size:.0f} ranks, 2**{rate:.0f} bytes/s"
        tuned = self._tuned[kind] = Tuned((piece.graph for piece in pieces), facts)
        choice = tuned.look_up(kind, compiles=self.tries_compiled)
        told = "" if choice is None else str(choice.way)
        return choice if same_on_all(told, self.trials.agreed) else None

    def _keep(self, kind: Hashable, choice: Choice) -> None:
        """Write down what a race has shown."""
        if self.trials.last is not None and {choice.way, choice.rival} <= {None, COMPILED}:
            choice.is_guarded = False  # ranks could not see that they count alike
        if kind in self._tuned:
            self._tuned[kind].keep(kind, choice)

    def _num_ranks(self) -> int:
        return get_world_size() if is_initialized() else 1

    def _predicted(self, pieces: Sequence[Piece]) -> list[Way]:
        """The strategies that can gain here, best first, by simulation of the last call."""
        ways = list(dict.fromkeys(way for piece in pieces for way in candidates(piece.graph)))
        whole = [self.book.predict(piece, sequential) for piece in pieces]
        own_s = [
            sum(
                min(self.book.predict(piece, way), s)
                for piece, s in zip(pieces, whole, strict=True)
            )
            for way in ways
        ]
        whole_s, *all_s = self.trials.agreed([sum(whole), *own_s])
        ranked = sorted(zip(all_s, range(len(ways)), strict=True))
        good = [number for seconds, number in ranked if whole_s > MIN_GAIN * seconds]
        return [ways[number] for number in good[:NUM_PROPOSED]]

    def _searched(self, kind: Hashable, best: Strategy) -> list[Way]:
        """What a search makes of the plans of the best strategy, if that is expected to gain."""
        text, before_s, after_s = "", 0.0, 0.0
        calls = self.traced.get(kind, ())
        if not same_on_all([piece.graph.digest for piece, _ in calls], self.trials.agreed):
            return []  # stages of a pipeline, say: they would not agree on as many costs
        for piece, context in calls:
            self.book.read(piece)
            costs = self.book.agreed_costs(piece, context, self.trials.agreed)
            if costs is None or piece.splitters or piece.graph.level == "boundary":
                return []  # the ranks have seen different ops, or its plans have one lane
            plan, seconds, least_s = self.book.search(piece, best, context, costs)
            text, before_s, after_s = text + str(plan), before_s + seconds, after_s + least_s
        gains = text if before_s > MIN_SEARCHED * after_s else ""
        return [replay(plan=text)] if same_on_all(gains, self.trials.agreed) and gains else []


def _has_gradients(outputs: Any) -> bool:
    return any(getattr(leaf, "requires_grad", False) for leaf in leaves_of(outputs))


def _exact(args: Sequence[Any]) -> Hashable:
    """What calls of plain tensors have in common that need no second look; None for others."""
    if not all(isinstance(each, torch.Tensor) and not each.is_nested for each in args):
        return None
    return (torch.is_grad_enabled(), *[(each.shape, each.dtype, each.device) for each in args])


def kind_of(args: Sequence[Any], kwargs: dict[str, Any], by_type: bool = False) -> Hashable:
    """What calls must have in common to be served alike: types, and sizes by powers of two.

    by_type: names and numbers count by their types alone.
    """
    facts = TOLD.get()
    kind: list[Hashable] = [torch.is_grad_enabled(), facts.phase if facts is not None else None]
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            sizes = map(_bucket, () if value.is_nested else value.shape)
            kind.append((name, value.device.type, value.dtype, *sizes))
        elif isinstance(value, list | tuple | dict):
            kind.append((name, kind_of(tree_leaves(value), {}, by_type)))
        else:
            kind.append((name, type(value).__name__ if by_type else _scalar(value)))
    return tuple(kind)


def _bucket(size: int) -> int:
    return size if size < 4 else -size.bit_length()


def _scalar(value: Any) -> Hashable:
    if value is None or type(value) is bool or (type(value) is str and len(value) <= MAX_NAME):
        return cast(Hashable, value)
    if type(value) is not int:
        return type(value).__name__
    return _bucket(value) if value >= 0 else ("-", _bucket(-value))
