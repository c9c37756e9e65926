"""The `Rollout`: several problems put op by op, in step, with what a policy sees before each put.

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

from typing import NamedTuple

import numpy as np

from torchweft.placement.numbers import Bools, Floats, Ints, Numbers

NUM_CANDIDATES = 8
BIG = np.float32(1e9)
LIMIT = np.float32(8)
FACTS = (
    "regret of its end", "regret of its path", "regret ahead", "regret of its seconds",
    "regret of its inputs", "end against the first", "path against the last",
    "ahead against the last", "urgency of its path", "urgency ahead", "urgency by rank", "idle",
    "seconds", "tail", "device against the first", "sent", "slack", "work left", "beside it here",
    "beside it elsewhere", "read here",
)  # fmt: skip
"""What is seen of a pair, in the order of the last axis."""
REGRET, URGENCY = FACTS.index("regret ahead"), FACTS.index("urgency ahead")
NUM_LOGS = FACTS.index("work left")
"""So many of the facts are seconds, and seen as logarithms; the others are shares."""


class Seen(NamedTuple):
    """What a policy sees: facts [try, candidate, device, fact], candidates as ops [try, candidate],
    and which pairs may be chosen [try, candidate, device]."""

    facts: Floats
    ops: Ints
    mask: Bools


class Rollout:
    """Tries of problems under way. Try `t` is of problem `t // repeat`."""

    def __init__(self, numbers: Numbers, repeat: int = 1) -> None:
        self.numbers = numbers
        self.problem = np.repeat(np.arange(numbers.num_problems), repeat)
        num_tries, width = len(self.problem), numbers.width
        self.tries = np.arange(num_tries)
        self.static = self.problem * width  # where a try's problem starts in the numbers' rows
        self.own = self.tries * width  # and where its own rows start
        rows = (self.static[:, None] + np.arange(width)).ravel()
        self.free_s = np.where(numbers.devices, np.float32(0), BIG)[self.problem]
        self.there_s = numbers.ready_s[rows]
        self.inputs = np.zeros((len(rows), numbers.num_devices), np.float32)
        self.missing = numbers.num_preds[rows]
        self.key = np.where(self.missing == 0, numbers.rank_s[rows], -BIG).reshape(-1, width)
        self.key[:, -1] = -BIG
        self.left_s = numbers.least_s.reshape(-1, width).sum(1)[self.problem]
        self.work_s = np.maximum(self.left_s, np.float32(1e-6))
        self.num_devices = numbers.devices.sum(1).astype(np.float32)[self.problem]
        self.num_left = (self.missing.reshape(-1, width) >= 0).sum(1)
        self.end_s = np.zeros(num_tries, np.float32)
        self.order: list[Ints] = []
        self.device: list[Ints] = []
        self._ops: Ints | None = None
        self._ends: Floats | None = None

    @property
    def going(self) -> bool:
        """Whether any try has ops left."""
        return bool((self.key > -BIG).any())

    @property
    def makespan_s(self) -> Floats:
        """Seconds of each try."""
        return self.end_s * self.numbers.scale[self.problem]

    def candidates(self) -> tuple[Ints, Bools | None]:
        """The ready ops that a policy chooses among, and which of them there are; None: all."""
        if len(self.tries) == 1:
            (ready,) = np.nonzero(self.key[0] > -BIG)
            if len(ready) > NUM_CANDIDATES:
                last = np.argpartition(-self.key[0, ready], NUM_CANDIDATES - 1)
                ready = ready[last[:NUM_CANDIDATES]]
            return ready[None], None
        count = min(NUM_CANDIDATES, self.key.shape[1])
        ops = np.argpartition(-self.key, count - 1, axis=1)[:, :count]
        there = np.take_along_axis(self.key, ops, 1) > -BIG
        return ops, None if there.all() else there[:, :, None]

    def look(self) -> Seen:
        """What there is to choose from, for every try. Tries that are done have no choice."""
        table = self.numbers
        ops, there = self.candidates()
        rows, own = ops + self.static[:, None], ops + self.own[:, None]
        seconds, tail_s = table.seconds[rows], table.tail_s[rows]
        there_s, free_s = self.there_s[own], self.free_s[:, None]
        start_s = np.maximum(there_s, free_s)
        end_s = start_s + seconds
        path_s = end_s + tail_s
        self._ops, self._ends = ops, end_s

        # One op ahead: the followers, where they could be done soonest.
        succs = table.succs[rows] + self.own[:, None, None]
        known_s = np.maximum(self.there_s[succs], self.free_s[:, None, None])
        ahead = table.moved_s[rows] + end_s[:, :, None, :, None]
        np.maximum(ahead, known_s[:, :, :, None], out=ahead)
        ahead += table.follow_s[rows][:, :, :, None]
        ahead_s = np.maximum(ahead.min(-1).max(2), path_s)

        end_min, path_min = end_s.min(2, keepdims=True), path_s.min(2, keepdims=True)
        ahead_min, rank_s = ahead_s.min(2, keepdims=True), table.rank_s[rows][:, :, None]
        free_min = free_s.min(2, keepdims=True)
        slack_s = free_min + (self.left_s / self.num_devices)[:, None, None]
        lasts = np.concatenate((path_min, ahead_min, rank_s), 2)
        if there is not None:
            lasts = np.where(there, lasts, -BIG)
        last = lasts.max(1, keepdims=True)
        first_end = end_min if there is None else np.where(there, end_min, BIG)
        first_end = first_end.min(1, keepdims=True)
        last_path, last_ahead = last[:, :, 0:1], last[:, :, 1:2]

        facts = np.empty((len(FACTS), *end_s.shape), np.float32)
        np.subtract(end_s, end_min, out=facts[0])
        np.subtract(path_s, path_min, out=facts[1])
        np.subtract(ahead_s, ahead_min, out=facts[2])
        facts[3] = table.regret_s[rows]
        np.subtract(there_s, there_s.min(2, keepdims=True), out=facts[4])
        np.subtract(end_s, first_end, out=facts[5])
        np.subtract(path_s, last_path, out=facts[6])
        np.subtract(ahead_s, last_ahead, out=facts[7])
        facts[8:11] = (lasts - last).transpose(2, 0, 1)[..., None]
        np.subtract(start_s, free_s, out=facts[11])
        facts[12], facts[13] = seconds, tail_s
        np.subtract(free_s, free_min, out=facts[14])
        facts[15] = table.sent_s[rows][:, :, None]
        np.subtract(ahead_min, slack_s, out=facts[16])
        logs = facts[:NUM_LOGS]
        np.copysign(np.log1p(np.abs(logs)), logs, out=logs)

        beside, read = self.inputs[succs].sum(2), self.inputs[own]
        beside_all = beside.sum(2, keepdims=True)
        facts[17] = (self.left_s / self.work_s)[:, None, None]
        np.divide(beside, 1 + beside_all, out=facts[18])
        np.divide(beside_all - beside, 1 + beside_all, out=facts[19])
        np.divide(read, 1 + read.sum(2, keepdims=True), out=facts[20])
        np.clip(facts, -LIMIT, LIMIT, out=facts)
        allowed = table.allowed[rows]
        mask = allowed if there is None else allowed & there
        return Seen(np.moveaxis(facts, 0, -1), ops, mask)

    def put(self, chosen: Ints) -> None:
        """Put a pair (candidate * devices + device) in every try that has ops left."""
        assert self._ops is not None and self._ends is not None, "look first"
        table, tries = self.numbers, self.tries
        at, device = np.divmod(chosen, table.num_devices)
        ops = self._ops[tries, at]
        live = self.key[tries, ops] > -BIG
        end_s = self._ends[tries, at, device]
        if not live.all():
            ops = np.where(live, ops, table.width - 1)  # the dummy takes what is too much
            end_s = np.where(live, end_s, self.free_s[tries, device])
        self.order.append(ops)
        self.device.append(device)
        self.free_s[tries, device] = end_s
        self.end_s = np.maximum(self.end_s, np.where(live, end_s, 0))
        self.key[tries, ops] = -BIG
        rows = ops + self.static
        self.left_s = self.left_s - table.least_s[rows]
        succs = table.succs[rows]
        own = succs + self.own[:, None]
        moved_s = table.moved_s[rows, :, device] + end_s[:, None, None]
        for column in range(succs.shape[1]):  # a try's followers are all different
            there = own[:, column]
            self.there_s[there] = np.maximum(self.there_s[there], moved_s[:, column])
            self.inputs[there, device] += 1
            self.missing[there] -= 1
            followers = succs[:, column]
            ready = (self.missing[there] == 0) & (followers < table.width - 1)
            if ready.any():
                found = followers[ready]
                self.key[ready, found] = table.rank_s[found + self.static[ready]]
        self.there_s[self.own + table.width - 1] = 0
        self.inputs[self.own + table.width - 1] = 0
