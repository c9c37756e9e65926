"""The bench of the verifier: random plans, judged by the oracle and by `verify`, side by side.

    case(seed, index) -> plans --oracle--> safe?      both agree, or there is a disagreement,
                               --verify--> accepted?  which its numbers draw again

About half of the plans are safe; the others are safe plans with one or two mutations. A *false
accept* is an unsafe plan without findings, a *false reject* a safe plan with some.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

from torchweft.plan.graph import graph_data
from torchweft.plan.plan import Plan
from torchweft_tools.bench.cases.mutations import MUTATIONS, mutate
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.bench.cases.random_plans import random_pair, random_plan
from torchweft_tools.bench.oracle import by_closure, judge

Row = dict[str, Any]
CHUNK = 100
MAX_STATES = 600
COUNTS = ("plans", "safe", "false_accepts", "false_rejects", "mutations", "mutations_missed")


@dataclass(frozen=True)
class JudgedCase:
    """Plans to judge, one a rank, and which mutation made them (None: meant to be safe)."""

    plans: list[Plan]
    mutation: str | None


def case(seed: int, index: int) -> list[Plan]:
    """The plans of one case of the bench, drawn again from its numbers."""
    return draw(seed, index).plans


def draw(seed: int, index: int) -> JudgedCase:
    """One case of the bench: even ones are safe, odd ones unsafe where the draw allows it."""
    rng = Random(f"{seed}/{index}")
    kind = rng.choice(list(MUTATIONS))
    if index % 2 == 0:
        plans = _plans(rng, pair=rng.random() < 0.2)
        changed = mutate(rng, plans, MUTATIONS[kind], draws=1) if rng.random() < 0.4 else None
        return JudgedCase(changed if changed is not None and by_closure(changed) else plans, None)
    for _ in range(8):
        plans = _plans(rng, pair=rng.random() < (0.9 if kind == "swap_collectives" else 0.15))
        if rng.random() < 0.1:
            plans = mutate(rng, plans, MUTATIONS["scramble"], draws=1) or plans
        changed = mutate(rng, plans, MUTATIONS[kind])
        if changed is not None and not by_closure(changed):
            return JudgedCase(changed, kind)
    return JudgedCase(plans, None)


def _plans(rng: Random, *, pair: bool) -> list[Plan]:
    if pair:
        return random_pair(rng)
    large = rng.random() < 0.05
    return [random_plan(rng, random_graph(rng, num_ops=rng.randint(7, 12) if large else None))]


def run(
    *,
    num_plans: int = 20_000,
    seed: int = 0,
    workers: int | None = None,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Row], Row]:
    """Rows (by kind of plan, by mutation, disagreements, times) and their summary.

    num_plans: random plans to judge.
    seed: the random seed.
    workers: processes that judge; by default one for each core.
    quick: 200 plans, to see that everything runs.
    """
    num_plans = 200 if quick else num_plans
    began = time.perf_counter()
    rows: list[Row] = []
    for number, row in enumerate(_judged(num_plans, seed, workers), 1):
        rows.append(row)
        if progress is not None:
            progress(number, num_plans)
    judged_s = time.perf_counter() - began
    summary: Row = {name: sum(row[name] for row in rows) for name in COUNTS}
    summary["plan_s"] = plan_s()
    times = {"row": "time", "judged_s": judged_s, "plan_s": summary["plan_s"]}
    disagreements = [row["case"] for row in rows if row["case"] is not None]
    return [*_grouped(rows), *disagreements, times], summary


def _judged(num_plans: int, seed: int, workers: int | None) -> Iterator[Row]:
    chunks = [range(at, min(at + CHUNK, num_plans)) for at in range(0, num_plans, CHUNK)]
    workers = workers if workers is not None else os.cpu_count() or 1
    if workers <= 1:
        for chunk in chunks:
            yield from _judge_all(seed, chunk)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for rows in pool.map(_judge_all, [seed] * len(chunks), chunks):
            yield from rows


def _judge_all(seed: int, indices: Iterable[int]) -> list[Row]:
    return [_judge(seed, index) for index in indices]


def _judge(seed: int, index: int) -> Row:
    """What the oracle and the verifier say of one case."""
    from torchweft.plan.verify import findings_ranks

    drawn = draw(seed, index)
    safe, reason, method = judge(drawn.plans, max_states=MAX_STATES)
    try:
        findings = [str(finding) for finding in findings_ranks(drawn.plans)]
    except Exception as error:  # a verifier that crashes does not accept; the row shows it
        findings = [f"{type(error).__name__}: {error}"]
        crashed = True
    else:
        crashed = False
    unsafe_by_mutation = drawn.mutation is not None and not safe
    row: Row = {
        "method": method,
        "ranks": len(drawn.plans),
        "lanes": len(drawn.plans[0].lanes),
        "mutation": drawn.mutation or "none",
        "plans": 1,
        "safe": int(safe),
        "false_accepts": int(not safe and not findings),
        "false_rejects": int(safe and bool(findings)),
        "mutations": int(unsafe_by_mutation),
        "mutations_missed": int(unsafe_by_mutation and not findings),
        "case": None,
    }
    if safe == bool(findings) or crashed or safe != by_closure(drawn.plans):
        row["case"] = {
            "row": "disagreement",
            "seed": seed,
            "index": index,
            "mutation": drawn.mutation,
            "oracle": "safe" if safe else reason,
            "verify": findings[:3],
            "graphs": [graph_data(plan.graph) for plan in drawn.plans],
            "plans": [str(plan) for plan in drawn.plans],
        }
    return row


def _grouped(rows: list[Row]) -> list[Row]:
    """One row for each method, number of ranks, number of lanes, and mutation."""
    grouped: list[Row] = []
    for name in ("method", "ranks", "lanes", "mutation"):
        groups: dict[Any, Counter[str]] = {}
        for row in rows:
            counts = groups.setdefault(row[name], Counter())
            counts.update({count: row[count] for count in COUNTS})
        for value, counts in sorted(groups.items()):
            grouped.append({"row": name, name: value, **{count: counts[count] for count in COUNTS}})
    return grouped


def plan_s(repeats: int = 5) -> float:
    """Median seconds to write, lower and verify an overlapped 80-layer transformer."""
    from torchweft.plan import machine
    from torchweft.plan.context import Context
    from torchweft.plan.lower.lower import lower
    from torchweft.plan.strategies import get_strategy
    from torchweft.plan.verify import verify
    from torchweft.plan.write.strategy import write
    from torchweft_tools.demo.blueprint import transformer

    graph, context, cpu = transformer(80), Context(batch=4096), machine.cpu()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        verify(lower(write(get_strategy("overlap")(parts=2), graph, context, cpu)))
        times.append(time.perf_counter() - began)
    return statistics.median(times)
