"""The resources bench: ops that lean on memory beside ops that lean on compute, on two lanes.

    torchweft bench resources --models gather,recommender,phases --rows 64,256,1024 --json

Two lanes of one thread each, `branches` on `weft.cpu(2)`, against the same model op by op on two
intra-op threads: both have two cores. In turn, in a random order each round.

    baseline   the better of two intra-op threads and one: small ops are faster on one
    speedup    baseline over two lanes, a median of pairs with its interval
    balance    the shorter of the two branches over the longer one, each on one thread: only as much
               of the longer one can have company
    threads    one thread over two threads, op by op: what intra-op threads gain already
    aa         two threads against themselves
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import torch

from torchweft import mark_op
from torchweft.api import compile, restore
from torchweft.errors import WeftError
from torchweft.plan.machine import cpu
from torchweft.plan.strategies import branches
from torchweft.run.compare import compare
from torchweft_tools.bench.measure.journal import Journal
from torchweft_tools.bench.measure.options import chosen, require_pairs, words
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio_columns
from torchweft_tools.bench.resources.models import MEMORY_CALLS, MODELS

COLUMNS = (
    *("model", "rows", "baseline", "two_threads_s", "two_lanes_s"),
    *("speedup", "speedup_low", "speedup_high"),
    *("balance", "threads", "aa", "max_abs_diff", "why"),
)
"""What people see; --json gives all."""
NUM_WARM = 3
WELL = 1.7  # times as fast on two threads: they leave little to gain
EVEN = 0.5  # of the longer branch: what is left runs alone
Row = dict[str, Any]


def run(
    *,
    models: str = ",".join(MODELS),
    rows: str = "64,256,1024",
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    journal: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Row], Row]:
    """A row for each model and size, and the summary.

    models: names of models, separated by commas.
    rows: sizes of the batch, separated by commas.
    num_pairs: rounds, in each of which every program runs once.
    seed: the random seed.
    quick: tiny tables, one size and three rounds, to see that everything runs.
    journal: a file of results: cases that are in it are not run again, so a stopped bench goes on.
    """
    require_pairs("resources", num_pairs, quick=quick)
    if wrong := [word for word in words(rows) if not word.isdigit() or int(word) < 2]:
        raise WeftError(f"bench resources: rows must be numbers from 2 on; got {wrong[0]!r}.")
    sizes = [int(word) for word in words(rows)][: 1 if quick else None]
    names = chosen("resources", "model", models, MODELS)
    rounds = 3 if quick else num_pairs
    cases = [
        {"model": name, "rows": size, "num_pairs": rounds, "seed": seed, "quick": quick}
        for name in names
        for size in sizes
    ]
    kept, made = Journal(journal), list[Row]()
    for number, case in enumerate(cases):
        made += kept.results(case, partial(measure, case))
        progress(number + 1, len(cases))
    return made, summary(made)


def summary(rows: list[Row]) -> Row:
    """How many rows gain, with an interval above one, and the best of them."""
    gains = [row for row in rows if row["speedup_low"] > 1]
    return {
        "rows": len(rows),
        "gain": len(gains),
        "best_speedup": max((row["speedup"] for row in gains), default=None),
        "losses": sum(row["speedup_high"] < 1 for row in rows),
    }


def measure(case: Row) -> Iterator[Row]:
    """One model at one size."""
    torch.manual_seed(case["seed"])
    before = torch.get_num_threads()
    model: Any = MODELS[case["model"]](case["rows"], quick=case["quick"]).eval()
    inputs = model.inputs()
    try:
        with torch.no_grad():
            wanted = model(*inputs)
            plain = model.forward
            memory = mark_op(MEMORY_CALLS, "memory", uses="memory")
            machine = cpu(2, capacity=2.0)
            torch.set_num_threads(1)
            compile(
                model, branches, machine=machine, rules=[memory], num_threads=1, fallback="error"
            )
            verdict = compare(wanted, model(*inputs))
            programs = {
                "two_threads": (2, plain),
                "two_threads_again": (2, plain),
                "one_thread": (1, plain),
                "two_lanes": (1, model),
                "memory": (1, model.remember),
                "compute": (1, model.think),
            }
            times = _race(programs, inputs, case["num_pairs"], Random(case["seed"]))
    finally:
        restore(model)
        torch.set_num_threads(before)
    yield row(case, times, verdict.max_abs_diff)


def row(case: Row, times: dict[str, list[float]], max_abs_diff: float) -> Row:
    """The figures of a case."""
    median = {name: statistics.median(each) for name, each in times.items()}
    branch = sorted((median["memory"], median["compute"]))
    baseline = min(("two_threads", "one_thread"), key=median.__getitem__)
    figures: Row = {
        **{name: case[name] for name in ("model", "rows")},
        **{f"{name}_s": value for name, value in median.items()},
        "baseline": baseline,
        **ratio_columns("speedup", times[baseline], times["two_lanes"]),
        "balance": branch[0] / branch[1],
        "threads": median["one_thread"] / median["two_threads"],
        **ratio_columns("aa", times["two_threads"], times["two_threads_again"]),
        "num_pairs": len(times["two_lanes"]),
        "max_abs_diff": max_abs_diff,
    }
    return {**figures, "why": why(figures)}


def why(figures: Row) -> str:
    """Why nothing is gained; empty where something is."""
    if figures["speedup_low"] > 1:
        return ""
    if figures["balance"] < EVEN:
        return f"the shorter branch is {figures['balance']:.0%} of the longer one"
    if figures["threads"] > WELL:
        return f"two intra-op threads are {figures['threads']:.2f} times as fast as one already"
    return "beside each other both branches are slower, or a call takes too long around its plan"


def _race(
    programs: dict[str, tuple[int, Any]], inputs: Any, num_rounds: int, order: Random
) -> dict[str, list[float]]:
    """Seconds of each program in each round."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(NUM_WARM + num_rounds):
        for name in order.sample(list(programs), len(programs)):
            num_threads, call = programs[name]
            torch.set_num_threads(num_threads)
            start = time.perf_counter()
            call(*inputs)
            if number >= NUM_WARM:
                times[name].append(time.perf_counter() - start)
    return times
