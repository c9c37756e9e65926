"""The strategies bench: the arithmetic of its rows, its options, and a tiny run on two ranks."""

from __future__ import annotations

import pytest

from torchweft.errors import WeftError
from torchweft_tools.bench import strategies as bench
from torchweft_tools.bench.strategies.workloads import WORKLOADS

USUAL = {
    "eager": 2.0, "sequential": 1.0, "sequential_again": 1.0, "overlap_2": 0.9, "overlap_4": 0.8,
    "weft": 0.5, "by_hand_2": 0.7, "by_hand_4": 0.6,
}  # fmt: skip


def result(peers=("by_hand_2", "by_hand_4"), **seconds):
    times = {name: [value] * 30 for name, value in {**USUAL, **seconds}.items()}
    said = {"workload": "dense 4x64", "home": True, "link": "1gbit", "max_abs_diff": 0.0}
    return {**said, "times": times, "peers": peers, "why": "", "fallbacks": {}}


def test_a_row_takes_the_best_of_each_side():
    row = bench.row("nanoflow", result())
    assert (row["sequential"], row["overlap"], row["peer"]) == (
        "sequential", "overlap_4", "by_hand_4",
    )  # fmt: skip
    assert (row["speedup"], row["vs_overlap"], row["vs_peer"]) == (2.0, 1.6, 1.2)
    assert row["ahead"] and row["sound"]


@pytest.mark.parametrize("seconds", [{"overlap_2": 0.5}, {"eager": 0.4}, {"weft": 0.8}])
def test_ahead_is_of_both_or_not_at_all(seconds):
    row = bench.row("nanoflow", result(**seconds))
    assert not row["ahead"]
    assert bench.summary([row])["behind_at_home"] == ["nanoflow"]


def test_a_row_without_a_peer_has_no_figure_for_it():
    row = bench.row("tokenweave", result(peers=()))
    assert (row["peer"], row["peer_s"], row["vs_peer"]) == (None, None, None)


def test_an_unsound_row_wins_nothing():
    row = bench.row("nanoflow", result(sequential_again=1.5))
    assert row["ahead"] and not row["sound"]
    assert bench.summary([row])["ahead_at_home"] == []


@pytest.mark.parametrize("name", WORKLOADS)
def test_each_strategy_has_a_home_and_a_place_where_it_should_not_help(name):
    assert {each.home for each in WORKLOADS[name]} == {True, False}
    assert {each.strategy.name for each in WORKLOADS[name]} == {name}


def test_wrong_options_are_refused():
    with pytest.raises(WeftError, match="nanoflw"):
        bench.run(strategies="nanoflw", quick=True)
    with pytest.raises(WeftError, match="--pairs must be 30 or more"):
        bench.run(num_pairs=3)


def test_two_ranks_race_and_are_equal_to_eager():
    rows, summary = bench.run(strategies="single_batch", links="none", quick=True)
    assert summary["failed"] == {}
    assert [row["workload"] for row in rows] == ["shared 1x64", "dense 4x64"]
    assert all(row["max_abs_diff"] < 1e-4 for row in rows)
    assert not any("weft" in row["fallbacks"] for row in rows)
    assert rows[0]["peer"] == "by_hand"
