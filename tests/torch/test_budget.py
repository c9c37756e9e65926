"""The budget of trials: what they may cost, in calls that all ranks count alike."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from torchweft.serve import budget as module
from torchweft.serve.budget import CAPTURE_S, MIN_COMMON, TRIAL_S, Budget, form_of

SMALL, LARGE = (False, None, (0, "cpu", 1, -4)), (False, None, (0, "cpu", -5, -4))


@pytest.fixture(autouse=True)
def share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARE", 0.05)


def play(found: Budget, num_calls: int, seconds: float, first: int = 1) -> list[int]:
    """Calls that take so long as they are, and no trial; those that could have been one."""
    allowed = []
    for number in range(first, first + num_calls):
        if number & (number - 1) == 0 and number > 1:
            found.agree(number - 1, list)
        if found.allows(LARGE, number):
            allowed.append(number)
        found.note_usual(LARGE, seconds)
    return allowed


def test_a_capture_is_a_small_share_of_the_seconds_before_it() -> None:
    allowed = play(Budget(), 1000, 0.1)
    assert allowed[0] == pytest.approx(CAPTURE_S / 0.05 / 0.1, abs=1)
    assert allowed == list(range(allowed[0], 1001))
    assert not play(Budget(), 1000, 0.01), "a stream of ten seconds"


@pytest.mark.parametrize(("busy_s", "at_once"), [(0.05, True), (0.1, False), (0.0, False)])
def test_calls_that_wait_and_compute_are_captured_at_once(busy_s: float, at_once: bool) -> None:
    found = Budget()
    found.note_usual(LARGE, 0.1, busy_s)
    found.agree(1, list)
    assert found.room == pytest.approx(0.5 if at_once else 0.0)
    assert (found.starts[True] <= 2) == at_once
    found.note_trial(LARGE, 60.0)  # the advance is spent
    found.agree(2, list)
    assert found.starts[False] > 1000


def test_what_a_trial_has_cost_is_awaited_before_the_next() -> None:
    found = Budget()
    first = play(found, 500, 0.1)[0]
    found.note_trial(LARGE, 3.1)  # three seconds more than usual
    found.agree(501, list)
    later = play(found, 500, 0.1, first=502)
    assert found.costs == {True: pytest.approx(3.0), False: TRIAL_S}
    assert first < 501 and later[0] == pytest.approx((3.0 + TRIAL_S) / 0.05 / 0.1, abs=2)


def test_whatever_trials_cost_the_model_is_hardly_behind() -> None:
    for seed in range(20):
        rng, found = Random(seed), Budget()
        stock_s = actual_s = dearest_s = 0.0
        num_trials = 0
        for number in range(1, 3000):
            if number & (number - 1) == 0 and number > 1:
                found.agree(number - 1, list)
            usual_s = rng.choice((0.02, 0.1, 0.3))
            kind = (*SMALL, usual_s)
            stock_s += usual_s
            if number > 1 and found.allows(kind, number) and kind in found.usual_s:
                over_s = rng.choice((0.0, 0.1, 2.0)) * rng.random()
                found.note_trial(kind, usual_s + over_s)
                found.agree(number, list)
                actual_s, dearest_s = actual_s + usual_s + over_s, max(dearest_s, over_s)
                num_trials += 1
            else:
                found.note_usual(kind, usual_s)
                actual_s += usual_s
            assert actual_s - stock_s <= 0.06 * stock_s + dearest_s
        assert num_trials > 3


def test_half_of_what_a_choice_gains_may_be_spent() -> None:
    slow, fast = Budget(), Budget()
    for found, speed in ((slow, 1.0), (fast, 2.0)):
        for _ in range(100):
            found.note(0.1, speed)
        found.agree(100, list)
    assert fast.behind_s == pytest.approx(-5.0)
    assert slow.starts[True] > 100 == fast.starts[True]


def test_a_form_that_is_rare_is_not_captured() -> None:
    found = Budget()
    found.starts = dict.fromkeys(found.starts, 0.0)
    assert not found.allows(SMALL, 2 * MIN_COMMON)
    assert found.allows(SMALL, 2 * MIN_COMMON)
    found.note_trial(SMALL, 1.0)
    assert found.allows(SMALL, 1000), "it has been captured"


def test_ranks_that_measure_differently_allow_the_same_calls() -> None:
    ranks = [Budget(), Budget()]
    for own, seconds in zip(ranks, (0.1, 0.2), strict=True):
        for _ in range(10):
            own.note_usual(LARGE, seconds)
        own.note_trial(LARGE, 3 * seconds)
    told: list[Sequence[float]] = []

    def hear(mine: Sequence[float]) -> list[float]:
        told.append(mine)
        return list(mine)

    for own in ranks:
        own.agree(11, hear)
    largest = [max(pair) for pair in zip(*told, strict=True)]
    for own in ranks:
        own.agree(11, lambda mine: largest)
    assert ranks[0].starts == ranks[1].starts


def test_kinds_of_one_form_differ_in_sizes_alone() -> None:
    assert form_of(LARGE) == form_of((False, None, (0, "cpu", 3, -7)))
    assert form_of(LARGE) != form_of(SMALL) != form_of((True, *SMALL[1:]))
