"""The arithmetic of the overlap bench: rows and summary of given times, and wrong options."""

from __future__ import annotations

import pytest

from torchweft.errors import WeftError
from torchweft_tools.bench import overlap
from torchweft_tools.bench.players.overlap_candidates import TABLES
from torchweft_tools.bench.players.overlap_rows import finalists, row, summary

KINDS = {each.name: each.kind for each in TABLES["race"]}
PARTS = {each.name: each.parts for each in TABLES["race"]}
CASE = {"model": "dense", "phase": "prefill", "link": "1gbit half duplex"}


def result(**times: list[float]) -> dict:
    """What ranks tell; every program takes the given seconds, round by round."""
    usual = {
        "sequential": [1.0, 1.0, 1.0],
        "sequential_again": [1.0, 1.0, 1.0],
        "compute": [0.5, 0.5, 0.5],
        "comm": [0.5, 0.5, 0.5],
        "control": [1.0, 1.25, 1.0],
        "by_hand_2": [0.75, 0.75, 0.75],
        "by_hand_4": [0.625, 0.625, 0.625],
        "weft_2": [0.8, 0.8, 0.8],
        "weft_4": [0.5, 0.625, 0.625],
    }
    usual |= times
    return {
        "times": usual,
        "first": usual,
        "kinds": KINDS,
        "parts": PARTS,
        "diffs": dict.fromkeys(usual, 0.0),
        "absent": {"domino": "deepspeed is not installed"},
        "fallbacks": {},
        "scale": 10.0,
        "copied_bytes": {"weft_4": 4096},
        "num_calls": 1,
        "late_compiles": 0,
    }


def test_a_row_compares_the_best_of_each_side():
    found = row(CASE, result())
    assert (found["best_peer"], found["best_peer_s"]) == ("by_hand_4", 0.625)
    assert (found["weft"], found["weft_s"], found["weft_parts"]) == ("weft_4", 0.625, 4)
    assert found["ideal_s"] == 0.5
    assert found["share_of_ideal"] == 0.8
    assert found["health"] == 1.0
    assert found["explanation"] == ""
    assert found["copied_bytes"] == 4096
    assert found["absent"] == {"domino": "deepspeed is not installed"}
    assert found["num_pairs"] == 3


def test_ratios_are_medians_of_pairs():
    times = {"sequential": [1.0, 2.0, 4.0], "weft_4": [0.5, 0.5, 0.5], "weft_2": [9.0] * 3}
    found = row(CASE, result(**times))
    assert (found["speedup"], found["speedup_low"], found["speedup_high"]) == (4.0, 2.0, 8.0)
    assert (found["aa"], found["aa_low"], found["aa_high"]) == (2.0, 1.0, 4.0)
    assert found["vs_peer"] == 1.25


def test_the_control_stands_beside_the_gain():
    found = row(CASE, result())
    assert (found["control"], found["control_low"]) == (1.0, 0.8)


@pytest.mark.parametrize(
    ("slow", "word"), [([1.0, 1.2, 1.2], "other load"), ([1.2, 1.2, 1.2], "wait for each other")]
)
def test_an_ill_baseline_is_explained_and_left_out(slow, word):
    ill = row(CASE | {"link": "2gbit half duplex"}, result(sequential=slow))
    well = row(CASE, result())
    assert ill["health"] == pytest.approx(1.2)
    assert word in ill["explanation"]
    told = summary([well, ill])
    assert told["left_out"] == ["dense prefill 2gbit half duplex"]
    assert told["headline_rows"] == 1
    assert told["best_speedup"] == well["speedup"]


def test_the_headline_is_the_geometric_mean_of_dense_prefill():
    rows = [
        {**row(CASE, result()), "vs_peer": 2.0},
        {**row(CASE, result()), "vs_peer": 0.5},
        {**row(CASE | {"phase": "decode"}, result()), "vs_peer": 0.25},
        {**row(CASE | {"model": "experts"}, result()), "vs_peer": 4.0},
    ]
    told = summary(rows)
    assert told["geomean_vs_peer"] == pytest.approx(1.0)
    assert told["worst_vs_peer"] == 0.25
    assert told["best_share_of_ideal"] == 0.8
    assert told["aa_spread"] == 0.0


def test_a_summary_of_nothing_claims_nothing():
    told = summary([])
    assert told["rows"] == 0
    assert told["geomean_vs_peer"] is None
    assert told["worst_vs_peer"] is None


def test_the_fastest_of_each_side_those_near_and_the_fixed_ones_race_on():
    first = result(by_hand_1=[2.0], inductor=[0.1], weft_8=[0.65])["first"]
    found = finalists(first, KINDS)
    assert found[:5] == ["sequential", "sequential_again", "compute", "comm", "control"]
    assert found[5:] == ["inductor", "weft_4", "weft_8"], "a peer far behind is out"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": "dens"}, "dense"),
        ({"phases": "prefil"}, "prefill"),
        ({"links": "fast"}, "fast"),
        ({"links": ","}, "at least one link"),
        ({"num_pairs": 5}, "--pairs must be 30 or more"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(WeftError, match=message):
        overlap.run(**options)
