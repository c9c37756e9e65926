"""The pure parts of the traffic bench: its stream, the regret, rows and summary of given times."""

from __future__ import annotations

from typing import Any

import pytest

from torchweft.errors import WeftError
from torchweft_tools.bench import traffic


def result(eager: list[float], auto: list[float], **more: Any) -> dict[str, Any]:
    calls = [("prefill", 4, 64), *[("decode", 9, 1)] * (len(eager) - 1)]
    times = {"eager": eager, "auto": auto, "eager_again": eager}
    chosen = ["overlap(parts=2)", *["as it is"] * (len(eager) - 1)]
    told = {"calls": calls, "times": times, "chosen": chosen, "warmup_s": 0.5, "fallbacks": []}
    return {**told, "max_abs_diff": 0.0, **more}


def test_the_stream_is_the_same_for_a_seed_and_has_all_sizes() -> None:
    calls = traffic.stream(1000, seed=0)
    assert calls == traffic.stream(1000, seed=0) != traffic.stream(1000, seed=1)
    assert len(calls) == 1000 and calls[:50] == traffic.stream(50, seed=0)
    prefill = [call for call in calls if call.phase == "prefill"]
    decode = [call for call in calls if call.phase == "decode"]
    assert 100 < len(prefill) < 400 and {call.positions for call in decode} == {1}
    assert {call.rows for call in prefill} == {1, 2, 3, 4}
    assert {1, 2, 64} <= {call.rows for call in decode} <= set(range(1, 65))
    assert all(16 <= call.positions <= traffic.MAX_POSITIONS for call in prefill)


def test_the_regret_is_the_deepest_point_and_ends_when_it_is_made_up_for() -> None:
    stock = [1.0] * 6
    assert traffic.regret(stock, [1.0, 3.0, 0.5, 0.5, 0.5, 0.5]) == (2.0, 6)
    assert traffic.regret(stock, [1.0, 3.0, 0.5, 0.5, 0.5, 1.0]) == (2.0, None)
    assert traffic.regret(stock, stock) == (0.0, 0)


def test_figures_are_ratios_to_eager() -> None:
    found = traffic.figures(result([2.0, *[1.0] * 199], [1.0, *[0.5] * 199]))
    assert found["calls"] == 200 and found["total_vs_stock"] == 2.0
    assert found["p50_vs_stock"] == found["p99_vs_stock"] == 0.5
    assert found["aa_total"] == found["aa_p99"] == 1.0
    assert (found["regret_s"], found["regret_calls"], found["warmup_s"]) == (0.0, 0, 0.5)


def test_ten_slow_calls_of_a_thousand_do_not_move_the_99th() -> None:
    quick = [1.0] * 1000
    assert traffic.figures(result(quick, [9.0] * 10 + quick[10:]))["p99_vs_stock"] == 1.0
    assert traffic.figures(result(quick, [9.0] * 11 + quick[11:]))["p99_vs_stock"] == 9.0


def test_a_row_tells_what_was_chosen_for_a_kind_of_calls() -> None:
    decode, prefill = traffic.kind_rows(result([2.0, 1.0, 1.0], [1.0, 1.0, 3.0]))
    assert (decode["phase"], decode["rows"], decode["number"]) == ("decode", "8..15", 2)
    assert (decode["vs_stock"], decode["worst_call_s"]) == (0.5, 3.0)
    assert (prefill["rows"], prefill["chosen"]) == ("4..7", "overlap(parts=2)")
    assert traffic.slowest(result([2.0, 1.0], [1.0, 1.5]))[0] == (
        "call 1 decode 9 1: 1500 ms, eager 1000 ms"
    )


def test_the_summary_tells_the_worst_of_each_start() -> None:
    names = {"model": "dense", "link": "1gbit"}
    good = traffic.figures(result([1.0] * 100, [0.5] * 100))
    bad = traffic.figures(result([1.0] * 100, [2.0] * 100))
    runs = [{**names, "start": "cold", **good}, {**names, "start": "cold", **bad}]
    found = traffic.summary(runs)
    assert (found["cold_total_vs_stock"], found["cold_p99_vs_stock"]) == (0.5, 2.0)
    assert found["cold_regret_s"] == 100.0 and found["dense 1gbit cold"]["total_vs_stock"] == 0.5
    assert "warmed_total_vs_stock" not in found and traffic.summary([]) == {"runs": 0}


def test_wrong_options_are_named() -> None:
    with pytest.raises(WeftError, match="--calls must be 100 or more"):
        traffic.run(num_calls=3)
    with pytest.raises(WeftError, match="lukewarm"):
        traffic.run(starts="lukewarm")
