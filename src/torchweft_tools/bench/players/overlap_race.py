"""A race: several programs on several ranks, in turn, in a random order each round.

    times = race(runs, order=Random(0), num_rounds=30, num_calls=1, group=side)
    times["sequential"]      seconds of one call in each round, of the slower rank

    sound_race(runs, ("eager", "eager_again"), ...)      again and again, until they are equal

Ranks meet at a barrier before each run. They exchange their times after each round, on a group of
their own, so that no program finds the link in use. Every rank draws the same orders.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio

Call = Callable[[Tensor], Tensor]
Run = Callable[[], Tensor]
"""A call with its input. Inputs are not shared: a compiler may mark the tensor it is given, and
the next one, given the same tensor, would recompile."""
MIN_RUN_S = 0.12
MAX_CALLS, NUM_RACES = 50, 3


def race(
    runs: Mapping[str, Run],
    *,
    order: Random,
    num_rounds: int,
    num_calls: int,
    group: dist.ProcessGroup,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of one call, by program and round."""
    names = list(runs)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for _ in range(num_rounds):
            seen = {}
            for name in order.sample(names, len(names)):
                seen[name] = _run_s(runs[name], num_calls, group)
            slower = torch.tensor([seen[name] for name in names], dtype=torch.float64)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX, group=group)
            for name, run_s in zip(names, slower.tolist(), strict=True):
                times[name].append(run_s / num_calls)
            on_round()
    finally:
        gc.enable()
    return times


def sound_race(
    runs: Mapping[str, Run], control: tuple[str, str], *, order: Random, num_rounds: int, group: Any
) -> dict[str, list[float]]:
    """A race in which one program is there twice; it is run again, with twice as many calls a run,
    as long as these two differ; three races at most."""
    num_calls = calls_of_a_run(runs[control[0]], group)
    for repeat in range(NUM_RACES):
        each = num_calls << repeat
        times = race(runs, order=order, num_rounds=num_rounds, num_calls=each, group=group)
        pairs = zip(*(times[name] for name in control), strict=True)
        if num_rounds < MIN_PAIRS or ratio([a / b for a, b in pairs]).is_even:
            break
    return times


def calls_of_a_run(run: Run, group: dist.ProcessGroup) -> int:
    """How many calls make a run long enough to time; the ranks agree on it."""
    call_s = torch.tensor(_run_s(run, 1, group), dtype=torch.float64)
    dist.all_reduce(call_s, op=dist.ReduceOp.MAX, group=group)
    return max(1, min(MAX_CALLS, round(MIN_RUN_S / call_s.item())))


def _run_s(run: Run, num_calls: int, group: dist.ProcessGroup) -> float:
    dist.barrier(group=group)
    start = time.perf_counter()
    for _ in range(num_calls):
        run()
    return time.perf_counter() - start
