"""The resources bench: it runs, its outputs are right, and a row says why nothing is gained."""

from __future__ import annotations

import pytest

from torchweft.errors import WeftError
from torchweft_tools.bench import resources


def times(**seconds: float) -> dict[str, list[float]]:
    usual = {"two_threads": 1.0, "one_thread": 1.5, "two_lanes": 1.0, "memory": 0.7, "compute": 0.8}
    usual["two_threads_again"] = 1.0
    return {name: [value] * 30 for name, value in {**usual, **seconds}.items()}


CASE = {"model": "gather", "rows": 64}


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"two_lanes": 0.8}, ""),
        ({"memory": 0.1}, "the shorter branch is 12% of the longer one"),
        ({"one_thread": 1.9}, "two intra-op threads are 1.90 times as fast as one already"),
        ({}, "beside each other both branches are slower"),
    ],
)
def test_a_row_says_why_nothing_is_gained(seconds, says):
    why = resources.row(CASE, times(**seconds), 0.0)["why"]
    assert why.startswith(says) if says else not why


def test_the_baseline_is_the_better_of_one_and_two_threads() -> None:
    row = resources.row(CASE, times(one_thread=0.5), 0.0)
    assert row["baseline"] == "one_thread"
    assert row["speedup"] == 0.5


def test_models_run_on_two_lanes_and_are_equal_to_eager() -> None:
    rows, summary = resources.run(quick=True, rows="8")
    assert [row["model"] for row in rows] == ["gather", "recommender", "phases"]
    assert all(row["max_abs_diff"] < 1e-4 for row in rows)
    assert summary["rows"] == 3


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(WeftError, match="rows must be numbers from 2 on; got 'x'"):
        resources.run(rows="8,x", quick=True)
