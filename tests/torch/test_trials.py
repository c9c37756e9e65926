"""Trials: the first calls of a kind try all strategies, then the fastest stays."""

from __future__ import annotations

import pytest
import torch

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import StrategyError
from torchweft.plan.context import TOLD
from torchweft.serve import trials
from torchweft.serve.trials import GAIN, Phases, Trials, wanted_by


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
    return Trials(session_of(weft.compile(torch.relu)), strategies, **options)


def take(found, clock, kind, costs):
    """One call: it takes what its strategy costs; the strategy it got."""
    with found.turn(kind) as strategy:
        clock.now_s += costs[strategy.name if strategy else "stock"]
    return strategy.name if strategy else "stock"


def test_strategies_take_turns_and_the_fastest_stays(clock):
    found = make([None, "sequential", "overlap"], num_rounds=2)
    costs = {"stock": 3.0, "sequential": 2.0, "overlap": 1.0}
    order = [take(found, clock, "prefill", costs) for _ in range(6)]
    assert order == ["stock", "sequential", "overlap"] * 2
    costs["overlap"] = 9.0  # too late
    assert {take(found, clock, "prefill", costs) for _ in range(3)} == {"overlap"}
    assert take(found, clock, "decode", costs) == "stock"
    found.forget()
    assert take(found, clock, "prefill", costs) == "stock"


def test_a_call_that_compiles_decides_nothing(clock):
    found = make([None, "overlap"], num_rounds=3)
    for number in range(6):
        overlap_s = 60.0 if number < 2 else 1.0
        take(found, clock, "prefill", {"stock": 2.0, "overlap": overlap_s})
    assert found.chosen["prefill"].name == "overlap"


def test_the_first_stays_unless_another_is_clearly_faster(clock):
    found = make([None, "overlap"], num_rounds=2)
    for _ in range(4):
        take(found, clock, "near", {"stock": 1.0, "overlap": 1.001 / GAIN})
        take(found, clock, "far", {"stock": 1.0, "overlap": 0.999 / GAIN})
    assert found.chosen["near"] is None and found.chosen["far"].name == "overlap"


def test_a_strategy_that_falls_back_is_not_chosen(clock):
    found = make([None, "overlap"], num_rounds=2)
    for _ in range(2):
        take(found, clock, "decode", {"stock": 2.0})
        with found.turn("decode"):
            found.session.fallbacks["split: 1 rows cannot make 2 parts"] += 1
            clock.now_s += 1.0
    assert found.chosen["decode"] is None


def test_a_call_that_fails_is_not_counted(clock):
    found = make([None, "overlap"], num_rounds=1)
    with pytest.raises(ValueError, match="no"), found.turn("prefill"):
        raise ValueError("no")
    assert found.times["prefill"] == [[], []]


class Queue:
    """An accelerator whose work ends long after its launch; its events know when."""

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
    for _ in range(4):
        assert queue.num_waits == 0
        with found.turn("decode", torch.device("cuda", 0)) as strategy:
            queue.busy_s += 2.0 if strategy is None else 1.0
            clock.now_s += 0.1 if strategy is None else 0.5  # more launches, less work
    assert found.chosen["decode"].name == "overlap" and queue.num_waits == 4
    with found.turn("decode", torch.device("cuda", 0)):
        pass
    assert queue.num_waits == 4


def test_a_call_that_a_host_captures_is_the_firsts_and_decides_nothing(monkeypatch):
    queue, found = Queue(), make([None, "overlap"], num_rounds=1)
    monkeypatch.setattr(trials, "accelerator_of", lambda device: queue)
    queue.captures = True
    for _ in range(4):
        with found.turn("decode", torch.device("cuda", 0)) as strategy:
            assert strategy is None
    assert found.chosen == found.times == {}
    assert found.session.fallbacks == {"trials: the host captures this call": 4}


def test_steps_of_each_phase_have_strategies_of_their_own():
    session = session_of(weft.compile(torch.relu))
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
    session = session_of(weft.compile(torch.relu))
    phases = Phases(session, {"prefill": (None, two, four), "decode": (None, two)})
    ran = []

    def by_plans():
        ran.append(TOLD.get().strategy)

    for _ in range(2):
        assert phases.call((), lambda: "stock", by_plans, (), {}) == "stock"
    assert ran == [two, four]
    assert session.fallbacks["warm-up: no request is in this call"] == 2
