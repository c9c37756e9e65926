"""The overlap bench: the race against the expert, over links of several rates.

    torchweft bench overlap --links 500mbit,1gbit,2gbit,4gbit --json

For each model, phase and link two ranks start in the lab, one thread each, and race: the sequential
model; overlap written by hand in 1, 2, 4, 8 parts, eager and under Inductor; DeepSpeed Domino;
Inductor, stock and with its reordering; weft; and compute and communication alone.
`overlap_rows` says what the columns mean.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torchweft import lab
from torchweft.bench.overlap_rows import Row, row, summary
from torchweft.bench.pairs import MIN_PAIRS
from torchweft.errors import WeftError, unknown

MARK = "@weft "
MODELS = ("dense", "experts")
PHASES = ("prefill", "decode")
LINKS = "500mbit,1gbit,2gbit,4gbit"
NUM_ROUNDS = 5
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
Progress = Callable[[int, int], None]


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

    quick: tiny models and three pairs, to see that everything runs; its figures mean nothing.
    """
    cases = [
        {"model": model, "phase": phase, "link": lab.Link.parse(link).label}
        for model in _names("model", models, MODELS)
        for phase in _names("phase", phases, PHASES)
        for link in _words(links)
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
        name = " ".join(case.values())
        spec = {**case, **told, "seed": seed, "size": size, "names": None}
        try:
            label, result = compete(spec, _part(progress, number, len(cases)))
        except WeftError as error:
            failed[name] = str(error)
        else:
            rows.append(row({**case, "link": label}, result))
    return rows, {**summary(rows), "failed": failed, "quick": quick}


def compete(
    spec: dict[str, Any], on_progress: Progress = lambda done, total: None
) -> tuple[str, dict[str, Any]]:
    """Run one case on two ranks: the link they really had, and what they told."""
    words = [sys.executable, "-m", "torchweft.bench.overlap_rank", json.dumps(spec)]
    result: dict[str, Any] | None = None
    with lab.spawn_ranks(words, link=spec["link"], env=ENVIRONMENT) as ranks:
        for line in ranks.stdout:
            if not line.startswith(MARK):
                continue
            told = json.loads(line.removeprefix(MARK))
            if "progress" in told:
                on_progress(*told["progress"])
            result = told.get("result", result)
        code, label = ranks.wait(), ranks.label
    if result is None:
        raise WeftError(f"bench overlap: the ranks ended with code {code} and told no result.")
    return label, result


def _part(progress: Progress | None, number: int, count: int) -> Progress:
    """Progress within one case of several."""

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress(number * total + done, count * total)

    return told


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
