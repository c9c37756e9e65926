"""The hosts bench: a stock host against the same host under Weft, over links of several rates.

    make hosts && torchweft bench hosts [--hosts transformers] [--links none,4gbit,1gbit] [--json]

Each host runs with two ranks in the lab, in its own venv (`.venv-NAME`) unless this one has it.
Stock and Weft take turns in one process, in a random order each round, with the same transport and
the same threads. Stock runs twice per round: that is the A/A control. A host that compiles by
itself is raced in that mode as well, and the faster of the two counts.

    stock, weft   the medians, in `unit` (more is better)
    mode          the mode of stock: eager, or compiled as the host does by default
    ratio         the median of weft / stock, pair by pair, with its 95 % interval
    aa            the same for stock against itself: no ratio should be below the worst of these
    equal         whether both gave the same (tokens, or numbers within 1e-4)
    lines         lines of code of the integration, without docstrings and comments

Where links cannot be limited there is one row per workload, over plain loopback.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchweft import integrations, lab
from torchweft.errors import WeftError
from torchweft_tools.bench.measure.journal import Journal
from torchweft_tools.bench.measure.lines import code_lines
from torchweft_tools.bench.measure.messages import Progress, listen, part_of
from torchweft_tools.bench.measure.options import chosen, like_links, require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio_columns

ROOT = Path(__file__).parents[3]
LINKS = "none,4gbit,2gbit,1gbit,500mbit"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""One thread a rank, nothing from outside, and libraries that keep quiet."""
COLUMNS = (
    *("host", "version", "strategy", "workload", "link", "stock", "mode", "weft", "unit"),
    *("ratio", "ratio_low", "ratio_high", "equal", "lines", "aa_low", "aa_high"),
)
"""What people see; --json gives all."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Host:
    """A host of the bench. `player`: the module that races it, given a spec in JSON.

    ranked: the player is one rank, and two are started; else it starts its own ranks.
    """

    package: str
    player: str
    integration: str
    workloads: tuple[str, ...]
    ranked: bool = True

    @property
    def lines(self) -> int:
        """Lines of code of its integration."""
        return code_lines(Path(integrations.__path__[0]) / self.integration)


HOSTS = {
    "transformers": Host(
        "transformers",
        "torchweft_tools.bench.players.host_transformers",
        "transformers.py",
        ("prefill", "generate"),
    ),
    "vllm": Host(
        "vllm",
        "torchweft_tools.bench.players.host_vllm",
        "vllm.py",
        ("serving", "prefill"),
        ranked=False,
    ),
}


def run(
    *,
    hosts: str = ",".join(HOSTS),
    workloads: str = "",
    links: str = LINKS,
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    journal: str = "",
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each host, workload and link, and the summary.

    hosts: names of hosts, separated by commas.
    workloads: of all hosts, separated by commas; all by default.
    links: rates of the link between the ranks, separated by commas.
    num_pairs: timed pairs; the programs run in turn.
    seed: the random seed.
    quick: tiny models and three pairs, to see that everything runs; its figures mean nothing.
    journal: a file of results: cases that are in it are not run again, so a stopped bench goes on.
    """
    require_pairs("hosts", num_pairs, quick=quick)
    names = chosen("hosts", "host", hosts, HOSTS)
    known = sorted({name for host in names for name in HOSTS[host].workloads})
    wanted = chosen("hosts", "workload", workloads, known)
    cases = [
        (host, workload, labels)
        for host in names
        for workload in HOSTS[host].workloads
        if workload in wanted
        for labels in like_links(links)
    ]
    kept = Journal(journal)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for number, (host, workload, labels) in enumerate(cases):
        spec = {
            "workload": workload, "links": labels, "seed": seed,
            "num_pairs": 3 if quick else num_pairs, "size": "tiny" if quick else "full",
        }  # fmt: skip
        part = part_of(progress, number, len(cases))
        try:
            race = partial(compete, HOSTS[host], spec, part)
            rows += [row(host, workload, each) for each in kept.results([host, spec], race)]
        except WeftError as error:
            failed[" ".join((host, workload, *labels))] = str(error)
    return rows, {**summary(rows), "failed": failed, "quick": quick}


def compete(
    host: Host, spec: Mapping[str, Any], on_progress: Progress = lambda done, total: None
) -> Iterator[dict[str, Any]]:
    """Race one workload of a host: for each link, the result of its player.

    Raises `WeftError` if the host is not installed, or ends before it has reported all results.
    """
    words = [_python(host), "-m", host.player, json.dumps(spec)]
    link = spec["links"][0]
    command = (
        lab.spawn_ranks(words, link=link, env=ENVIRONMENT)
        if host.ranked
        else lab.start(words, link=link, env=ENVIRONMENT, stdout=subprocess.PIPE)
    )
    with command:
        yield from listen(command, "hosts", on_progress)


def row(host: str, workload: str, result: Mapping[str, Any]) -> Row:
    """The row of a player's result: version, strategy, link, unit, work (of a run), times."""
    times, work = result["times"], result["work"]
    rates = {name: statistics.median(work / run_s for run_s in times[name]) for name in times}
    best = max(("stock", "compiled"), key=lambda name: rates.get(name, 0.0))
    return {
        "host": host,
        "version": result["version"],
        "strategy": result["strategy"],
        "workload": workload,
        "link": result["link"],
        "stock": rates[best],
        "mode": "compiled" if best == "compiled" else "eager",
        "weft": rates["weft"],
        "unit": result["unit"],
        **ratio_columns("ratio", times[best], times["weft"]),
        "equal": result["equal"],
        "lines": HOSTS[host].lines,
        **ratio_columns("aa", times["stock"], times["again"]),
        "eager": rates["stock"],
        "compiled": rates.get("compiled"),
        "num_pairs": len(times["stock"]),
        "notes": result.get("notes", {}),
    }


def summary(rows: Sequence[Row]) -> Row:
    """The best ratio of each host; the worst of all, and the worst of the control."""
    best: dict[str, float] = {}
    for each in rows:
        best[each["host"]] = max(each["ratio"], best.get(each["host"], 0.0))
    spreads = [abs(each[name] - 1) for each in rows for name in ("aa_low", "aa_high")]
    return {
        "rows": len(rows),
        "best": best,
        "worst_ratio": min((each["ratio"] for each in rows), default=None),
        "aa_worst": min((each["aa_low"] for each in rows), default=None),
        "aa_spread": max(spreads, default=None),
        "all_equal": all(each["equal"] for each in rows),
    }


def _python(host: Host) -> str:
    """The Python that has a host: this one, or that of the venv that `make hosts` made for it."""
    if importlib.util.find_spec(host.package) is not None:
        return sys.executable
    own = ROOT / f".venv-{host.package}" / "bin" / "python"
    if not own.is_file():
        raise WeftError(
            f"bench hosts: {host.package} is not installed here; run `make hosts`.", rule="host"
        )
    return str(own)
