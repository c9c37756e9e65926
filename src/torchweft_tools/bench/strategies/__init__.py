"""The strategies bench: each published strategy where it is at home, and where it should not help.

    torchweft bench strategies --strategies nanoflow,tokenweave --links 1gbit --json

Two ranks of one thread each, over links of the lab; all programs run in turn, in a random order.

    sequential_s  the better of eager and weft's sequential plan
    overlap_s     the better of plain overlap in 2 and in 4 parts
    peer          the best outside program: a loop written by hand, accelerate's disk offload
    speedup       sequential over the strategy: a median of pairs with its interval
    vs_overlap    overlap over the strategy; vs_peer: the peer over it
    ahead         whether it is ahead of sequential and of overlap, intervals apart from one
    aa            the sequential plan against itself
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

from torchweft import lab
from torchweft.errors import WeftError
from torchweft_tools.bench.measure.journal import Journal
from torchweft_tools.bench.measure.messages import Progress, listen, part_of
from torchweft_tools.bench.measure.options import chosen, like_links, require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio, ratio_columns
from torchweft_tools.bench.overlap import ENVIRONMENT
from torchweft_tools.bench.strategies.workloads import WORKLOADS

LINKS = "500mbit,1gbit,4gbit"
COLUMNS = (
    *("strategy", "workload", "home", "link", "sequential_s", "overlap_s", "weft_s"),
    *("peer", "peer_s", "speedup", "vs_overlap", "vs_peer", "ahead", "aa", "max_abs_diff", "why"),
)
"""What people see; --json gives all."""
Row = dict[str, Any]


def run(
    *,
    strategies: str = ",".join(WORKLOADS),
    links: str = LINKS,
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    journal: str = "",
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each strategy, workload and link, and the summary.

    strategies: names of strategies, separated by commas.
    links: rates of the link between the ranks, separated by commas; none: unlimited.
    num_pairs: rounds, in each of which every program runs once.
    seed: the random seed.
    quick: tiny models, one link and three rounds, to see that everything runs.
    journal: a file of results: cases that are in it are not run again, so a stopped bench goes on.
    """
    require_pairs("strategies", num_pairs, quick=quick)
    names = chosen("strategies", "strategy", strategies, WORKLOADS)
    labels = [label for like in like_links(links) for label in like][: 1 if quick else None]
    size = {"size": "tiny" if quick else "full", "num_pairs": 3 if quick else num_pairs}
    cases: list[Row] = [
        {"strategy": name, "link": label, **size, "seed": seed}
        for name in names
        for label in labels
    ]
    kept, rows, failed = Journal(journal), list[Row](), dict[str, str]()
    for number, case in enumerate(cases):
        make = partial(compete, case, part_of(progress, number, len(cases)))
        try:
            for result in kept.results(case, make):
                rows.append(row(case["strategy"], result))
        except WeftError as error:
            failed[f"{case['strategy']} {case['link']}"] = str(error)
    return rows, {**summary(rows), "failed": failed, "quick": quick}


def compete(spec: Row, on_progress: Progress) -> Iterator[Row]:
    """The results of the workloads of one strategy over one link."""
    words = [sys.executable, "-m", "torchweft_tools.bench.strategies.rank", json.dumps(spec)]
    with lab.spawn_ranks(words, link=spec["link"], env=ENVIRONMENT) as ranks:
        yield from listen(ranks, "strategies", on_progress)


def row(strategy: str, result: Row) -> Row:
    """The figures of one workload."""
    times: dict[str, list[float]] = result["times"]
    middle = {name: median(each) for name, each in times.items()}

    def best(names: Iterable[str]) -> str | None:
        return min((n for n in names if n in times), key=middle.__getitem__, default=None)

    sequential, overlap = best(["eager", "sequential"]), best(["overlap_2", "overlap_4"])
    assert sequential is not None and overlap is not None, "both are in every race"
    peer = best(result["peers"])
    pairs = zip(times["sequential"], times["sequential_again"], strict=True)
    control = ratio([a / b for a, b in pairs])
    figures: Row = {
        "strategy": strategy,
        **{name: result[name] for name in ("workload", "home", "link")},
        "sequential": sequential,
        "sequential_s": middle[sequential],
        "overlap": overlap,
        "overlap_s": middle[overlap],
        "weft_s": middle["weft"],
        "peer": peer,
        "peer_s": middle[peer] if peer else None,
        **ratio_columns("speedup", times[sequential], times["weft"]),
        **ratio_columns("vs_overlap", times[overlap], times["weft"]),
        **(ratio_columns("vs_peer", times[peer], times["weft"]) if peer else {"vs_peer": None}),
        "aa": control.median,
        "aa_low": control.low,
        "aa_high": control.high,
        "sound": control.is_even,
        **{name: result[name] for name in ("max_abs_diff", "why", "fallbacks")},
        "num_pairs": len(times["weft"]),
    }
    return {**figures, "ahead": figures["speedup_low"] > 1 and figures["vs_overlap_low"] > 1}


def summary(rows: list[Row]) -> Row:
    """At how many homes a strategy is ahead; a strategy without any such row is named."""
    homes = [each for each in rows if each["home"]]
    won = {each["strategy"] for each in homes if each["ahead"] and each["sound"]}
    return {
        "rows": len(rows),
        "sound": sum(each["sound"] for each in rows),
        "ahead_at_home": sorted(won),
        "behind_at_home": sorted({each["strategy"] for each in homes} - won),
        "ahead_elsewhere": sum(each["ahead"] and not each["home"] for each in rows),
        "fallbacks": sum(bool(each["fallbacks"]) for each in rows),
    }
