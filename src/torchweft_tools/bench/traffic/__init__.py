"""The traffic bench: a stream of changing calls from a cold start, trials included, against eager.

    torchweft bench traffic --json

Two ranks of one thread each serve a seeded stream: bursts of requests, each a prefill and then
decode steps whose batch grows and shrinks. Eager, auto and eager again (the control) play the same
calls in chunks, in turn; each sees all of its calls in order. `cold`: no choice is known, and all
captures and races happen in the stream. `warmed`: `weft.warmup` comes first, and is not timed.
Columns of a run: total_vs_stock, eager's seconds over auto's; p50_vs_stock and p99_vs_stock,
auto's quantile over eager's; regret_s, by how much auto was behind at worst, and regret_calls, when
that was made up for; aa_total and aa_p99, eager again against eager.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

from torchweft import lab
from torchweft.errors import WeftError
from torchweft_tools.bench.measure.journal import Journal
from torchweft_tools.bench.measure.messages import Progress, listen, part_of
from torchweft_tools.bench.measure.options import chosen, words
from torchweft_tools.bench.overlap import ENVIRONMENT

MODELS, STARTS = ("dense", "experts"), ("cold", "warmed")
QUICK_CALLS, QUICK_KINDS, MIN_CALLS = 120, 1, 100
MAX_ROWS, MAX_POSITIONS, MAX_TOGETHER = 64, 128, 4
BURST, BURSTS, STRETCH = 0.08, (1, 6, 24), 50
NUM_SLOWEST = 12
Row = dict[str, Any]


class TrafficCall(NamedTuple):
    """One call of the stream: so many sequences of so many positions."""

    phase: str
    rows: int
    positions: int


def stream(num_calls: int, seed: int = 0) -> list[TrafficCall]:
    """The calls of an engine that prefills what waits, and else decodes all that is under way.

    Requests come in bursts; how many come at once changes from stretch to stretch.
    """
    rng = Random(seed)
    calls: list[TrafficCall] = []
    waiting: deque[int] = deque()  # positions of prompts
    left: list[int] = []  # tokens that each request is still to make
    most = BURSTS[-1]
    while len(calls) < num_calls:
        if len(calls) % STRETCH == 0:
            most = rng.choice(BURSTS)
        if rng.random() < BURST or not (waiting or left):
            waiting += [rng.randint(16, MAX_POSITIONS) for _ in range(rng.randint(1, most))]
        if waiting and len(left) < MAX_ROWS:
            num = min(len(waiting), MAX_TOGETHER, MAX_ROWS - len(left))
            prompts = [waiting.popleft() for _ in range(num)]
            left += [rng.randint(4, 64) for _ in prompts]
            calls.append(TrafficCall("prefill", num, max(prompts)))
        else:
            calls.append(TrafficCall("decode", len(left), 1))
            left = [num - 1 for num in left if num > 1]
    return calls


def run(
    *,
    links: str = "1gbit",
    models: str = "dense",
    starts: str = ",".join(STARTS),
    num_calls: int = 1000,
    chunk: int = 20,
    seed: int = 0,
    quick: bool = False,
    journal: str = "",
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each kind of calls of each run, a row for each run, and the summary.

    links: rates of the link between the ranks, separated by commas; none: unlimited.
    models: names of models, separated by commas: dense, experts.
    starts: cold, warmed, or both, separated by a comma.
    num_calls: calls of the stream.
    chunk: calls of a program until it is the next one's turn.
    seed: the random seed.
    quick: a tiny model and a short stream, to see that everything runs; its figures mean nothing.
    journal: a file of results: cases that are in it are not run again, so a stopped bench goes on.
    """
    if num_calls < MIN_CALLS or chunk < 1:
        raise WeftError(
            f"bench traffic: --calls must be {MIN_CALLS} or more and --chunk 1 or more; got "
            f"{num_calls} and {chunk}. To see that everything runs, use --quick.",
            rule="option",
        )
    cases = [
        {"model": model, "link": lab.LabLink.parse(link).label, "start": start}
        for model in chosen("traffic", "model", models, MODELS)
        for link in words(links)
        for start in chosen("traffic", "start", starts, STARTS)
    ]
    size: Row = {
        "size": "tiny" if quick else "full",
        "num_calls": QUICK_CALLS if quick else num_calls,
    }
    size["num_warmed"] = QUICK_KINDS if quick else None  # each may take Inductor half a minute
    kept = Journal(journal)
    kinds: list[Row] = []
    runs: list[Row] = []
    failed: dict[str, str] = {}
    for number, case in enumerate(cases):
        try:
            spec = {**case, **size, "chunk": chunk, "seed": seed}
            on_progress = part_of(progress, number, len(cases))
            (result,) = kept.results(spec, partial(_play, spec, on_progress))
            case["link"] = result["link"]  # the one that they really had
            runs.append({**case, **figures(result)})
            kinds += [{**case, **each} for each in kind_rows(result)]
        except WeftError as error:
            failed[" ".join(case.values())] = str(error)
    return [*kinds, *runs], {**summary(runs), "failed": failed, "quick": quick}


def _play(spec: Row, on_progress: Progress) -> list[Row]:
    """One run, in processes and a folder of caches that nothing was in before."""
    command = [sys.executable, "-m", "torchweft_tools.bench.traffic.rank", json.dumps(spec)]
    with tempfile.TemporaryDirectory(prefix="weft_traffic_") as folder:
        caches = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        with lab.spawn_ranks(command, link=spec["link"], env={**ENVIRONMENT, **caches}) as ranks:
            results = list(listen(ranks, "traffic", on_progress))
    if not results:
        raise WeftError("bench traffic: the ranks have reported no result.")
    return results[:1]


def figures(result: Row) -> Row:
    """What a run comes to: auto against eager, the control, and the regret of the first calls."""
    eager, auto, again = (result["times"][name] for name in ("eager", "auto", "eager_again"))
    worst_s, over = regret(eager, auto)
    return {
        "calls": len(eager),
        "total_vs_stock": sum(eager) / sum(auto),
        "p50_vs_stock": quantile(auto, 0.5) / quantile(eager, 0.5),
        "p99_vs_stock": quantile(auto, 0.99) / quantile(eager, 0.99),
        "aa_total": sum(eager) / sum(again),
        "aa_p99": quantile(again, 0.99) / quantile(eager, 0.99),
        "regret_s": worst_s,
        "regret_calls": over,
        "warmup_s": result["warmup_s"],
        "eager_s": sum(eager),
        "max_abs_diff": result["max_abs_diff"],
        "fallbacks": result["fallbacks"],
        "slowest": slowest(result),
    }


def regret(eager: Sequence[float], auto: Sequence[float]) -> tuple[float, int | None]:
    """By how many seconds auto was behind at worst, and after how many calls it was so no more;
    None if it has not caught up."""
    behind = list(accumulate((own - stock for own, stock in zip(auto, eager, strict=True))))
    worst_s = max([0.0, *behind])
    if not worst_s:
        return 0.0, 0
    worst = behind.index(worst_s)
    return worst_s, next((n + 1 for n in range(worst, len(behind)) if behind[n] <= 0), None)


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that this share of all do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def kind_rows(result: Row) -> list[Row]:
    """A row for each phase and power of two of rows: how its calls went, and what was chosen."""
    numbers: dict[tuple[str, int], list[int]] = {}
    for number, (phase, rows, _) in enumerate(result["calls"]):
        numbers.setdefault((phase, rows.bit_length()), []).append(number)
    made = []
    for (phase, bits), those in sorted(numbers.items()):
        eager, auto = ([result["times"][name][n] for n in those] for name in ("eager", "auto"))
        ways = dict.fromkeys(result["chosen"][n] for n in those)
        rows = f"{2 ** (bits - 1)}..{2**bits - 1}" if bits > 1 else "1"
        made.append(
            {
                "phase": phase,
                "rows": rows,
                "number": len(those),
                "eager_s": sum(eager),
                "auto_s": sum(auto),
                "vs_stock": sum(eager) / sum(auto),
                "worst_call_s": max(auto),
                "chosen": "; ".join(ways),
            }
        )
    return made


def slowest(result: Row) -> list[str]:
    """The calls in which auto was furthest behind, for people."""
    eager, auto = (result["times"][name] for name in ("eager", "auto"))
    order = sorted(range(len(auto)), key=lambda n: eager[n] - auto[n])
    return [
        f"call {n} {' '.join(map(str, result['calls'][n]))}: {1e3 * auto[n]:.0f} ms, eager "
        f"{1e3 * eager[n]:.0f} ms"
        for n in order[:NUM_SLOWEST]
    ]


def summary(runs: Sequence[Row]) -> Row:
    """The worst of all runs of each start, and each run."""
    made: Row = {"runs": len(runs)}
    for start in STARTS:
        those = [each for each in runs if each["start"] == start]
        if those:
            made |= {
                f"{start}_total_vs_stock": min(each["total_vs_stock"] for each in those),
                f"{start}_p99_vs_stock": max(each["p99_vs_stock"] for each in those),
                f"{start}_regret_s": max(each["regret_s"] for each in those),
                f"{start}_warmup_s": max(each["warmup_s"] for each in those),
            }
    names = ("model", "link", "start")
    return made | {" ".join(each[name] for name in names): each for each in runs}
