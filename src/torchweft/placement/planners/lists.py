"""List planners: rank all ops once, then put them in that order, each where it looks best.

    heft           rank: mean seconds to the end of the graph; device: where it ends first
    cpop           the critical path on the device that is fastest for it; the rest as heft
    peft           rank and device by the optimistic cost table (`tails`): end here + what follows
    critical_path  rank: least seconds to the end, transfers left out; behind what is there, no gaps

Topcuoglu et al. 2002 (HEFT, CPOP), Arabnejad and Barbosa 2014 (PEFT). Where memory runs out for an
op, the same order is put on devices that `pack` found. The first op of a group decides for all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from torchweft.placement.bounds import tails
from torchweft.placement.draft import Draft, pack
from torchweft.placement.placement import Placement, finished
from torchweft.placement.problem import INF, Matrix, Problem

Choose = Callable[[Draft, int, Sequence[int]], tuple[int, float]]  # device, start


def best_of(
    draft: Draft,
    op: int,
    devices: Sequence[int],
    behind: Sequence[float] = (),
    *,
    gaps: bool = True,
) -> tuple[int, float]:
    """The device where the op ends first, what is `behind` it counted, and its start there.

    The first op of a group decides for all of it: the others' seconds there count too.
    """
    seconds, others = draft.problem.seconds[op], draft.problem.others_s[op]
    best, best_s = (-1, 0.0), INF
    for device in devices:
        if gaps:
            start_s = draft.begin_s(op, device)
        else:
            start_s = max(draft.free_s(device), draft.ready_s(op, device))
        score_s = start_s + seconds[device]
        if behind:
            score_s += behind[device]
        if others and len(devices) > 1:
            score_s += others[device]
        if score_s < best_s:
            best, best_s = (device, start_s), score_s
    return best


def put_all(problem: Problem, order: Sequence[int], choose: Choose = best_of) -> Placement:
    """The placement of the ops put in this order, where `choose` says.

    Raises `PlacementError` if there is no room for them.
    """
    draft = Draft(problem)
    for op in order:
        devices = draft.open(op)
        if not devices:
            return put_all_on(problem, order, pack(problem))
        draft.put(op, *choose(draft, op, devices))
    return finished(draft)


def put_all_on(problem: Problem, order: Sequence[int], devices: Sequence[int]) -> Placement:
    """The placement of the ops put in this order on given devices, in gaps where they fit."""
    draft = Draft(problem)
    for op in order:
        draft.put(op, devices[op])
    return finished(draft)


def ranked(problem: Problem, rank: Sequence[float]) -> list[int]:
    """The ops by rank, the highest first, none before what it reads."""
    waiting = [len(preds) for preds in problem.preds]
    ready = [(-rank[op], op) for op, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, op = heapq.heappop(ready)
        order.append(op)
        for target, _ in problem.succs[op]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (-rank[target], target))
    return order


def mean_transfer_s(problem: Problem, seconds: Matrix) -> float:
    """The mean over all pairs of devices, a device and itself included."""
    return sum(map(sum, seconds)) / problem.num_devices**2


def mean_s(problem: Problem) -> list[float]:
    """The mean seconds of each op over the devices that may run it."""
    return [
        sum(row[d] for d in problem.allowed[op]) / len(problem.allowed[op])
        for op, row in enumerate(problem.seconds)
    ]


class _Means:
    """Mean transfers by matrix, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.known = problem, dict[int, float]()

    def of(self, seconds: Matrix) -> float:
        if id(seconds) not in self.known:
            self.known[id(seconds)] = mean_transfer_s(self.problem, seconds)
        return self.known[id(seconds)]


def upward_ranks(problem: Problem) -> list[float]:
    """Mean seconds from the start of each op to the end of the graph."""
    means, own = _Means(problem), mean_s(problem)
    rank = [0.0] * problem.num_ops
    for op in reversed(range(problem.num_ops)):
        behind = [means.of(seconds) + rank[target] for target, seconds in problem.succs[op]]
        rank[op] = own[op] + max(behind, default=0.0)
    return rank


def downward_ranks(problem: Problem) -> list[float]:
    """Mean seconds from the start of the graph to the start of each op."""
    means, own = _Means(problem), mean_s(problem)
    rank = [0.0] * problem.num_ops
    for op in range(problem.num_ops):
        before = [rank[u] + own[u] + means.of(seconds) for u, seconds in problem.preds[op]]
        rank[op] = max(before, default=0.0)
    return rank


def heft(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Heterogeneous earliest finish time, with insertion."""
    return put_all(problem, ranked(problem, upward_ranks(problem)))


def peft(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Predict earliest finish time: the end here and the least that must follow it count."""
    table = tails(problem)
    every = problem.num_devices

    def choose(draft: Draft, op: int, devices: Sequence[int]) -> tuple[int, float]:
        return best_of(draft, op, devices, table[op])

    return put_all(problem, ranked(problem, [sum(row) / every for row in table]), choose)


def cpop(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Critical path on a processor."""
    up, down = upward_ranks(problem), downward_ranks(problem)
    priority = [above + below for above, below in zip(up, down, strict=True)]
    longest = max(priority)
    op = next(op for op in range(problem.num_ops) if priority[op] >= longest * (1 - 1e-9))
    path = [op]
    while problem.succs[op]:
        op = max((target for target, _ in problem.succs[op]), key=lambda item: priority[item])
        path.append(op)
    total_s = [sum(problem.seconds[op][d] for op in path) for d in range(problem.num_devices)]
    best, on_path = total_s.index(min(total_s)), set(path)

    def choose(draft: Draft, op: int, devices: Sequence[int]) -> tuple[int, float]:
        if op in on_path and best in devices:
            return best, draft.begin_s(op, best)
        return best_of(draft, op, devices)

    return put_all(problem, ranked(problem, priority), choose)


def critical_path(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """List planning by the least seconds to the end: of all ready ops the most urgent one goes to
    the device that ends it first; nothing is put into gaps."""
    least = [min(row[d] for d in problem.allowed[op]) for op, row in enumerate(problem.seconds)]
    rank = [0.0] * problem.num_ops
    for op in reversed(range(problem.num_ops)):
        rank[op] = least[op] + max((rank[target] for target, _ in problem.succs[op]), default=0.0)

    def choose(draft: Draft, op: int, devices: Sequence[int]) -> tuple[int, float]:
        return best_of(draft, op, devices, gaps=False)

    return put_all(problem, ranked(problem, rank), choose)
