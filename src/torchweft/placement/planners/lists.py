"""List planners: order all ops once, then put them one by one, each where it looks best.

    single, round_robin, random_devices      program order; what any other planner has to beat
    greedy         program order; device: where it ends first
    heft           rank: mean seconds to the end of the graph; device: where it ends first
    cpop           the critical path on the device that is fastest for it; the rest as heft
    peft           rank and device by the optimistic cost table (`tails`): end here + what follows
    critical_path  rank: least seconds to the end, transfers left out; behind what is there, no gaps
    stages         consecutive ops on one device, the next on the next, as pipelines are cut

Topcuoglu et al. 2002 (HEFT, CPOP), Arabnejad and Barbosa 2014 (PEFT). Where memory runs out for an
op, the same order is put on devices that `pack` found. The first op of a group decides for all.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from torchweft.placement.placement import (
    Draft,
    OpenDevices,
    Placement,
    best,
    finished,
    pack,
    period_s,
    placed,
)
from torchweft.placement.problem import INF, Problem, tails

NUM_HALVINGS = 12
STAGES_S = 1.5e-4
"""About what `stages` takes for an op."""
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
    chosen, best_s = (-1, 0.0), INF
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
            chosen, best_s = (device, start_s), score_s
    return chosen


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


def mean_s(problem: Problem) -> list[float]:
    """The mean seconds of each op over the devices that may run it."""
    return [
        sum(row[d] for d in problem.allowed[op]) / len(problem.allowed[op])
        for op, row in enumerate(problem.seconds)
    ]


def _mean_transfers(problem: Problem) -> dict[int, float]:
    """The mean of each transfer matrix over all pairs of devices, a device and itself included, by
    the matrix's id."""
    matrices = {id(seconds): seconds for preds in problem.preds for _, seconds in preds}
    pairs = problem.num_devices**2
    return {key: sum(map(sum, seconds)) / pairs for key, seconds in matrices.items()}


def upward_ranks(problem: Problem) -> list[float]:
    """Mean seconds from the start of each op to the end of the graph."""
    return _to_end_s(problem, mean_s(problem), _mean_transfers(problem))


def _to_end_s(
    problem: Problem, own_s: Sequence[float], transfer_s: Mapping[int, float]
) -> list[float]:
    """Seconds of the longest way from the start of each op to the end of the graph, by the seconds
    of the ops and of the transfer matrices (by their ids; none: 0)."""
    to_end_s = [0.0] * problem.num_ops
    for op in reversed(range(problem.num_ops)):
        ways = [
            transfer_s.get(id(way), 0.0) + to_end_s[target] for target, way in problem.succs[op]
        ]
        to_end_s[op] = own_s[op] + max(ways, default=0.0)
    return to_end_s


def downward_ranks(problem: Problem) -> list[float]:
    """Mean seconds from the start of the graph to the start of each op."""
    transfer_s, own = _mean_transfers(problem), mean_s(problem)
    rank = [0.0] * problem.num_ops
    for op in range(problem.num_ops):
        before = [rank[u] + own[u] + transfer_s[id(way)] for u, way in problem.preds[op]]
        rank[op] = max(before, default=0.0)
    return rank


def single(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """All ops on the best single device; where no device can take them all, each op goes to the
    best of the devices that can, filled in turn by how fast they are."""
    order = range(problem.num_ops)
    need = sum(hold.num_bytes for hold in problem.holds)
    placements = [
        placed(problem, [device] * problem.num_ops, order)
        for device, room in enumerate(problem.room_bytes)
        if need <= room and all(device in devices for devices in problem.allowed)
    ]
    if placements:
        return best(placements)
    total_s = [sum(row[d] for row in problem.seconds) for d in range(problem.num_devices)]
    fast = sorted(range(problem.num_devices), key=lambda d: total_s[d])
    return _put_by(problem, lambda op, devices: min(devices, key=fast.index))


def round_robin(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Each op on the next device that can take it."""
    every = problem.num_devices
    return _put_by(problem, lambda op, devices: min(devices, key=lambda d: (d - op) % every))


def random_devices(
    problem: Problem, *, deadline_s: float | None = None, seed: int = 0
) -> Placement:
    """Each op on any device that can take it; equal seeds, equal placements."""
    draw = random.Random(seed)
    return _put_by(problem, lambda op, devices: draw.choice(list(devices)))


def greedy(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Earliest finish time in program order."""
    return put_all(problem, range(problem.num_ops))


def heft(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Heterogeneous earliest finish time, with insertion."""
    return put_all(problem, ranked(problem, upward_ranks(problem)))


def peft(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """Predict earliest finish time: the end here and the least that must follow it count."""
    table, every = tails(problem), problem.num_devices
    order = ranked(problem, [sum(row) / every for row in table])
    return put_all(problem, order, lambda draft, op, on: best_of(draft, op, on, table[op]))


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
    fastest, on_path = total_s.index(min(total_s)), set(path)

    def choose(draft: Draft, op: int, devices: Sequence[int]) -> tuple[int, float]:
        if op in on_path and fastest in devices:
            return fastest, draft.begin_s(op, fastest)
        return best_of(draft, op, devices)

    return put_all(problem, ranked(problem, priority), choose)


def critical_path(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """List planning by the least seconds to the end: of all ready ops the most urgent one goes to
    the device that ends it first; nothing is put into gaps."""
    least = [min(row[d] for d in problem.allowed[op]) for op, row in enumerate(problem.seconds)]
    order = ranked(problem, _to_end_s(problem, least, {}))
    return put_all(problem, order, partial(best_of, gaps=False))


def guard(problem: Problem) -> Placement:
    """The best of single, heft and peft: what no planner that has a guard is worse than."""
    return best([single(problem), heft(problem), peft(problem)])


def _put_by(problem: Problem, pick: Callable[[int, Sequence[int]], int]) -> Placement:
    """Program order, each op on a device that does not depend on times, as early as it can."""

    def choose(draft: Draft, op: int, devices: Sequence[int]) -> tuple[int, float]:
        device = pick(op, devices)
        return device, draft.begin_s(op, device)

    return put_all(problem, range(problem.num_ops), choose)


def stages(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """The best of the cuts into consecutive stages; where there is none, what `pack` finds.

    Devices take their turn from the fastest on. A device gets ops while they fit into its memory
    and while its load is below a limit; the least limit that places all ops, and that no link
    exceeds, is found by bisection. Without a limit only memory makes a cut. Both are tried, in
    program order and by rank.
    """
    order = ranked(problem, upward_ranks(problem))
    assignments = list(cuts(problem, order)) or [pack(problem)]
    return best(put_all_on(problem, order, devices) for devices in assignments)


def cuts(problem: Problem, order: Sequence[int]) -> Iterator[list[int]]:
    """The assignment without a limit, and that of the least limit: in this order, and by index."""

    def mean_of(device: int) -> float:
        finite = [row[device] for row in problem.seconds if row[device] < INF]
        return sum(finite) / max(1, len(finite))  # of what a device can run, if not everything

    turns = sorted(range(problem.num_devices), key=mean_of)  # the fastest first
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
