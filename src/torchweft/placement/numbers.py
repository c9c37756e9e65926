"""`Numbers`: the facts of several problems as arrays, for policies that put them op by op at once.

    problems --Numbers--> arrays over (problem, op, device), scaled --Rollout--> placements

All seconds are divided by the problem's `scale`, its mean seconds an op, so that a policy sees the
same numbers for a graph of microseconds and for one of hours. Problems are padded to the largest:
each has `num_ops + 1` rows, the last of them a dummy that nothing needs, and each op as many
followers. Arrays are flat over problems: op `o` of problem `p` stands in row `p * width + o`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchweft.placement.bounds import tails
from torchweft.placement.lists import downward_ranks, mean_s, upward_ranks
from torchweft.placement.problem import INF, Problem

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FORBIDDEN = np.float32(1e6)
"""Scaled seconds of an op on a device that may not run it."""
NUM_OP_FACTS, NUM_DEVICE_FACTS = 8, 4


@dataclass(frozen=True, eq=False)
class Numbers:
    """Arrays by row (an op of a problem), by problem, or both; see the module."""

    problems: tuple[Problem, ...]
    width: int
    num_devices: int
    scale: Floats  # [problem]
    seconds: Floats  # [row, device]
    ready_s: Floats  # [row, device]: inputs from outside
    tail_s: Floats  # [row, device]: the least that follows an op that ended there
    rank_s: Floats  # [row]: mean seconds from its start to the end of the graph
    sent_s: Floats  # [row]: mean seconds of its largest value over a link
    allowed: Bools  # [row, device]
    num_preds: Ints  # [row]
    least_s: Floats  # [row]: its seconds where it is fastest
    regret_s: Floats  # [row, device]: its seconds beyond that
    succs: Ints  # [row, follower]: an op of the same problem; width - 1: none
    moved_s: Floats  # [row, follower, source, target]: seconds of what it makes for the follower
    follow_s: Floats  # [row, follower, device]: the follower's seconds and tail; none: far below 0
    devices: Bools  # [problem, device]: there is one
    op_facts: Floats  # [row, fact], for the encoder
    device_facts: Floats  # [problem, device, fact]
    edges: Ints  # [2, edge]: rows

    @property
    def num_problems(self) -> int:
        """How many problems there are."""
        return len(self.problems)


def numbers_of(problems: Sequence[Problem]) -> Numbers:
    """The numbers of one or several problems."""
    count = len(problems)
    width = max(problem.num_ops for problem in problems) + 1
    num_devices = max(problem.num_devices for problem in problems)
    most = max(1, max(len(succs) for problem in problems for succs in problem.succs))
    rows = count * width
    made = Numbers(
        tuple(problems), width, num_devices,
        scale=np.ones(count, np.float32),
        seconds=np.full((rows, num_devices), FORBIDDEN, np.float32),
        ready_s=np.full((rows, num_devices), FORBIDDEN, np.float32),
        tail_s=np.zeros((rows, num_devices), np.float32),
        rank_s=np.full(rows, -1.0, np.float32),
        sent_s=np.zeros(rows, np.float32),
        allowed=np.zeros((rows, num_devices), np.bool_),
        num_preds=np.ones(rows, np.int64),
        succs=np.full((rows, most), width - 1, np.int64),
        least_s=np.zeros(rows, np.float32),
        regret_s=np.full((rows, num_devices), FORBIDDEN, np.float32),
        moved_s=np.zeros((rows, most, num_devices, num_devices), np.float32),
        follow_s=np.full((rows, most, num_devices), -FORBIDDEN, np.float32),
        devices=np.zeros((count, num_devices), np.bool_),
        op_facts=np.zeros((rows, NUM_OP_FACTS), np.float32),
        device_facts=np.zeros((count, num_devices, NUM_DEVICE_FACTS), np.float32),
        edges=_edges(problems, width),
    )  # fmt: skip
    for number, problem in enumerate(problems):
        _fill(made, number, problem)
    return made


def _edges(problems: Sequence[Problem], width: int) -> Ints:
    found = [
        (number * width + source, number * width + target)
        for number, problem in enumerate(problems)
        for source, succs in enumerate(problem.succs)
        for target, _ in succs
    ]
    return np.array(found, np.int64).reshape(-1, 2).T.copy()


def _fill(made: Numbers, number: int, problem: Problem) -> None:
    """Write one problem into its rows."""
    num_ops, num_devices = problem.num_ops, problem.num_devices
    first = number * made.width
    rows, devices = slice(first, first + num_ops), slice(0, num_devices)
    means = np.array(mean_s(problem))
    scale = float(means.mean()) or 1.0
    made.scale[number] = scale
    made.devices[number, devices] = True
    made.num_preds[rows] = [len(preds) for preds in problem.preds]

    seconds = np.array(problem.seconds)
    allowed = seconds < INF
    made.allowed[rows, devices] = allowed
    made.seconds[rows, devices] = np.where(allowed, seconds / scale, FORBIDDEN)
    made.ready_s[rows, devices] = np.array(problem.ready_s) / scale
    made.tail_s[rows, devices] = np.array(tails(problem)) / scale
    made.rank_s[rows] = np.array(upward_ranks(problem)) / scale
    usable = np.where(allowed, seconds / scale, np.nan)
    made.least_s[rows] = np.nanmin(usable, 1)
    made.regret_s[rows, devices] = made.seconds[rows, devices] - made.least_s[rows, None]
    total_s = made.seconds[rows] + made.tail_s[rows]
    pairs = max(1, num_devices * (num_devices - 1))
    for op, succs in enumerate(problem.succs):
        for at, (target, moved_s) in enumerate(succs):
            made.succs[first + op, at] = target
            made.moved_s[first + op, at, devices, devices] = np.array(moved_s) / scale
            made.follow_s[first + op, at] = total_s[target]
    made.sent_s[rows] = (made.moved_s[rows].sum((2, 3)) / pairs).max(1)
    facts = (
        means / scale,
        made.least_s[rows],
        made.rank_s[rows],
        np.array(downward_ranks(problem)) / scale,
        made.sent_s[rows],
        made.num_preds[rows],
        (made.succs[rows] < made.width - 1).sum(1),
        made.tail_s[rows, devices].mean(1),
    )
    made.op_facts[rows] = np.log1p(np.stack(facts, 1))
    speed = np.nanmean(np.where(allowed.any(0), usable, 1.0), 0)
    speed = np.maximum(speed, 1e-6)
    made.device_facts[number, devices] = np.stack(
        (
            np.log(speed / speed.min()),
            np.log(speed / speed.mean()),
            np.full(num_devices, 1 / num_devices),
            np.full(num_devices, np.log1p(made.sent_s[rows].mean())),
        ),
        1,
    )
