"""The simulator bench: what calls were predicted to take, against what they took.

    torchweft bench simulator --json

Two ranks of one thread each, over links of several rates. A profile is made of some shapes of each
model; every strategy is then simulated and timed, in turn, on these shapes and on others. Columns:
error, of the predicted time; held_out, whether the shape was not profiled; aa, sequential against
itself. rank_correlation: of all pairs of strategies in one context that differ by more than the
noise, the share in the right order, less the share in the wrong one.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

from torchweft import lab
from torchweft.errors import WeftError
from torchweft_tools.bench.measure.journal import Journal
from torchweft_tools.bench.measure.messages import Progress, listen, part_of
from torchweft_tools.bench.measure.options import chosen, like_links, require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio
from torchweft_tools.bench.overlap import ENVIRONMENT

LINKS = "500mbit,1gbit,4gbit,none"
SHAPES = {
    "dense": {"profiled": [[4, 64], [16, 64], [64, 1]], "held_out": [[8, 64], [12, 64], [32, 1]]},
    "experts": {"profiled": [[16, 64]], "held_out": [[10, 64]]},
}
"""Sequences and positions of a batch."""
COLUMNS = (
    *("model", "shape", "link", "strategy", "held_out", "measured_s", "predicted_s", "error"),
    *("aa_low", "aa_high"),
)
Row = dict[str, Any]


def run(
    *,
    links: str = LINKS,
    models: str = ",".join(SHAPES),
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    journal: str = "",
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each strategy in each context, and the summary.

    links: rates of the link between the ranks, separated by commas; none: unlimited.
    models: names of models, separated by commas.
    num_pairs: timed rounds; all strategies run in turn.
    seed: the random seed.
    quick: tiny models, two shapes and three rounds, to see that everything runs.
    journal: a file of results: cases that are in it are not run again, so a stopped bench goes on.
    """
    require_pairs("simulator", num_pairs, quick=quick)
    cases: list[dict[str, Any]] = [
        {"model": model, "link": label, "shapes": _quick(SHAPES[model], quick=quick)}
        for model in chosen("simulator", "model", models, SHAPES)
        for labels in like_links("1gbit" if quick else links)
        for label in labels
    ]
    kept = Journal(journal)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for number, case in enumerate(cases):
        size = {"size": "tiny" if quick else "full", "num_pairs": 3 if quick else num_pairs}
        spec, on_progress = {**case, **size, "seed": seed}, part_of(progress, number, len(cases))
        try:
            for result in kept.results(spec, partial(compete, spec, on_progress)):
                rows += context_rows(case["model"], result)
        except WeftError as error:
            failed[f"{case['model']} {case['link']}"] = str(error)
    return rows, {**summary(rows), "failed": failed, "quick": quick}


def _quick(shapes: dict[str, list[list[int]]], *, quick: bool) -> dict[str, list[list[int]]]:
    return {name: each[:1] for name, each in shapes.items()} if quick else shapes


def compete(spec: Row, on_progress: Progress) -> Iterator[Row]:
    """The results of the contexts of one model over one link."""
    words = [sys.executable, "-m", "torchweft_tools.bench.simulator.rank", json.dumps(spec)]
    with lab.spawn_ranks(words, link=spec["link"], env=ENVIRONMENT) as ranks:
        yield from listen(ranks, "simulator", on_progress)


def context_rows(model: str, result: Row) -> list[Row]:
    """The strategies of one context."""
    times: dict[str, list[float]] = result["times"]
    again = times["sequential_again"]
    control = ratio([a / b for a, b in zip(times["sequential"], again, strict=True)])
    rows = []
    for name, predicted_s in result["predicted_s"].items():
        measured_s = median(times[name])
        rows.append(
            {
                "model": model,
                "shape": "x".join(map(str, result["shape"])),
                "link": result["link"],
                "strategy": name,
                "held_out": result["held_out"],
                "measured_s": measured_s,
                "predicted_s": predicted_s,
                "error": predicted_s / measured_s - 1,
                "aa": control.median,
                "aa_low": control.low,
                "aa_high": control.high,
                "slowdowns": result["slowdowns"],
            }
        )
    return rows


def summary(rows: Iterable[Row]) -> Row:
    """All cases together."""
    rows = list(rows)
    if not rows:
        return {"cases": 0}
    contexts: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        contexts[row["model"], row["shape"], row["link"]].append(row)
    held = [abs(row["error"]) for row in rows if row["held_out"]]
    orders = {key: order(each) for key, each in contexts.items()}
    counted = {key: each for key, each in orders.items() if sum(each)}
    right, wrong = (sum(each[side] for each in counted.values()) for side in (0, 1))
    return {
        "cases": len(rows),
        "contexts": len(contexts),
        "median_error": median(abs(row["error"]) for row in rows),
        "held_out": len(held),
        "median_error_held_out": median(held) if held else None,
        "worst_error": max(abs(row["error"]) for row in rows),
        "pairs": right + wrong,
        "rank_correlation": (right - wrong) / (right + wrong) if right + wrong else None,
        "contexts_in_order": sum(r - w >= 0.9 * (r + w) for r, w in counted.values()),
        "contexts_with_pairs": len(counted),
        "aa_spread": max(row["aa_high"] - row["aa_low"] for row in rows),
    }


def order(rows: Sequence[Row]) -> tuple[int, int]:
    """Of the pairs that differ by more than the noise: those in the right and the wrong order."""
    noise = max(max(row["aa_high"] - 1, 1 - row["aa_low"]) for row in rows)
    right = wrong = 0
    for one, other in combinations(rows, 2):
        quick, slow = sorted((one, other), key=lambda row: float(row["measured_s"]))
        if slow["measured_s"] > quick["measured_s"] * (1 + noise):
            right += quick["predicted_s"] < slow["predicted_s"]
            wrong += quick["predicted_s"] >= slow["predicted_s"]
    return right, wrong
