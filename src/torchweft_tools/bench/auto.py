"""The auto bench: a model compiled without a strategy, against all that could be given instead.

    torchweft bench auto --json

Two ranks of one thread each, over links of several rates, with a dense and an expert-parallel
model; one process whose model waits for a store (`ranker`). Batches of 1 to 64, prefill and decode.
In each context eager, torch.compile, every fixed strategy and auto, which has warmed up, run in
turn. Columns: what was chosen; vs_stock, how many times as fast as the better of eager and
torch.compile; vs_best, as the best of all; aa, eager against itself; gap, its time over a bound
that no schedule can beat at the measured costs: of its ops, and of the call around them (call_s).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

from torchweft import lab
from torchweft.errors import WeftError
from torchweft_tools.bench.measure.journal import Journal
from torchweft_tools.bench.measure.messages import Progress, listen, part_of
from torchweft_tools.bench.measure.options import chosen, like_links, require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio
from torchweft_tools.bench.overlap import ENVIRONMENT

MODELS = ("dense", "experts", "ranker")
LINKS = "500mbit,1gbit,4gbit,none"
SHAPES = {
    "dense": [[1, 64], [4, 64], [16, 64], [64, 16], [1, 1], [8, 1], [64, 1]],
    "experts": [[4, 64], [16, 64], [64, 1]],
    "ranker": [[1, 16], [8, 16], [64, 16], [1, 1], [64, 1]],
}
"""Sequences and positions of a batch."""
ALONE = ("ranker",)
"""Models of one process, which no link is between."""
STOCK = ("eager", "inductor")
COLUMNS = (
    *("model", "shape", "link", "chosen", "eager_s", "inductor_s", "best", "auto_s"),
    *("vs_stock", "vs_best", "aa", "gap"),
)
Row = dict[str, Any]


def run(
    *,
    links: str = LINKS,
    models: str = ",".join(MODELS),
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    journal: str = "",
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each context, and the summary.

    links: rates of the link between the ranks, separated by commas; none: unlimited.
    models: names of models, separated by commas.
    num_pairs: timed rounds; all programs run in turn.
    seed: the random seed.
    quick: tiny models, two shapes and three rounds, to see that everything runs.
    journal: a file of results: contexts that are in it are not run again: a stopped bench goes on.
    """
    require_pairs("auto", num_pairs, quick=quick)
    cases: list[dict[str, Any]] = [
        {"model": model, "link": label, "shapes": SHAPES[model][1:3] if quick else SHAPES[model]}
        for model in chosen("auto", "model", models, MODELS)
        for labels in like_links(_links(model, links, quick=quick))
        for label in labels
    ]
    kept = Journal(journal)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for number, case in enumerate(cases):
        size = {"size": "tiny" if quick else "full", "num_pairs": 3 if quick else num_pairs}
        spec = {**case, **size, "seed": seed}
        on_progress = part_of(progress, number, len(cases))
        contexts = {str(shape): {**spec, "shapes": [shape]} for shape in case["shapes"]}
        new = [each["shapes"][0] for each in contexts.values() if not kept.knows(each)]
        contest = compete({**spec, "shapes": new}, on_progress)
        try:
            for each in contexts.values():
                results = kept.results(each, partial(islice, contest, 1))
                rows += [row(case["model"], result) for result in results]
            if new:
                next(contest, None)  # how the ranks have ended
        except WeftError as error:
            failed[f"{case['model']} {case['link']}"] = str(error)
    return rows, {**summary(rows), "failed": failed, "quick": quick}


def _links(model: str, links: str, *, quick: bool) -> str:
    if model in ALONE:
        return "none"
    return "1gbit" if quick else links


def compete(spec: Row, on_progress: Progress) -> Iterator[Row]:
    """The results of the contexts of one model over one link."""
    words = [sys.executable, "-m", "torchweft_tools.bench.players.auto_rank", json.dumps(spec)]
    num_ranks = 1 if spec["model"] in ALONE else 2
    with lab.spawn_ranks(words, link=spec["link"], num_ranks=num_ranks, env=ENVIRONMENT) as ranks:
        yield from listen(ranks, "auto", on_progress)


def row(model: str, result: Row) -> Row:
    """One context."""
    times: dict[str, list[float]] = result["times"]
    middle = {name: median(each) for name, each in times.items()}
    better = min(STOCK, key=middle.__getitem__)
    others = [name for name in times if name not in ("auto", "eager_again")]
    best = min(others, key=middle.__getitem__)

    def against(name: str, other: str = "auto") -> Any:
        return ratio([a / b for a, b in zip(times[name], times[other], strict=True)])

    stock, control = against(better), against("eager", "eager_again")
    return {
        "model": model,
        "shape": "x".join(map(str, result["shape"])),
        "link": result["link"],
        "chosen": result["chosen"],
        **{f"{name}_s": seconds for name, seconds in middle.items()},
        "stock": better,
        "best": best,
        "vs_stock": stock.median,
        "vs_stock_low": stock.low,
        "vs_best": against(best).median,
        "vs_fixed": {name: middle[best] / seconds for name, seconds in middle.items()},
        "aa": control.median,
        "sound": control.is_even,
        "aa_low": control.low,
        "aa_high": control.high,
        "bound_s": result["bound_s"],
        "call_s": result["call_s"],
        "gap": middle["auto"] / result["bound_s"] - 1 if result["bound_s"] else None,
        "speeds": result["speeds"],
        "max_abs_diff": result["max_abs_diff"],
    }


def summary(rows: Iterable[Row]) -> Row:
    """All contexts together. Those whose control is too wide do not count for `worst_vs_stock`."""
    rows = list(rows)
    if not rows:
        return {"contexts": 0}
    sound = [each for each in rows if each["sound"]]
    names = [name for name in rows[0]["vs_fixed"] if name not in ("auto", "eager_again")]
    fixed = {name: _geomean(each["vs_fixed"][name] for each in rows) for name in names}
    gaps = [each["gap"] for each in rows if each["gap"] is not None]
    return {
        "contexts": len(rows),
        "sound": len(sound),
        "worst_vs_stock": min((each["vs_stock"] for each in sound), default=None),
        "geomean_vs_best": _geomean(each["vs_best"] for each in rows),
        "best_fixed": max(fixed, key=fixed.__getitem__),
        "best_fixed_geomean_vs_best": max(fixed.values()),
        "aa_spread": max(each["aa_high"] - each["aa_low"] for each in rows),
        "worst_gap_to_bound": max(gaps, default=None),
        "share_within_10_percent": sum(gap <= 0.1 for gap in gaps) / len(gaps) if gaps else None,
    }


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
