"""The feed of streams: what jobs take, and how many inputs each worker gets of those left."""

from __future__ import annotations

import pytest

from torchweft.run.driver.placing import Line, _done, _end


def test_line_finds_what_is_fixed_and_what_an_op_takes() -> None:
    line = Line()
    for num_ops in (10, 40, 80, 20, 60):
        line.saw(num_ops, 0.004 + 0.0001 * num_ops)
    assert line.fit() == pytest.approx((0.004, 0.0001))


def test_jobs_of_one_size_say_nothing_of_what_is_fixed() -> None:
    line = Line()
    for _ in range(3):
        line.saw(50, 0.01)
    assert line.fit() == pytest.approx((0.0, 0.0002))


def test_line_follows_a_worker_that_becomes_slower() -> None:
    line = Line()
    for slowness in (1, 3):
        for number in range(100):
            num_ops = 10 + 10 * (number % 5)
            line.saw(num_ops, slowness * (0.002 + 0.0001 * num_ops))
    assert line.fit() == pytest.approx((0.006, 0.0003), rel=0.05)


@pytest.mark.parametrize("num_left", [1, 7, 30, 200])
def test_shares_add_up_and_all_workers_end_together(num_left: int) -> None:
    lines = {"fast": (0.002, 0.001), "slow": (0.004, 0.002)}
    busy_s = {"fast": 0.003, "slow": 0.001}
    ends_s = _end(lines, busy_s, num_left, 16)
    shares = {name: _done(lines[name], ends_s - busy_s[name], 16) for name in lines}
    assert sum(shares.values()) == pytest.approx(num_left, abs=0.1)
    if num_left >= 30:
        assert shares["fast"] > 1.5 * shares["slow"]


def test_worker_that_is_busy_for_longer_than_the_rest_takes_gets_nothing() -> None:
    lines = {"fast": (0.002, 0.001), "slow": (0.004, 0.002)}
    ends_s = _end(lines, {"fast": 0.0, "slow": 1.0}, 20, 16)
    assert _done(lines["slow"], ends_s - 1.0, 16) == 0
    assert _done(lines["fast"], ends_s, 16) == pytest.approx(20, abs=0.1)
