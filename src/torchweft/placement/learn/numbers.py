"""`Numbers`: the facts of several problems as arrays, for policies that put them op by op at once.

    problems --Numbers--> arrays over (problem, op, device), scaled --Rollout--> placements

All seconds are divided by the problem's `scale`, its mean seconds an op, so that a policy sees the
same numbers for a graph of microseconds and for one of hours. Problems are padded to the largest:
each has `num_ops + 1` rows, the last of them a dummy that nothing needs. Arrays are flat over
problems: op `o` of problem `p` stands in row `p * width + o`. Edges stand by their source, one
behind the other, and the last is a dummy too. Devices come first, so that all arithmetic runs over
long rows of memory.

A graph that joins more than it forks, such as a tree that computes a sentence, is *turned*: it is
put from its end, last op first, so that whoever reads a value stands before its maker is put.
Transfers, ranks and tails are those of the turned graph. Backwards in time it takes as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchweft.placement.planners.lists import downward_ranks, mean_s, upward_ranks
from torchweft.placement.problem import INF, Matrix, Problem, heads, tails

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FORBIDDEN = np.float32(1e6)
"""Scaled seconds of an op on a device that may not run it."""
NUM_OP_FACTS, NUM_DEVICE_FACTS = 9, 5
NUM_FOLLOWERS = 8
"""A policy looks ahead to so many followers of an op, the most urgent ones."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Arrays by row (an op of a problem), by problem, or both; see the module."""

    problems: tuple[Problem, ...]
    width: int
    num_devices: int
    scale: Floats  # [problem]
    turned: Bools  # [problem]
    costs: Floats  # [2, device, row]: its seconds; the least that follows if it ended there
    ready_s: Floats  # [device, row]: inputs from outside
    rank_s: Floats  # [row]: mean seconds from its start to the end of the graph
    sent_s: Floats  # [row]: mean seconds of its largest value over a link
    behind_s: Floats  # [row]: least seconds of its followers and theirs, shared by who they read
    num_preds: Ints  # [row]
    least_s: Floats  # [row]: its seconds where it is fastest
    first: Ints  # [row]: its first edge; the row behind it has the next one's
    ahead: Ints  # [follower, row]: edges to its most urgent followers; the dummy: no more
    target: Ints  # [edge]: an op of the same problem; width - 1: none
    moved_s: Floats  # [target, source, edge]: seconds of the value between two devices
    follow_s: Floats  # [device, edge]: the follower's seconds and tail; none: far below 0
    devices: Bools  # [device, problem]: there is one
    op_facts: Floats  # [row, fact], for the encoder
    device_facts: Floats  # [problem, device, fact]
    edges: Ints  # [2, edge]: rows, the dummy left out

    @property
    def num_problems(self) -> int:
        """How many problems there are."""
        return len(self.problems)


def numbers_of(problems: Sequence[Problem]) -> Numbers:
    """The numbers of one or several problems."""
    count = len(problems)
    width = max(problem.num_ops for problem in problems) + 1
    num_devices = max(problem.num_devices for problem in problems)
    edges, rows = _edges(problems, width), count * width
    num_edges = edges.shape[1]
    num_succs = np.bincount(edges[0], minlength=rows)
    most = max(1, min(NUM_FOLLOWERS, int(num_succs.max())))
    made = Numbers(
        tuple(problems), width, num_devices,
        scale=np.ones(count, np.float32),
        turned=np.array([is_turned(problem) for problem in problems]),
        costs=np.full((2, num_devices, rows), FORBIDDEN, np.float32),
        ready_s=np.zeros((num_devices, rows), np.float32),
        rank_s=np.full(rows, -1.0, np.float32),
        sent_s=np.zeros(rows, np.float32),
        behind_s=np.zeros(rows, np.float32),
        num_preds=np.ones(rows, np.int64),
        least_s=np.zeros(rows, np.float32),
        first=np.concatenate(([0], num_succs.cumsum())),
        ahead=np.full((most, rows), num_edges, np.int64),
        target=np.append(edges[1] % width, width - 1),
        moved_s=np.zeros((num_devices, num_devices, num_edges + 1), np.float32),
        follow_s=np.full((num_devices, num_edges + 1), -FORBIDDEN, np.float32),
        devices=np.zeros((num_devices, count), np.bool_),
        op_facts=np.zeros((rows, NUM_OP_FACTS), np.float32),
        device_facts=np.zeros((count, num_devices, NUM_DEVICE_FACTS), np.float32),
        edges=edges,
    )  # fmt: skip
    for number, problem in enumerate(problems):
        _fill(made, number, problem)
    made.follow_s[:, :-1] = made.costs.sum(0)[:, edges[1]]
    return made


def is_turned(problem: Problem) -> bool:
    """Whether a problem is put from its end: more ops start it than end it."""
    return sum(not preds for preds in problem.preds) > sum(not succs for succs in problem.succs)


def _nexts(problem: Problem) -> Sequence[Sequence[tuple[int, Matrix]]]:
    """For each op what comes after it in the order of putting."""
    return problem.preds if is_turned(problem) else problem.succs


def _edges(problems: Sequence[Problem], width: int) -> Ints:
    pairs = [
        (number * width + source, number * width + target)
        for number, problem in enumerate(problems)
        for source, nexts in enumerate(_nexts(problem))
        for target, _ in nexts
    ]
    return np.array(pairs, np.int64).reshape(-1, 2).T.copy()


def _fill(made: Numbers, number: int, problem: Problem) -> None:
    """Write one problem into its rows and edges."""
    num_ops, num_devices = problem.num_ops, problem.num_devices
    at = number * made.width
    rows, devices = slice(at, at + num_ops), slice(0, num_devices)
    means = np.array(mean_s(problem))
    scale = float(means.mean()) or 1.0
    made.scale[number] = scale
    made.devices[devices, number] = True
    first = problem.succs if made.turned[number] else problem.preds
    made.num_preds[rows] = [len(others) for others in first]

    seconds = np.array(problem.seconds).T
    allowed = seconds < INF
    above, below = np.array(upward_ranks(problem)), np.array(downward_ranks(problem))
    if made.turned[number]:
        above, below = below + means, above - means
        tail_s = np.array(heads(problem)).T - np.where(allowed, seconds, 0)
    else:
        tail_s = np.array(tails(problem)).T
        made.ready_s[devices, rows] = np.array(problem.ready_s).T / scale
    made.costs[0, devices, rows] = np.where(allowed, seconds / scale, FORBIDDEN)
    made.costs[1, devices, rows] = np.where(allowed, tail_s / scale, 0)
    made.rank_s[rows] = above / scale
    usable = np.where(allowed, seconds / scale, np.nan)
    made.least_s[rows] = np.nanmin(usable, 0)
    made.sent_s[rows] = _fill_edges(made, at, problem) / scale
    made.behind_s[rows] = _behind(problem, made.least_s[rows].tolist())
    facts = (
        means / scale,
        made.least_s[rows],
        made.rank_s[rows],
        below / scale,
        made.sent_s[rows],
        made.num_preds[rows],
        np.diff(made.first)[rows],
        made.costs[1, devices, rows].mean(0),
        made.behind_s[rows],
    )
    made.op_facts[rows] = np.log1p(np.stack(facts, 1))
    speed = np.nanmean(np.where(allowed.any(axis=1, keepdims=True), usable, 1.0), 1)
    speed = np.maximum(speed, 1e-6)
    made.device_facts[number, devices] = np.stack(
        (
            np.log(speed / speed.min()),
            np.log(speed / speed.mean()),
            np.full(num_devices, 1 / num_devices),
            np.full(num_devices, np.log1p(made.sent_s[rows].mean())),
            np.full(num_devices, made.turned[number]),
        ),
        1,
    )


def _behind(problem: Problem, own_s: Sequence[float]) -> list[float]:
    """For each op the work that follows it: an op's own and all behind it are shared equally by
    those it reads. In a tree that is put from its root: the whole subtree below."""
    turned, behind_s = is_turned(problem), [0.0] * problem.num_ops
    readers, every = _nexts(problem), range(problem.num_ops)
    makers = problem.succs if turned else problem.preds
    for op in every if turned else reversed(every):
        behind_s[op] = sum((own_s[o] + behind_s[o]) / len(makers[o]) for o, _ in readers[op])
    return behind_s


def _fill_edges(made: Numbers, at: int, problem: Problem) -> Floats:
    """Write the edges of a problem whose rows start here; the mean seconds of each op's largest
    value over a link."""
    start, number = made.first[at], at // made.width
    moved = [seconds for nexts in _nexts(problem) for _, seconds in nexts]
    sent_s = np.zeros(problem.num_ops, np.float32)
    if not moved:
        return sent_s
    edges, devices = slice(start, start + len(moved)), slice(0, problem.num_devices)
    moved_s = np.array(moved)  # [edge, from, to]; of a turned problem: [edge, target, source]
    axes = (1, 2, 0) if made.turned[number] else (2, 1, 0)
    made.moved_s[devices, devices, edges] = moved_s.transpose(axes) / made.scale[number]
    pairs = max(1, problem.num_devices * (problem.num_devices - 1))
    sources = made.edges[0, edges] - at
    np.maximum.at(sent_s, sources, (moved_s.sum((1, 2)) / pairs).astype(np.float32))
    for row in range(at, at + problem.num_ops):
        ahead = list(range(made.first[row], made.first[row + 1]))
        if len(ahead) > NUM_FOLLOWERS:
            ahead.sort(key=lambda edge: -made.rank_s[at + made.target[edge]])
        made.ahead[: len(ahead), row] = ahead[:NUM_FOLLOWERS]
    return sent_s
