"""Trials: the first calls of a kind try all strategies, then the fastest stays."""

from __future__ import annotations

import pytest
import torch

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import StrategyError
from torchweft.plan.context import TOLD
from torchweft.serve import trials
from torchweft.serve.trials import (
    GAIN,
    GUARD_EVERY,
    GUARD_PAIRS,
    MAX_ROUNDS,
    NUM_ROUNDS,
    Choice,
    Phases,
    Race,
    Trials,
    wanted_by,
)


class Clock:
    """A clock that goes on only when it is told."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(trials, "time", found)
    return found


def make(strategies, **options):
    return Trials(session_of(weft.compile(torch.relu, "sequential")), strategies, **options)


def take(found, clock, kind, costs):
    """One call: it takes what its strategy costs; the strategy it got."""
    with found.turn(kind) as strategy:
        clock.now_s += costs[strategy.name if strategy else "stock"]
    return strategy.name if strategy else "stock"


def settle(found, clock, kind, costs):
    """Calls until the choice is made; the ways that they took."""
    order = []
    while kind not in found.choices:
        order.append(take(found, clock, kind, costs))
        assert len(order) < 200
    return order


def test_ways_warm_up_and_take_turns_and_the_fastest_stays(clock):
    found = make([None, "sequential", "overlap"], num_rounds=2)
    costs = {"stock": 3.0, "sequential": 2.9, "overlap": 2.8}
    warm = ["stock", "sequential", "sequential", "overlap", "overlap"]
    assert settle(found, clock, "prefill", costs) == warm + ["stock", "sequential", "overlap"] * 2
    costs["overlap"] = 9.0  # too late
    assert {take(found, clock, "prefill", costs) for _ in range(3)} == {"overlap"}
    assert take(found, clock, "decode", costs) == "stock"
    found.forget()
    assert take(found, clock, "prefill", costs) == "stock"


def test_a_way_that_is_far_behind_leaves(clock):
    found = make([None, "sequential", "overlap"])
    costs = {"stock": 1.0, "sequential": 2.0, "overlap": 0.95}
    order = settle(found, clock, "prefill", costs)
    assert order.count("sequential") == 2 + 2 and order.count("overlap") == 2 + NUM_ROUNDS
    assert found.chosen["prefill"].name == "overlap"
    assert "overlap" in found.lines()[0] and "1.05" in found.lines()[0]


def test_a_clear_case_ends_early(clock):
    found = make([None, "overlap"])
    assert len(settle(found, clock, "prefill", {"stock": 2.0, "overlap": 1.0})) == 3 + 2 * 4
    assert len(settle(found, clock, "decode", {"stock": 1.0, "overlap": 2.0})) == 3 + 2 * 2


def test_a_call_that_compiles_decides_nothing(clock):
    found = make([None, "overlap"], num_rounds=3)
    for number in range(12):
        overlap_s = 60.0 if number < 3 else 1.0
        take(found, clock, "prefill", {"stock": 2.0, "overlap": overlap_s})
    assert found.chosen["prefill"].name == "overlap"


def test_the_first_stays_unless_another_is_clearly_faster(clock):
    found = make([None, "overlap"], num_rounds=2)
    settle(found, clock, "near", {"stock": 1.0, "overlap": 1.001 / GAIN})
    settle(found, clock, "far", {"stock": 1.0, "overlap": 0.999 / GAIN})
    assert found.chosen["near"] is None and found.chosen["far"].name == "overlap"


def test_one_lucky_round_decides_nothing(clock):
    found = make([None, "overlap"])
    overlap_s = iter([1.0, 1.0, 0.5, 0.5, *[1.0] * 99])
    while "prefill" not in found.choices:
        with found.turn("prefill") as way:
            clock.now_s += 1.0 if way is None else next(overlap_s)
    assert found.chosen["prefill"] is None


def test_a_strategy_that_falls_back_is_not_chosen(clock):
    found = make([None, "overlap"], num_rounds=2)
    while "decode" not in found.choices:
        with found.turn("decode") as way:
            clock.now_s += 1.0 if way else 2.0
            if way is not None:
                found.session.fallbacks["split: 1 rows cannot make 2 parts"] += 1
    assert found.chosen["decode"] is None


def test_a_call_that_fails_is_not_counted(clock):
    found = make([None, "overlap"], num_rounds=1)
    with pytest.raises(ValueError, match="no"), found.turn("prefill"):
        raise ValueError("no")
    assert found.races["prefill"].num_calls == 0


def test_more_ways_are_asked_for_before_the_race_and_behind_each_heat(clock):
    asked = []

    def propose(kind, race):
        asked.append((race.num_heats, len(race.rounds)))
        return {1: [weft.overlap(parts=4)], 2: [weft.branches()]}.get(race.num_heats, ())

    found = make([None, "sequential"], propose=propose)
    costs = {"stock": 1.0, "sequential": 2.0, "overlap": 0.5, "branches": 0.4}
    order = settle(found, clock, "prefill", costs)
    assert asked == [(1, 0), (2, 4), (3, 4)]
    assert order.count("branches") == 2 + 4 and found.chosen["prefill"].name == "branches"
    speeds = {
        str(way).partition("(")[0]: speed for way, speed in found.choices["prefill"].speeds.items()
    }
    assert speeds == pytest.approx({"None": 1, "sequential": 0.5, "overlap": 2, "branches": 2.5})


def test_the_choice_may_be_known_before_the_race(clock):
    known = Choice(weft.overlap(parts=4))
    found = make([None, "sequential"], propose=lambda kind, race: known)
    assert len(settle(found, clock, "prefill", {"stock": 1.0, "sequential": 1.0})) == 3
    assert found.choices["prefill"] is known


def test_a_choice_that_falls_behind_is_given_up_and_told(clock, caplog):
    found = make([None, "overlap"])
    costs = {"stock": 2.0, "overlap": 1.0}
    settle(found, clock, "prefill", costs)
    costs["overlap"] = 3.0
    used = [take(found, clock, "prefill", costs) for _ in range(GUARD_EVERY * GUARD_PAIRS)]
    assert used.count("stock") == GUARD_PAIRS, "the rival is tried now and then"
    assert found.chosen["prefill"] is None
    assert "given up" in found.lines()[0] and "given up" in caplog.text
    costs["overlap"] = 1.0
    for _ in range(GUARD_EVERY * GUARD_PAIRS):
        take(found, clock, "prefill", costs)
    assert found.chosen["prefill"].name == "overlap", "and may come back"


def test_a_choice_that_holds_stays(clock):
    found = make([None, "overlap"])
    costs = {"stock": 2.0, "overlap": 1.0}
    settle(found, clock, "prefill", costs)
    for _ in range(3 * GUARD_EVERY * GUARD_PAIRS):
        take(found, clock, "prefill", costs)
    assert found.chosen["prefill"].name == "overlap" and not found.choices["prefill"].note


class Queue:
    """An accelerator whose work ends long after its launch; its events know when."""

    no_graphs = one_stream = no_times = ""

    def synchronize(self):
        self.num_waits += 1

    def __init__(self):
        self.busy_s, self.num_waits, self.captures = 0.0, 0, False

    def is_capturing(self):
        return self.captures

    def now(self):
        return Moment(self, self.busy_s)


class Moment:
    def __init__(self, queue, at_s):
        self.queue, self.at_s = queue, at_s

    def synchronize(self):
        self.queue.num_waits += 1

    def elapsed_time(self, later):
        return 1e3 * (later.at_s - self.at_s)


def test_on_a_device_the_time_is_that_of_its_work_not_of_the_launch(clock, monkeypatch):
    queue, found = Queue(), make([None, "overlap"], num_rounds=2)
    monkeypatch.setattr(trials, "accelerator_of", lambda device: queue)
    while "decode" not in found.choices:
        with found.turn("decode", lambda: {torch.device("cuda", 0)}) as strategy:
            queue.busy_s += 2.0 if strategy is None else 1.0
            clock.now_s += 0.1 if strategy is None else 0.5  # more launches, less work
    assert found.chosen["decode"].name == "overlap"
    assert queue.num_waits == 2 * 2, "at the ends of rounds"
    with found.turn("decode", lambda: {torch.device("cuda", 0)}):
        pass
    assert queue.num_waits == 2 * 2


def test_on_a_device_whose_events_tell_no_times_the_host_waits_and_looks_at_its_clock(
    clock, monkeypatch
):
    queue, found = Queue(), make([None, "overlap"], num_rounds=2)
    queue.no_times = "trace: events tell no times"
    monkeypatch.setattr(trials, "accelerator_of", lambda device: queue)
    while "decode" not in found.choices:
        with found.turn("decode", lambda: {torch.device("cuda", 0)}) as strategy:
            found.session.fallbacks[queue.no_times] += 1  # what it cannot do is no reason to lose
            clock.now_s += 2.0 if strategy is None else 1.0
    assert found.chosen["decode"].name == "overlap" and queue.num_waits > 0


def test_a_call_that_a_host_captures_is_the_firsts_and_decides_nothing(monkeypatch):
    queue, found = Queue(), make([None, "overlap"], num_rounds=1)
    monkeypatch.setattr(trials, "accelerator_of", lambda device: queue)
    queue.captures = True
    for _ in range(4):
        with found.turn("decode", lambda: {torch.device("cuda", 0)}) as strategy:
            assert strategy is None
    assert found.chosen == {} and found.races["decode"].num_calls == 0
    assert found.session.fallbacks == {"trials: the host captures this call": 4}


def test_steps_of_each_phase_have_strategies_of_their_own():
    session = session_of(weft.compile(torch.relu, "sequential"))
    phases = Phases(session, {"prefill": ["overlap"], "decode": [None], "mixed": ["sequential"]})
    seen = []

    def note(way):
        told = TOLD.get()
        seen.append((way, told and told.phase, told and told.tokens_per_request))

    for tokens in ([5, 3], [1, 1, 1], [4, 1], []):
        phases.call(tokens, lambda: note("stock"), lambda: note("plans"), (), {})
    assert seen == [
        ("plans", "prefill", (5, 3)), ("stock", "decode", (1, 1, 1)), ("plans", "mixed", (4, 1)),
        ("plans", None, ()), ("plans", None, ()), ("stock", None, None),
    ]  # fmt: skip
    assert session.fallbacks == {"warm-up: no request is in this call": 1}
    for _ in range(5):
        phases.call([1, 1], lambda: None, lambda: None, (), {})
    assert phases.chosen == {"('decode', 2)": "None"}


def test_a_configuration_names_strategies():
    auto = (None, "overlap")
    assert wanted_by("auto", auto) == auto and wanted_by("stock", auto) == (None,)
    assert [str(each) for each in wanted_by({"overlap": {"parts": 4}, "sequential": {}}, auto)] == [
        "overlap(parts=4, min_tokens=0, at=None)",
        "sequential()",
    ]


@pytest.mark.parametrize("wrong", [{}, 3, None, ["overlap"], {"overlap": 4}, {"overlap": None}])
def test_what_names_no_strategy_is_an_error_that_tells_the_forms(wrong):
    with pytest.raises(StrategyError, match=r"names no strategy.*'auto', 'stock'"):
        wanted_by(wrong, ())


def test_the_first_warm_up_runs_by_every_strategy_too():
    """A host sizes its caches by the memory that it sees there."""
    two, four = weft.overlap(parts=2), weft.overlap(parts=4)
    session = session_of(weft.compile(torch.relu, "sequential"))
    phases = Phases(session, {"prefill": (None, two, four), "decode": (None, two)})
    ran = []

    def by_plans():
        ran.append(TOLD.get().strategy)

    for _ in range(2):
        assert phases.call((), lambda: "stock", by_plans, (), {}) == "stock"
    assert ran == [two, four]
    assert session.fallbacks["warm-up: no request is in this call"] == 2


def rounds_of(speeds, *, patient=True, call_s=0.001):
    """After how many rounds a race of two ways ends; and who wins."""
    way = weft.overlap(parts=2)
    race = Race([None, way])
    race.is_patient = patient
    for number in range(100):
        race.close_round({None: call_s, way: call_s / speeds[number % len(speeds)]})
        if race.is_over:
            return len(race.rounds), race.winner() == way
    raise AssertionError("the race does not end")


def test_a_patient_race_goes_on_while_noise_may_decide_it():
    """A way that is 4 % faster behind a noise of 6 % needs more rounds than eight."""
    noisy = (1.10, 0.98, 1.04, 1.06, 1.03, 1.00, 1.12, 0.99, 1.05, 1.07)
    num_rounds, wins = rounds_of(noisy)
    assert NUM_ROUNDS < num_rounds <= MAX_ROUNDS and wins
    assert rounds_of(noisy, patient=False)[0] <= NUM_ROUNDS
    assert rounds_of((1.05, 1.06)) == (NUM_ROUNDS, True)
    assert rounds_of((1.005, 0.995)) == (NUM_ROUNDS, False)
    assert rounds_of((0.98, 1.08))[0] == MAX_ROUNDS, "no end of noise"
    assert rounds_of((0.98, 1.08), call_s=1.0)[0] == NUM_ROUNDS, "no end of patience"
