"""The `Rollout`: several problems put op by op, in step, with what a policy sees before each put.

    problems --numbers_of--> Numbers: arrays over (problem, op, device), scaled --> Rollout
    rollout = Rollout(numbers, repeat=8)           eight tries of every problem, side by side
    while rollout.going:
        seen = rollout.look()                      facts of (candidate op, device) pairs
        rollout.put(choose(seen))                  one pair a try
    rollout.makespan_s, rollout.order, rollout.device

Candidates are the ready ops with the longest way to the end, at most `NUM_CANDIDATES` of them. An
op goes behind all that its device has. What is seen of a pair are differences of scaled seconds
(`log1p`, signed): how much later than elsewhere it ends, what it waits for, what follows at the
least, and, one op ahead, when its slowest follower could then be done, with that follower's other
inputs where they are known to be. No wall clock, no numbers of devices, no names.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
NUM_CANDIDATES = 8
BIG = np.float32(1e9)
SMALL = np.float32(1e-6)
LIMIT = np.float32(8)
FACTS = (
    "regret of its end", "regret of its path", "regret ahead", "regret of its seconds",
    "regret of its inputs", "device against the first", "end against the first",
    "path against the last", "ahead against the last", "urgency of its path", "urgency ahead",
    "urgency by rank", "idle", "seconds", "tail", "sent", "slack", "behind", "work left",
    "share behind", "beside it here", "beside it elsewhere", "read here",
)  # fmt: skip
"""What is seen of a pair, in the order of the last axis."""
NUM_LOGS = FACTS.index("work left")
"""So many of the facts are seconds, and seen as logarithms; the others are shares."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """The facts of several problems as arrays: by row (an op of a problem), by problem, or both.

    All seconds are divided by the problem's `scale`, its mean seconds an op, so that a policy sees
    the same numbers for a graph of microseconds and for one of hours. Problems are padded to the
    largest: each has `num_ops + 1` rows, the last of them a dummy that nothing needs. Arrays are
    flat over problems: op `o` of problem `p` stands in row `p * width + o`. Edges stand by their
    source, one behind the other, and the last is a dummy too. Devices come first, so that all
    arithmetic runs over long rows of memory.

    A graph that joins more than it forks, such as a tree that computes a sentence, is *turned*: it
    is put from its end, last op first, so that whoever reads a value stands before its maker is
    put. Transfers, ranks and tails are those of the turned graph. Backwards in time it takes as
    long.
    """

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


class Observed(NamedTuple):
    """What a policy sees: facts [try, candidate, device, fact], candidates as ops [try, candidate],
    and which pairs may be chosen [try, candidate, device]."""

    facts: Floats
    ops: Ints
    mask: Bools


class Rollout:
    """Tries of problems under way. Try `t` is of problem `t // repeat`."""

    def __init__(self, numbers: Numbers, repeat: int = 1) -> None:
        self.numbers = numbers
        self.problem = np.repeat(np.arange(len(numbers.problems)), repeat)
        width = numbers.width
        self.tries = np.arange(len(self.problem))
        self.static = self.problem * width  # where a try's problem starts in the numbers' rows
        self.own = self.tries * width  # and where its own rows start
        rows = (self.static[:, None] + np.arange(width)).ravel()
        self.free_s = np.where(numbers.devices, np.float32(0), BIG)[:, self.problem]
        # [2, device, row]: when all that it reads is there; how many of these are made there.
        self.state = np.zeros((2, numbers.num_devices, len(rows)), np.float32)
        self.state[0] = numbers.ready_s[:, rows]
        self.alone = len(rows) == width
        if self.alone:  # lists are faster: what is ready, the most urgent first
            self.rank_s, self.waits = numbers.rank_s.tolist(), numbers.num_preds.tolist()
            firsts = [op for op, count in enumerate(self.waits[:-1]) if not count]
            self.ready = sorted((-self.rank_s[op], op) for op in firsts)
        else:
            self.missing = numbers.num_preds[rows]
            self.key = np.where(self.missing == 0, numbers.rank_s[rows], -BIG).reshape(-1, width)
            self.key[:, -1] = -BIG
        self.left_s = numbers.least_s.reshape(-1, width).sum(1)[self.problem]
        self.work_s = np.maximum(self.left_s, SMALL)
        self.num_devices = numbers.devices.sum(0).astype(np.float32)[self.problem]
        self.num_ops = np.array([problem.num_ops for problem in numbers.problems])[self.problem]
        self.least_ops, self.most_ops = int(self.num_ops.min()), int(self.num_ops.max())
        self.order: list[Ints] = []
        self.device: list[Ints] = []
        self._ops: Ints | None = None
        self._ends: Floats | None = None

    @property
    def going(self) -> bool:
        """Whether any try has ops left."""
        return len(self.order) < self.most_ops

    @property
    def live(self) -> Bools:
        """Which tries have ops left."""
        return self.num_ops > len(self.order)

    @property
    def end_s(self) -> Floats:
        """Scaled seconds of each try so far."""
        there = self.numbers.devices[:, self.problem]
        latest_s: Floats = np.where(there, self.free_s, 0).max(0)
        return latest_s

    @property
    def makespan_s(self) -> Floats:
        """Seconds of each try."""
        return self.end_s * self.numbers.scale[self.problem]

    def candidates(self) -> tuple[Ints, Bools | None]:
        """The ready ops that a policy chooses among, and which of them there are; None: all."""
        if self.alone:
            return np.array([[op for _, op in self.ready[:NUM_CANDIDATES]]]), None
        count = min(NUM_CANDIDATES, self.key.shape[1])
        ops = np.argpartition(-self.key, count - 1, axis=1)[:, :count]
        there = np.take_along_axis(self.key, ops, 1) > -BIG
        return ops, None if there.all() else there

    def look(self) -> Observed:
        """What there is to choose from, for every try. Tries that are done have no choice."""
        table, free_s = self.numbers, self.free_s[:, :, None]
        ops, there = self.candidates()
        rows = own = ops
        if not self.alone:
            rows, own = ops + self.static[:, None], ops + self.own[:, None]
        seconds, tail_s = table.costs.take(rows, 2)
        there_s, read = self.state.take(own, 2)
        rank_s = table.rank_s.take(rows)

        spans = np.empty((6, *seconds.shape), np.float32)
        end_s, path_s, ahead_s = spans[:3]
        start_s = np.maximum(there_s, free_s)
        np.add(start_s, seconds, out=end_s)
        np.add(end_s, tail_s, out=path_s)
        spans[3], spans[4], spans[5] = seconds, there_s, free_s
        self._ops, self._ends = ops, end_s

        soonest, beside = self._ahead(rows, end_s)
        np.maximum(soonest, path_s, out=ahead_s)

        # Against the other devices, then against the other candidates.
        least = np.minimum.reduce(spans, 1)
        lasts = np.empty((4, *ops.shape), np.float32)
        np.negative(least[0], out=lasts[0])
        lasts[1:3], lasts[3] = least[1:3], rank_s
        if there is not None:
            lasts = np.where(there, lasts, -BIG)
        last = np.maximum.reduce(lasts, 2, keepdims=True)
        last[0] *= -1
        facts = np.empty((len(FACTS), *seconds.shape), np.float32)
        np.subtract(spans, least[:, None], out=facts[:6])
        np.subtract(spans[:3], last[:3, None], out=facts[6:9])
        facts[9:12] = (lasts[1:] - last[1:])[:, None]
        np.subtract(start_s, free_s, out=facts[12])
        facts[13], facts[14], facts[15] = seconds, tail_s, table.sent_s.take(rows)
        facts[16] = least[2] - least[5] - (self.left_s / self.num_devices)[:, None]
        facts[17] = behind_s = table.behind_s.take(rows)
        logs = facts[:NUM_LOGS]
        np.copysign(np.log1p(np.abs(logs)), logs, out=logs)

        total = np.add.reduce(beside, 0)
        facts[18] = (self.left_s / self.work_s)[:, None]
        facts[19] = behind_s / np.maximum(self.left_s, SMALL)[:, None]
        np.divide(beside, 1 + total, out=facts[20])
        np.divide(total - beside, 1 + total, out=facts[21])
        np.divide(read, 1 + np.add.reduce(read, 0), out=facts[22])
        np.minimum(facts, LIMIT, out=facts)
        np.maximum(facts, -LIMIT, out=facts)
        mask = seconds < FORBIDDEN
        if there is not None:
            mask &= there
        return Observed(facts.transpose(2, 3, 1, 0), ops, mask.transpose(1, 2, 0))

    def _ahead(self, rows: Ints, end_s: Floats) -> tuple[Floats, Floats]:
        """One op ahead: when the slowest follower of each pair could be done, where that is
        soonest, and how many of what the followers read is made on each device."""
        table = self.numbers
        edges = table.ahead.take(rows, 1)
        succs = table.target.take(edges)
        if not self.alone:
            succs += self.own[:, None]
        known_s, beside = self.state.take(succs, 2)
        known_s = np.maximum(known_s, self.free_s[:, None, :, None])
        ahead = table.moved_s.take(edges, 2)
        ahead += end_s[:, None]
        np.maximum(ahead, known_s[:, None], out=ahead)
        ahead += table.follow_s.take(edges, 1)[:, None]
        soonest: Floats = np.maximum.reduce(np.minimum.reduce(ahead, 0), 1)
        return soonest, np.add.reduce(beside, 1)

    def put(self, chosen: Ints) -> None:
        """Put a pair (candidate * devices + device) in every try that has ops left."""
        assert self._ops is not None and self._ends is not None, "look first"
        table, tries = self.numbers, self.tries
        at, device = np.divmod(chosen, table.num_devices)
        ops, end_s = self._ops[tries, at], self._ends[device, tries, at]
        if len(self.order) >= self.least_ops:  # the dummy takes what is too much
            live = self.live
            ops = np.where(live, ops, table.width - 1)
            end_s = np.where(live, end_s, self.free_s[device, tries])
        self.order.append(ops)
        self.device.append(device)
        self.free_s[device, tries] = end_s
        self.left_s = self.left_s - table.least_s.take(ops + self.static)
        if self.alone:
            self._tell(int(ops[0]), int(device[0]), end_s[0])
        else:
            self.key[tries, ops] = -BIG
            self._tell_all(ops, device, end_s)

    def _tell(self, op: int, device: int, end_s: np.float32) -> None:
        """The followers of an op learn where and when it ends; of a single try."""
        table, (there_s, inputs) = self.numbers, self.state
        self.ready.remove((-self.rank_s[op], op))
        edges = slice(table.first[op], table.first[op + 1])
        succs = table.target[edges]
        moved_s = table.moved_s[:, device, edges] + end_s
        there_s[:, succs] = np.maximum(there_s.take(succs, 1), moved_s)
        inputs[device, succs] += 1
        for succ in succs.tolist():
            self.waits[succ] -= 1
            if not self.waits[succ]:
                insort(self.ready, (-self.rank_s[succ], succ))

    def _tell_all(self, ops: Ints, device: Ints, end_s: Floats) -> None:
        """The same for one op of every try: their first followers, their second ones, ..."""
        table, (there_s, inputs), rows = self.numbers, self.state, ops + self.static
        first, last = table.first.take(rows), table.first.take(rows + 1)
        for column in range(int((last - first).max())):  # a try's followers are all different
            edge = first + column
            real = edge < last
            edge = np.where(real, edge, len(table.target) - 1)
            succs = table.target.take(edge)
            there = succs + self.own
            moved_s = table.moved_s[:, device, edge] + end_s
            there_s[:, there] = np.maximum(there_s.take(there, 1), moved_s)
            inputs[device, there] += real
            self.missing[there] -= real
            ready = self.missing.take(there) == 0
            if ready.any():
                fresh = succs[ready]
                self.key[ready, fresh] = table.rank_s[fresh + self.static[ready]]
