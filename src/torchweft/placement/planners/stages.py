"""Stages: consecutive ops on one device, the next ones on the next device, as pipelines are cut.

    ops in order     a b c | d e | f g h i
    devices          fast    mid   slow            each value crosses few borders

Devices take their turn from the fastest on. A device gets ops while they fit into its memory and
while its load is below a limit; the least limit that places all ops, and that no link exceeds, is
found by bisection. Without a limit only memory makes a cut. Both are tried, in program order and by
rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from torchweft.placement.draft import OpenDevices, pack, period_s
from torchweft.placement.placement import Placement, best
from torchweft.placement.planners.lists import (
    critical_path,
    guard,
    put_all_on,
    ranked,
    upward_ranks,
)
from torchweft.placement.problem import INF, Problem

NUM_HALVINGS = 12
STAGES_S = 1.5e-4
"""About what `stages` takes for an op."""


def stages(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """The best of the cuts into consecutive stages; where there is none, what `pack` finds."""
    order = ranked(problem, upward_ranks(problem))
    assignments = list(cuts(problem, order)) or [pack(problem)]
    return best(put_all_on(problem, order, devices) for devices in assignments)


def cuts(problem: Problem, order: Sequence[int]) -> Iterator[list[int]]:
    """The assignment without a limit, and that of the least limit: in this order, and by index."""
    turns = _turns(problem)
    for by_index in (False, True):
        ops = range(problem.num_ops) if by_index else order
        loose = _cut(problem, ops, turns, INF)
        if loose is None:
            continue
        yield loose
        low_s, high_s, least = 0.0, period_s(problem, loose), None
        for _ in range(NUM_HALVINGS):
            middle_s = (low_s + high_s) / 2
            tried = _cut(problem, ops, turns, middle_s)
            tried_s = INF if tried is None else period_s(problem, tried)
            if tried_s > middle_s:  # or a link has too much
                low_s = middle_s
            else:
                least, high_s = tried, tried_s
        if least is not None:
            yield least


def _turns(problem: Problem) -> list[int]:
    """The devices, the fastest first; one that cannot run everything counts by what it can."""

    def mean_s(device: int) -> float:
        finite = [row[device] for row in problem.seconds if row[device] < INF]
        return sum(finite) / max(1, len(finite))

    return sorted(range(problem.num_devices), key=lambda d: (mean_s(d), d))


def _cut(
    problem: Problem, order: Sequence[int], turns: Sequence[int], limit_s: float
) -> list[int] | None:
    """An assignment in which no device is busy for longer than the limit; None if there is none.

    An op that the current device cannot run goes to the first that can, beside the stages.
    """
    room, busy_s, at = OpenDevices(problem), [0.0] * problem.num_devices, 0
    for op in order:
        group = problem.group[op]
        if group[0] in room.group_device:
            continue
        open_devices = room.open(op)
        more_s = {d: sum(problem.seconds[item][d] for item in group) for d in open_devices}
        usable = [d for d in open_devices if busy_s[d] + more_s[d] <= limit_s]
        while at < len(turns) and turns[at] in problem.allowed[op] and turns[at] not in usable:
            at += 1
        beside = [d for d in turns[at:] if d in usable]
        if not beside:
            return None
        room.take(op, beside[0])
        busy_s[beside[0]] += more_s[beside[0]]
    return room.devices


def wants_stages(problem: Problem) -> bool:
    """Whether stages may be better than lists: for streams, memory limits and groups."""
    return problem.objective == "throughput" or not problem.free


def best_quick(problem: Problem, ends_s: float = INF) -> Placement:
    """The best placement of the quick planners: where a search begins.

    Single, heft and peft are always among them; the others only before `ends_s` on the clock.
    """
    placements = [guard(problem)]
    if time.perf_counter() < ends_s:
        placements.append(critical_path(problem))
    if wants_stages(problem) and time.perf_counter() + STAGES_S * problem.num_ops < ends_s:
        placements.append(stages(problem))
    return best(placements)
