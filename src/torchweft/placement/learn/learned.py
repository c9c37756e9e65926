"""The learned planners: what a policy makes of a problem.

    learned    one pass, no search: the policy's first choice at every step
    guarded    the same, or the best of single, heft and peft where they are better
    guided     passes with drawn choices and annealing from the best of all, until the deadline

`guarded` and `guided` are never worse than the best of single, heft and peft. Without a policy
of your own, the one that comes with the package is used.
"""

from __future__ import annotations

import time
from functools import cache, partial, update_wrapper
from pathlib import Path

import numpy as np

from torchweft.placement.learn.policy import Policy, Scorer, masked
from torchweft.placement.learn.rollout import Bools, Ints, Numbers, Observed, Rollout, numbers_of
from torchweft.placement.placement import OpenDevices, Placement, best, pack, placed
from torchweft.placement.planners.annealing import annealing
from torchweft.placement.planners.lists import (
    best_quick,
    cuts,
    guard,
    put_all_on,
    ranked,
    upward_ranks,
)
from torchweft.placement.planners.planner import Planner
from torchweft.placement.problem import Problem

POLICIES = Path(__file__).parent / "policies"
NUM_TRIES = 16
SEARCH_S = 0.1
DRAWN_SHARE = 0.3
"""Of the time of a guided search: for drawn passes; the rest is annealing."""


@cache
def default_policy() -> Policy:
    """The policy that planners take without one of the user's own."""
    return Policy.load(POLICIES / "seed0.safetensors")


def learned(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    policy: Policy | None = None,
) -> Placement:
    """One pass of a policy over the problem."""
    numbers = numbers_of([problem])
    return one_pass(problem, numbers, Scorer(policy or default_policy(), numbers))


def guarded(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    policy: Policy | None = None,
) -> Placement:
    """One pass of a policy, or the best of single, heft and peft."""
    return best([learned(problem, policy=policy), guard(problem)])


def guided(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    policy: Policy | None = None,
) -> Placement:
    """A search that a policy guides; without a deadline a tenth of a second."""
    began_s, budget_s = time.perf_counter(), SEARCH_S if deadline_s is None else deadline_s
    numbers = numbers_of([problem])
    scorer = Scorer(policy or default_policy(), numbers)
    known = best([one_pass(problem, numbers, scorer), best_quick(problem, began_s + budget_s)])
    draw = np.random.default_rng(seed)
    free = not problem.limited and not problem.together
    last_s = time.perf_counter() - began_s
    while free and time.perf_counter() - began_s + last_s < DRAWN_SHARE * budget_s:
        turn_s = time.perf_counter()
        known = best([known, drawn_passes(problem, numbers, scorer, draw)])
        last_s = time.perf_counter() - turn_s
    left_s = budget_s - (time.perf_counter() - began_s)
    return annealing(problem, deadline_s=left_s, seed=seed, start=known) if left_s > 0 else known


def planner_of(policy: Policy, planner: Planner = learned) -> Planner:
    """A planner of this file with a policy of the user's own."""

    return update_wrapper(partial(planner, policy=policy), planner)  # type: ignore[call-arg]


def one_pass(problem: Problem, numbers: Numbers, scorer: Scorer) -> Placement:
    """The placement by the best-scored pair at every step, within memory and groups."""
    rollout = Rollout(numbers)
    room = OpenDevices(problem) if problem.limited or problem.together else None
    while rollout.going:
        seen = rollout.look()
        scores = scorer(rollout, seen)
        if room is not None:
            mask = seen.mask & with_room(room, seen, numbers.num_devices)
            if not mask.any():
                order = ranked(problem, upward_ranks(problem))
                return put_all_on(problem, order, pack(problem))
            scores = masked(scores.reshape(mask.shape), mask)
        rollout.put(scores.argmax(1))
        if room is not None:
            room.take(int(rollout.order[-1][0]), int(rollout.device[-1][0]))
    return _of_try(problem, rollout, 0)


def drawn_passes(
    problem: Problem, numbers: Numbers, scorer: Scorer, draw: np.random.Generator
) -> Placement:
    """The best of several passes whose choices are drawn by their scores."""
    rollout = Rollout(numbers, NUM_TRIES)
    while rollout.going:
        scores = scorer(rollout, rollout.look())
        rollout.put((scores + draw.gumbel(size=scores.shape)).argmax(1))
    return _of_try(problem, rollout, int(rollout.end_s.argmin()))


def with_room(room: OpenDevices, seen: Observed, num_devices: int) -> Bools:
    """Which pairs of a single try have room for the op and its group [1, candidate, device]."""
    mask = np.zeros((1, seen.ops.shape[1], num_devices), np.bool_)
    for at, op in enumerate(seen.ops[0].tolist()):
        mask[0, at, list(room.open(op))] = True
    return mask


def _of_try(problem: Problem, rollout: Rollout, number: int) -> Placement:
    """The placement of a try: as it was put, or with gaps filled if that is better. For a stream
    the order counts more than the devices: consecutive ops may be better on one device."""
    order, devices = orders(rollout, number)
    placements = [placed(problem, devices, order), put_all_on(problem, order, devices)]
    if problem.objective == "throughput":
        placements += [put_all_on(problem, order, cut) for cut in cuts(problem, order)]
    return best(placements)


def orders(rollout: Rollout, number: int) -> tuple[list[int], list[int]]:
    """The order in which a try's ops run, and the device of each op."""
    steps: Ints = np.stack(rollout.order)[:, number]
    where: Ints = np.stack(rollout.device)[:, number]
    of, num_ops = rollout.problem[number], rollout.num_ops[number]
    order = steps[:num_ops].tolist()  # what is put behind them is the dummy
    devices = [0] * num_ops
    for op, device in zip(order, where[:num_ops].tolist(), strict=True):
        devices[op] = device
    return order[::-1] if rollout.numbers.turned[of] else order, devices
