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
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torchweft import lab
from torchweft.errors import WeftError, unknown
from torchweft_tools.bench.measure.pairs import MIN_PAIRS
from torchweft_tools.bench.measure.told import Progress, listen, part_of
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
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each model, phase and link, and the summary.

    links: rates of the link between the ranks, with commas between.
    models: with commas between.
    phases: with commas between.
    num_pairs: timed pairs, each program against the other in turn.
    seed: of all that is drawn.
    quick: tiny models and three pairs, to see that everything runs; its figures mean nothing.
    """
    parsed = sorted(map(lab.LabLink.parse, _words(links)), key=_kind)
    cases: list[dict[str, Any]] = [
        {"model": model, "phase": phase, "links": [link.label for link in like]}
        for model in _names("model", models, MODELS)
        for phase in _names("phase", phases, PHASES)
        for _, like in groupby(parsed, _kind)
    ]
    if not quick and num_pairs < MIN_PAIRS:
        raise WeftError(
            f"bench overlap: --pairs {num_pairs} are too few; at least {MIN_PAIRS}, or --quick.",
            rule="option",
        )
    size = "tiny" if quick else "full"
    told = {"num_pairs": 3 if quick else num_pairs, "num_rounds": 1 if quick else NUM_ROUNDS}
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for number, case in enumerate(cases):
        before = len(rows)
        spec = {**case, **told, "seed": seed, "size": size, "names": None}
        name = {"model": case["model"], "phase": case["phase"]}
        try:
            for label, result in compete(spec, part_of(progress, number, len(cases))):
                rows.append(row({**name, "link": label}, result))
        except WeftError as error:
            for link in case["links"][len(rows) - before :]:
                failed[" ".join((*name.values(), link))] = str(error)
    return rows, {**summary(rows), "failed": failed, "quick": quick}


def compete(
    spec: dict[str, Any], on_progress: Progress = lambda done, total: None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one case on two ranks: for each link, the one they really had, and what they told.

    Where links cannot be limited there is one result, over plain loopback. Raises `WeftError` if
    the ranks end before they have told all.
    """
    words = [sys.executable, "-m", "torchweft_tools.bench.players.overlap_rank", json.dumps(spec)]
    with lab.spawn_ranks(words, link=spec["links"][0], env=ENVIRONMENT) as ranks:
        for result in listen(ranks, "overlap", on_progress):
            yield result["link"], result


def _kind(link: lab.LabLink) -> tuple[bool, str]:
    """Links of one kind can take each other's place while ranks run."""
    return not link.bits_per_s, link.duplex


def _words(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise WeftError("bench overlap: nothing is chosen.", rule="option")
    return found


def _names(kind: str, text: str, known: Sequence[str]) -> list[str]:
    for word in _words(text):
        if word not in known:
            raise WeftError(f"bench overlap: {unknown(kind, word, known)}", rule="option")
    return _words(text)
