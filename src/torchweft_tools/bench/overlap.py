"""The overlap bench: the race against the expert, over links of several rates.

    torchweft bench overlap --links 500mbit,1gbit,2gbit,4gbit --json

For each model and phase two ranks start in the lab, one thread each, and race over each link: the
sequential model; overlap written by hand in 1, 2, 4, 8 parts, eager and under Inductor; DeepSpeed
Domino; Inductor, stock and with its reordering; weft; and compute and communication alone.
What is compiled serves all links. `overlap_rows` says what the columns mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from torchweft import lab
from torchweft.errors import WeftError
from torchweft_tools.bench.measure.journal import Journal
from torchweft_tools.bench.measure.messages import Progress, listen, part_of
from torchweft_tools.bench.measure.options import chosen, like_links, require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS
from torchweft_tools.bench.players.overlap_rows import Row, row, summary

MODELS = ("dense", "experts")
PHASES = ("prefill", "decode")
LINKS = "500mbit,1gbit,2gbit,4gbit"
NUM_ROUNDS = 3
COLUMNS = (
    *("model", "phase", "link", "sequential_s", "compute_s", "comm_s", "health"),
    *("best_peer", "best_peer_s", "weft", "weft_s", "speedup", "vs_peer"),
    *("eager_vs_peer", "onednn_vs_peer", "share_of_ideal", "aa"),
)
"""What people see; --json gives all."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "6",
    "DS_ACCELERATOR": "cpu",
}
"""One thread a rank, and libraries that keep quiet."""


def run(
    *,
    links: str = LINKS,
    models: str = ",".join(MODELS),
    phases: str = ",".join(PHASES),
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    journal: str = "",
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each model, phase and link, and the summary.

    links: rates of the link between the ranks, separated by commas.
    models: names of models, separated by commas.
    phases: names of phases, separated by commas.
    num_pairs: timed pairs; the programs run in turn.
    seed: the random seed.
    quick: tiny models and three pairs, to see that everything runs; its figures mean nothing.
    journal: a file of results: cases that are in it are not run again, so a stopped bench goes on.
    """
    cases: list[dict[str, Any]] = [
        {"model": model, "phase": phase, "links": labels}
        for model in chosen("overlap", "model", models, MODELS)
        for phase in chosen("overlap", "phase", phases, PHASES)
        for labels in like_links(links)
    ]
    require_pairs("overlap", num_pairs, quick=quick)
    size = "tiny" if quick else "full"
    counts = {"num_pairs": 3 if quick else num_pairs, "num_rounds": 1 if quick else NUM_ROUNDS}
    kept = Journal(journal)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for number, case in enumerate(cases):
        before = len(rows)
        spec = {**case, **counts, "seed": seed, "size": size, "names": None}
        name = {"model": case["model"], "phase": case["phase"]}
        try:
            on_progress = part_of(progress, number, len(cases))
            for label, result in kept.results(spec, partial(compete, spec, on_progress)):
                rows.append(row({**name, "link": label}, result))
        except WeftError as error:
            for link in case["links"][len(rows) - before :]:
                failed[" ".join((*name.values(), link))] = str(error)
    return rows, {**summary(rows), "failed": failed, "quick": quick}


def compete(
    spec: dict[str, Any], on_progress: Progress = lambda done, total: None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one case on two ranks: for each link, the one they really had, and their result.

    Where links cannot be limited there is one result, over plain loopback. Raises `WeftError` if
    the ranks end before they have reported all results.
    """
    words = [sys.executable, "-m", "torchweft_tools.bench.players.overlap_rank", json.dumps(spec)]
    with lab.spawn_ranks(words, link=spec["links"][0], env=ENVIRONMENT) as ranks:
        for result in listen(ranks, "overlap", on_progress):
            yield result["link"], result
