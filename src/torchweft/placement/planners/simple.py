"""The simplest planners: what any other one has to beat.

single, round_robin, random_devices and greedy all put ops in program order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from torchweft.placement.draft import Draft
from torchweft.placement.placement import Placement, placed
from torchweft.placement.planners.lists import put_all
from torchweft.placement.problem import Problem


def single(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """All ops on the best single device; where no device can take them all, each op goes to the
    best of the devices that can, filled in turn by how fast they are."""
    order = range(problem.num_ops)
    need = sum(hold.num_bytes for hold in problem.holds)
    found = [
        placed(problem, [device] * problem.num_ops, order)
        for device, room in enumerate(problem.room_bytes)
        if need <= room and all(device in devices for devices in problem.allowed)
    ]
    if found:
        return min(found, key=lambda item: item.score_s)
    total_s = [sum(row[d] for row in problem.seconds) for d in range(problem.num_devices)]
    fast = sorted(range(problem.num_devices), key=lambda d: total_s[d])
    return put_all(problem, order, _take(lambda op, devices: min(devices, key=fast.index)))


def round_robin(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Each op on the next device that can take it."""
    every = problem.num_devices
    return put_all(
        problem,
        range(problem.num_ops),
        _take(lambda op, devices: min(devices, key=lambda d: (d - op) % every)),
    )


def random_devices(
    problem: Problem, *, deadline_s: float | None = None, seed: int = 0
) -> Placement:
    """Each op on any device that can take it; equal seeds, equal placements."""
    draw = random.Random(seed)
    return put_all(
        problem, range(problem.num_ops), _take(lambda op, devices: draw.choice(list(devices)))
    )


def greedy(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Earliest finish time in program order."""
    return put_all(problem, range(problem.num_ops))


def _take(
    pick: Callable[[int, Sequence[int]], int],
) -> Callable[[Draft, int, Sequence[int]], tuple[int, float]]:
    """A device that does not depend on times, and the earliest start there."""

    def choose(draft: Draft, op: int, devices: Sequence[int]) -> tuple[int, float]:
        device = pick(op, devices)
        return device, draft.begin_s(op, device)

    return choose
