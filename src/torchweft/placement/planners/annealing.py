"""Annealing: the best of the quick planners, improved by random moves until the deadline.

A state is a device for each op and one order of all ops, so it can say every placement worth
having (each device runs its ops in that order, as early as it can). Moves:

    move     an op (with its group) to another device          join    to the device of a neighbour
    sweep    an op and all it needs to one device              shift   an op to another turn

A worse state is taken with a chance that falls with the time left. What a move may cost is drawn
first, so that a bad one is given up as soon as one op would end too late (`tails`). The walk ends
early where the bound is met.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence

from torchweft.placement.placement import Placement, best, placed, run
from torchweft.placement.planners.lists import best_quick
from torchweft.placement.problem import INF, Problem, bound_s, tails

MOVES_PER_OP = 200
MOST_TIMED = 20_000_000  # ops timed in all moves together: some seconds
HEAT = 0.02  # of the first score: what a move may cost at the start


def annealing(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    start: Placement | None = None,
) -> Placement:
    """Simulated annealing; without a deadline 200 moves an op (fewer for large problems), the same
    for equal seeds."""
    ends_s = INF if deadline_s is None else time.perf_counter() + deadline_s
    first = start or best_quick(problem, ends_s)
    if time.perf_counter() > ends_s:
        return first
    least_s = bound_s(problem) * (1 + 1e-9)
    state = _AnnealingState(problem, first, random.Random(seed))
    began_s = time.perf_counter()
    total = min(MOVES_PER_OP * problem.num_ops, MOST_TIMED // problem.num_ops)
    done, share = 0, 0.0
    while share < 1 and state.best_s > least_s:
        state.step(HEAT * first.score_s * (1 - share))
        done += 1
        if deadline_s is None:
            share = done / total
        else:
            share = (time.perf_counter() - began_s) / max(1e-9, ends_s - began_s)
    return best([first, placed(problem, *state.best)])


class _AnnealingState:
    """Where the walk is, and the best that it has seen."""

    def __init__(self, problem: Problem, start: Placement, draw: random.Random) -> None:
        self.problem, self.draw = problem, draw
        self.devices, self.order = list(start.device), list(start.order)
        self.turn = [0] * problem.num_ops
        for at, op in enumerate(self.order):
            self.turn[op] = at
        self.tails = tails(problem)
        self.loads = Loads(problem, self.devices)
        self.score_s = self.best_s = self._score(INF)
        self.best = list(self.devices), list(self.order)
        self.movable = [g for g in problem.groups if len(problem.allowed[g[0]]) > 1]

    def step(self, heat_s: float) -> None:
        """Try one move; keep it if it does not cost more than is drawn."""
        most_s = self.score_s - heat_s * math.log(max(1e-300, self.draw.random()))
        kind = self.draw.random()
        if not self.movable or (kind < 0.35 and self.problem.objective == "latency"):
            self._shift(most_s)
            return
        op = self.draw.choice(self.draw.choice(self.movable))
        device = self._device(op, near=kind < 0.65)
        before = []
        for item in [op] if kind < 0.85 else self._needs(op):
            if self.devices[item] != device and device in self.problem.allowed[item]:
                before.append((self.problem.group[item], self.devices[item]))
                self.loads.move(self.problem.group[item], device)
        if before and self.loads.fits():
            score_s = self._score(most_s)
            if score_s <= most_s:
                self._keep(score_s)
                return
        for group, device in reversed(before):
            self.loads.move(group, device)

    def _device(self, op: int, *, near: bool) -> int:
        """Any device that the op may go to; near: that of what it reads or what reads it."""
        if near:
            around = [*self.problem.preds[op], *self.problem.succs[op]]
            if around:
                return self.devices[self.draw.choice(around)[0]]
        return self.draw.choice(self.problem.allowed[op])

    def _needs(self, op: int) -> Iterator[int]:
        """The op and all that it reads, directly or not, up to a drawn number."""
        seen, stack, most = {op}, [op], self.draw.randint(2, 40)
        while stack and most:
            yield (op := stack.pop())
            most -= 1
            fresh = [source for source, _ in self.problem.preds[op] if source not in seen]
            seen.update(fresh)
            stack += fresh

    def _shift(self, most_s: float) -> None:
        """Give an op another turn, between what it reads and what reads it."""
        op, turn = self.draw.randrange(self.problem.num_ops), self.turn
        first = max((turn[other] for other, _ in self.problem.preds[op]), default=-1) + 1
        last = min(
            (turn[other] for other, _ in self.problem.succs[op]), default=self.problem.num_ops
        )
        before, after = turn[op], self.draw.randrange(first, last)
        if before == after:
            return
        self._turn(before, after)
        score_s = self._score(most_s)
        if score_s <= most_s:
            self._keep(score_s)
        else:
            self._turn(after, before)

    def _turn(self, before: int, after: int) -> None:
        self.order.insert(after, self.order.pop(before))
        low, high = min(before, after), max(before, after) + 1
        for at in range(low, high):
            self.turn[self.order[at]] = at

    def _keep(self, score_s: float) -> None:
        self.score_s = score_s
        if score_s < self.best_s:
            self.best_s, self.best = score_s, (list(self.devices), list(self.order))

    def _score(self, most_s: float) -> float:
        """The score of the state; inf as soon as it is known to be above `most_s`."""
        if self.problem.objective == "throughput":
            return self.loads.period_s()
        return max(run(self.problem, self.devices, self.order, most_s, self.tails)[1])


class Loads:
    """What each device holds and, for throughput, the seconds of each device and link, kept up to
    date while groups move. It shares the list of devices, and changes it; moving back undoes."""

    def __init__(self, problem: Problem, devices: list[int]) -> None:
        self.problem, self.devices = problem, devices
        self.used = [0.0] * problem.num_devices
        self.counts: dict[tuple[int, int], int] = {}  # ops that need a hold on a device
        self.busy_s = [0.0] * problem.num_devices
        self.links: dict[tuple[int, int], float] = {}
        self.stream = problem.objective == "throughput"
        self.values = problem.values if self.stream else ()
        self.touching: list[list[int]] = [[] for _ in problem.ops]
        for number, (source, _, targets) in enumerate(self.values):
            for op in (source, *targets):
                self.touching[op].append(number)
        for op in range(problem.num_ops):
            self._hold(op, 1)
        self._send(range(len(self.values)), 1)

    def move(self, group: Sequence[int], device: int) -> None:
        """Put all ops of a group on a device."""
        values = {number for op in group for number in self.touching[op]}
        self._send(values, -1)
        for op in group:
            self._hold(op, -1)
            self.devices[op] = device
            self._hold(op, 1)
        self._send(values, 1)

    def fits(self) -> bool:
        """Whether every device has room for what it holds."""
        rooms = self.problem.room_bytes
        return all(used <= room for used, room in zip(self.used, rooms, strict=True))

    def period_s(self) -> float:
        """Seconds of the busiest device or link, but for what sums of floats are off."""
        return max(*self.busy_s, max(self.links.values(), default=0.0))

    def _hold(self, op: int, sign: int) -> None:
        device = self.devices[op]
        if self.stream:
            self.busy_s[device] += sign * self.problem.seconds[op][device]
        for hold in self.problem.held[op] if self.problem.limited else ():
            count = self.counts.get((hold, device), 0)
            self.counts[hold, device] = count + sign
            if count == 0 or count + sign == 0:
                self.used[device] += sign * self.problem.holds[hold].num_bytes

    def _send(self, values: Iterable[int], sign: int) -> None:
        """Count values, each once to each other device that reads it."""
        devices = self.devices
        for number in values:
            source, num_bytes, targets = self.values[number]
            made_on = devices[source]
            for target in {devices[op] for op in targets} - {made_on}:
                seconds = sign * self.problem.transfer_s(num_bytes, made_on, target)
                key = made_on, target
                self.links[key] = self.links.get(key, 0.0) + seconds
