"""A row of the overlap bench: the timings of one model over one link come in, its figures go out.

    ideal_s  = max(compute_s, comm_s)                        no order of the work can beat it
    health   = sequential_s / (compute_s + comm_s)           above 1.10 the baseline is not valid
    speedup  = sequential / weft, vs_peer = best peer / weft     medians of pairwise ratios

`eager_vs_peer` is the best peer against weft with the kernels that the sequential model uses: what
is left of vs_peer without another matrix library inside ops. `onednn_vs_peer` is the expert's loop
with oneDNN against weft with oneDNN: the lead at equal kernels.
A pair is two programs in one round of one race. The best peer is the one with the lowest median.
`aa` is sequential against itself; `control` is sequential against a plan in parts that overlaps
nothing, and has to show no gain.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchweft_tools.bench.measure.pairs import ratio_columns

MAX_HEALTH = 1.10
MAX_DIFF = 1e-5
NUM_FINALISTS = 2
NEAR = 1.08  # candidates slower than the best by more than this leave after the first race
HEADLINE = ("dense", "prefill")
FIXED = ("sequential", "sequential_again", "compute", "comm", "control")
Times = Mapping[str, Sequence[float]]
Row = dict[str, Any]


def finalists(times: Times, kinds: Mapping[str, str]) -> list[str]:
    """Who runs in the second race: the fastest peers and the fastest of weft, and what is fixed."""
    chosen = [name for name in FIXED if name in times]
    for kind in ("peer", "weft"):
        best, *rest = _fastest(times, (name for name in times if kinds[name] == kind))
        near = NEAR * statistics.median(times[best])
        close = [name for name in rest if statistics.median(times[name]) <= near]
        chosen += [best, *close][:NUM_FINALISTS]
    chosen += _fastest(times, filter(is_eager, times))[:1]
    chosen += _fastest(times, (name for name in times if kinds[name] == "kernels"))[:1]
    chosen += _fastest(times, (name for name in times if "weft_onednn" in name))[:1]
    return list(dict.fromkeys(chosen))


def is_eager(name: str) -> bool:
    """Whether a candidate is weft with the kernels that the sequential model uses."""
    return name.startswith("weft_") and name.removeprefix("weft_").isdigit()


def row(case: Mapping[str, str], result: Mapping[str, Any]) -> Row:
    """The row of a case: `model`, `phase` and `link`, and the result of its ranks."""
    times, kinds = result["times"], result["kinds"]
    median = {name: statistics.median(values) for name, values in times.items()}
    peer = _best(times, kinds, "peer")
    weft = _best(times, kinds, "weft")
    sequential_s, compute_s, comm_s = (median[name] for name in ("sequential", "compute", "comm"))
    ideal_s, health = max(compute_s, comm_s), sequential_s / (compute_s + comm_s)
    return {
        **case,
        "sequential_s": sequential_s,
        "compute_s": compute_s,
        "comm_s": comm_s,
        "ideal_s": ideal_s,
        "best_peer": peer,
        "best_peer_s": median[peer],
        "weft": weft,
        "weft_s": median[weft],
        "weft_parts": result["parts"][weft],
        **_ratio("speedup", times, "sequential", weft),
        **_ratio("vs_peer", times, peer, weft),
        **_ratio("eager_vs_peer", times, peer, _fastest(times, filter(is_eager, times))[0]),
        **_equal_kernels(times, kinds),
        "share_of_ideal": ideal_s / median[weft],
        "peer_share_of_ideal": ideal_s / median[peer],
        "copied_bytes": result["copied_bytes"].get(weft),
        "max_abs_diff": result["diffs"][weft],
        "output_scale": result["scale"],
        "health": health,
        **_ratio("aa", times, "sequential", "sequential_again"),
        **(_ratio("control", times, "sequential", "control") if "control" in times else {}),
        "num_pairs": len(times["sequential"]),
        "num_calls": result["num_calls"],
        "late_compiles": result["late_compiles"],
        "first_race_s": {name: statistics.median(seen) for name, seen in result["first"].items()},
        "second_race_s": median,
        "diffs": result["diffs"],
        "absent": result["absent"],
        "fallbacks": result["fallbacks"],
        "explanation": explanation(health, times),
    }


def _equal_kernels(times: Times, kinds: Mapping[str, str]) -> Row:
    """The expert's loop against weft where both multiply by oneDNN."""
    by_hand = _fastest(times, (name for name in times if kinds[name] == "kernels"))
    weft = _fastest(times, (name for name in times if "weft_onednn" in name))
    if by_hand and weft:
        return _ratio("onednn_vs_peer", times, by_hand[0], weft[0])
    return dict.fromkeys(("onednn_vs_peer", "onednn_vs_peer_low", "onednn_vs_peer_high"))


def explanation(health: float, times: Times) -> str:
    """Why a row is left out of the headline; empty for a healthy one."""
    if health <= MAX_HEALTH:
        return ""
    best = min(times["sequential"]) / (min(times["compute"]) + min(times["comm"]))
    cause = (
        "the fastest runs are healthy, so other load on the machine slowed the median"
        if best <= MAX_HEALTH
        else "the fastest runs too: ranks wait for each other at every collective"
    )
    return (
        f"sequential takes {health:.2f} times compute + comm ({best:.2f} in the fastest runs): "
        f"{cause}; a gain over such a baseline means nothing"
    )


def summary(rows: Sequence[Row]) -> Row:
    """The figures over all rows; rows with a bad baseline are counted and left out."""
    healthy = [each for each in rows if each["health"] <= MAX_HEALTH]
    headline = [each for each in healthy if (each["model"], each["phase"]) == HEADLINE]
    spreads = [abs(each[name] - 1) for each in rows for name in ("aa_low", "aa_high")]
    left_out = [each for each in rows if each["health"] > MAX_HEALTH]
    return {
        "rows": len(rows),
        "headline_rows": len(headline),
        "geomean_vs_peer": _geomean(each["vs_peer"] for each in headline),
        "geomean_eager_vs_peer": _geomean(each["eager_vs_peer"] for each in headline),
        "geomean_onednn_vs_peer": _geomean(
            each["onednn_vs_peer"] for each in headline if each["onednn_vs_peer"]
        ),
        "worst_vs_peer": min((each["vs_peer"] for each in healthy), default=None),
        "best_speedup": max((each["speedup"] for each in healthy), default=None),
        "best_share_of_ideal": max((each["share_of_ideal"] for each in healthy), default=None),
        "aa_spread": max(spreads, default=None),
        "left_out": [f"{each['model']} {each['phase']} {each['link']}" for each in left_out],
    }


def _ratio(name: str, times: Times, slow: str, fast: str) -> Row:
    return ratio_columns(name, times[slow], times[fast])


def _best(times: Times, kinds: Mapping[str, str], kind: str) -> str:
    return _fastest(times, (name for name in times if kinds[name] == kind))[0]


def _fastest(times: Times, names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: statistics.median(times[name]))


def _geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else None
