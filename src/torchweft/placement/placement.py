"""The `Placement`: which device runs each op, from when to when; what a planner makes.

    placement of t by heft, for latency: makespan 3.2 s, bound 3.1 s (3.2% above), planned in 1 ms
      start        end          device    op
      0 s          1 s          fast      leaf0
      ...

It is data, and prints. `score_s` is what its objective counts: the
makespan of one input, or the period of a stream. `bound_s` is a proven lower bound of the score.

`check` says whether a placement is legal for a problem, from the two alone: it shares no code with
the planners and the draft. Rules: `ops`, `device`, `time`, `overlap` (two ops on one device at
once), `order` (an op starts before what it reads has arrived), `together`, `memory`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from torchweft.errors import PlacementError
from torchweft.placement.problem import INF, Matrix, Problem
from torchweft.plan.trace import format_s

SLACK = 1e-9  # relative: what sums of floating-point seconds may be off
PROVEN = 1e-6  # a score this close to its bound, relatively, is optimal


@dataclass(frozen=True)
class Placement:
    """For each op its device (a number into `devices`), its start and its end."""

    problem: str
    ops: tuple[str, ...]
    devices: tuple[str, ...]
    device: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    period_s: float
    objective: str = "latency"
    planner: str = ""
    bound_s: float | None = None
    planning_s: float = 0.0

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last op has ended."""
        return max(self.end_s)

    @property
    def score_s(self) -> float:
        """What the objective counts; less is better."""
        return self.makespan_s if self.objective == "latency" else self.period_s

    @property
    def gap(self) -> float | None:
        """How far the score is above the bound, relatively; None without a bound."""
        if self.bound_s is None:
            return None
        if self.bound_s == 0:
            return 0.0 if self.score_s == 0 else math.inf
        return max(0.0, self.score_s / self.bound_s - 1)

    @property
    def optimal(self) -> bool:
        """Whether it is proven that there is no better one."""
        return self.gap is not None and self.gap <= PROVEN

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ops by their starts, none before what it reads."""
        keys = list(zip(self.start_s, self.end_s, range(len(self.ops)), strict=True))
        return tuple(op for _, _, op in sorted(keys))

    def __str__(self) -> str:
        score = f"makespan {format_s(self.makespan_s)}"
        if self.objective == "throughput":
            score = f"period {format_s(self.period_s)}, {score}"
        bound = "no bound"
        if self.bound_s is not None and self.gap is not None:
            above = "optimal" if self.optimal else f"{self.gap:.1%} above"
            bound = f"bound {format_s(self.bound_s)} ({above})"
        head = f"placement of {self.problem} by {self.planner or '?'}, for {self.objective}"
        lines = [f"{head}: {score}, {bound}, planned in {format_s(self.planning_s)}"]
        wide = max(6, *map(len, self.devices)) + 2
        lines.append(f"  {'start':<13}{'end':<13}{'device':<{wide}}op")
        for op in self.order:
            times = f"{format_s(self.start_s[op]):<13}{format_s(self.end_s[op]):<13}"
            lines.append(f"  {times}{self.devices[self.device[op]]:<{wide}}{self.ops[op]}")
        return "\n".join(lines) + "\n"


class OpenDevices:
    """Which devices are still open to an op: its group's device once that is decided, else those
    that can run the whole group and have room for all that it needs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.left = list(problem.room_bytes)
        self.holds: list[set[int]] = [set() for _ in problem.devices]
        self.group_device: dict[int, int] = {}  # by the group's first op

    def open(self, op: int) -> Sequence[int]:
        """The devices that may run the op, its group and memory considered; may be none."""
        decided = self.group_device.get(self.problem.group[op][0])
        if decided is not None:
            return (decided,)
        devices = self.problem.allowed[op]
        if not self.problem.limited:
            return devices
        return [device for device in devices if self.need(op, device) <= self.left[device]]

    @property
    def devices(self) -> list[int]:
        """The device of each op; -1: not decided."""
        return [self.group_device.get(group[0], -1) for group in self.problem.group]

    def need(self, op: int, device: int) -> float:
        """The bytes that the op's group would add on the device."""
        return sum(self.problem.holds[hold].num_bytes for hold in self._new(op, device))

    def take(self, op: int, device: int) -> None:
        """The op, and with it its group, is on the device from now on."""
        first = self.problem.group[op][0]
        if first in self.group_device:
            return
        self.group_device[first] = device
        if self.problem.limited:
            self.left[device] -= self.need(op, device)
            self.holds[device] |= self._new(op, device)

    def _new(self, op: int, device: int) -> set[int]:
        held, there = self.problem.held, self.holds[device]
        return {hold for member in self.problem.group[op] for hold in held[member]} - there


class Draft(OpenDevices):
    """A placement in the making: devices (-1: none yet), starts and ends of the ops put so far.

        draft = Draft(problem)
        for op in order:
            device = min(draft.open(op), key=lambda device: draft.end_s(op, device))
            draft.put(op, device)

    Ops are put one by one, in any order that the edges allow; one may go into a gap that earlier
    ops left on a device (insertion), or behind them all. This and `run` mean what the simulator
    means by the placement's plan (`as_plan`, without contention); a law in the tests holds them to
    it.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.device = [-1] * problem.num_ops
        self.start_s = [0.0] * problem.num_ops
        self.finish_s = [0.0] * problem.num_ops
        self._starts: list[list[float]] = [[] for _ in problem.devices]
        self._ends: list[list[float]] = [[] for _ in problem.devices]

    def ready_s(self, op: int, device: int) -> float:
        """When all that the op reads is on the device; what it reads must have been put."""
        at_s = self.problem.ready_s[op][device]
        where, finish_s = self.device, self.finish_s
        for source, seconds in self.problem.preds[op]:
            there_s = finish_s[source] + seconds[where[source]][device]
            if there_s > at_s:
                at_s = there_s
        return at_s

    def free_s(self, device: int) -> float:
        """When the last op put on a device ends."""
        ends = self._ends[device]
        return ends[-1] if ends else 0.0

    def begin_s(self, op: int, device: int) -> float:
        """The earliest start of the op on the device, in a gap if there is one."""
        at_s, seconds = self.ready_s(op, device), self.problem.seconds[op][device]
        starts, ends = self._starts[device], self._ends[device]
        for number in range(bisect_right(ends, at_s), len(ends)):
            if at_s + seconds <= starts[number]:
                break
            at_s = ends[number]
        return at_s

    def end_s(self, op: int, device: int) -> float:
        """The earliest end of the op on the device."""
        return self.begin_s(op, device) + self.problem.seconds[op][device]

    def put(self, op: int, device: int, start_s: float | None = None) -> None:
        """Put an op on a device, at a start from `begin_s` (or at the earliest)."""
        start_s = self.begin_s(op, device) if start_s is None else start_s
        finish_s = start_s + self.problem.seconds[op][device]
        at = bisect_right(self._ends[device], start_s)
        self._starts[device].insert(at, start_s)
        self._ends[device].insert(at, finish_s)
        self.device[op], self.start_s[op], self.finish_s[op] = device, start_s, finish_s
        self.take(op, device)


def run(
    problem: Problem,
    devices: Sequence[int],
    order: Sequence[int],
    most_s: float = INF,
    behind: Matrix = (),
) -> tuple[list[float], list[float]]:
    """Starts and ends if every device runs its ops in this order, each as soon as it can.

    The order has every op once, none before what it reads. With a limit `most_s`, the clock stops
    at the first op whose end and what is still `behind` it (`tails`) exceed it: [inf] are the ends.
    """
    start_s, finish_s = [0.0] * problem.num_ops, [0.0] * problem.num_ops
    free_s = [0.0] * problem.num_devices
    preds, seconds, ready_s = problem.preds, problem.seconds, problem.ready_s
    limited = most_s < INF
    for op in order:
        device = devices[op]
        at_s = ready_s[op][device]
        if free_s[device] > at_s:
            at_s = free_s[device]
        for source, transfer_s in preds[op]:
            there_s = finish_s[source] + transfer_s[devices[source]][device]
            if there_s > at_s:
                at_s = there_s
        start_s[op] = at_s
        at_s += seconds[op][device]
        if limited and at_s + behind[op][device] > most_s:
            return start_s, [INF]
        finish_s[op] = free_s[device] = at_s
    return start_s, finish_s


def busy_s(problem: Problem, devices: Sequence[int]) -> list[float]:
    """The seconds that each device works."""
    totals = [0.0] * problem.num_devices
    for op, device in enumerate(devices):
        totals[device] += problem.seconds[op][device]
    return totals


def period_s(problem: Problem, devices: Sequence[int]) -> float:
    """Seconds between two inputs of a stream: what the busiest device or link needs for one."""
    links: dict[tuple[int, int], float] = {}
    for maker, num_bytes, readers in problem.values:
        source = devices[maker]
        for target in {devices[op] for op in readers} - {source}:
            seconds = problem.transfer_s(num_bytes, source, target)
            links[source, target] = links.get((source, target), 0.0) + seconds
    return max([*busy_s(problem, devices), *links.values()])


def pack(problem: Problem) -> list[int]:
    """A device for every op within all memory limits: the largest groups first, each where it
    adds the fewest bytes, or else where it leaves the most room.

    Raises `PlacementError` if none is found.
    """
    size = {group: OpenDevices(problem).need(group[0], 0) for group in problem.groups}
    ordered = sorted(problem.groups, key=lambda group: (-size[group], group))
    for fewest in (True, False):
        room = OpenDevices(problem)
        for group in ordered:
            need = {d: room.need(group[0], d) for d in room.open(group[0])}
            choices = [(need[d] * fewest, need[d] - room.left[d], d) for d in need]
            if not choices:
                break
            room.take(group[0], min(choices)[2])
        else:
            return room.devices
    total = sum(hold.num_bytes for hold in problem.holds)
    raise PlacementError(
        f"memory: no room for op {problem.ops[group[0]]!r} ({size[group]:.4g} bytes with all that "
        f"must be with it): the ops need {total:.4g} bytes, the devices of {problem.name!r} have "
        f"{sum(problem.room_bytes):.4g}. Add a device, or memory.",
        rule="memory",
    )


def placed(
    problem: Problem, devices: Sequence[int], order: Sequence[int], *, bound_s: float | None = None
) -> Placement:
    """The placement in which every device runs its ops in this order, as early as it can.

    This is the simulation of a placement. The order has every op once, none before what it reads.
    """
    return _placement(problem, devices, *run(problem, devices, order), bound_s)


def finished(draft: Draft) -> Placement:
    """The placement of a draft in which every op has been put."""
    return _placement(draft.problem, draft.device, draft.start_s, draft.finish_s)


def best(placements: Iterable[Placement]) -> Placement:
    """The placement with the least score; of equal ones the first."""
    return min(placements, key=lambda placement: placement.score_s)


def _placement(
    problem: Problem,
    devices: Sequence[int],
    start_s: Sequence[float],
    end_s: Sequence[float],
    bound_s: float | None = None,
) -> Placement:
    return Placement(
        problem.name,
        problem.ops,
        problem.devices,
        tuple(devices),
        tuple(start_s),
        tuple(end_s),
        period_s(problem, devices),
        problem.objective,
        bound_s=bound_s,
    )


def check(problem: Problem, placement: Placement) -> Placement:
    """The same placement, if it is legal. Raises `PlacementError` with the first broken rule."""
    for rule, text in faults(problem, placement):
        head = f"{rule}: the placement by {placement.planner or 'hand'} of {problem.name!r}"
        raise PlacementError(f"{head}: {text}", rule=rule)
    return placement


def faults(problem: Problem, placement: Placement) -> Iterator[tuple[str, str]]:
    """Every broken rule as (rule, text)."""
    if placement.ops != problem.ops or placement.devices != problem.devices:
        yield "ops", "it has other ops or devices than the problem."
        return
    for op, at in enumerate(placement.device):
        if problem.seconds[op][at] == INF:
            yield "device", f"device {problem.devices[at]!r} cannot run op {problem.ops[op]!r}."
    yield from _late(problem, placement, SLACK * max(1e-30, max(placement.end_s)))
    for ops in problem.together:
        if len({placement.device[op] for op in ops}) > 1:
            yield "together", f"op {problem.ops[ops[0]]!r} is not with all it must be with."
    needs = [0.0] * problem.num_devices
    for hold in problem.holds:
        for device in {placement.device[op] for op in hold.ops}:
            needs[device] += hold.num_bytes
    for name, room, need in zip(problem.devices, problem.room_bytes, needs, strict=True):
        if need > room:
            yield "memory", f"device {name!r} has {room:.6g} bytes, its ops need {need:.6g}."


def _late(problem: Problem, placement: Placement, slack_s: float) -> Iterator[tuple[str, str]]:
    """What is wrong with the times: by rule, time, order and overlap."""
    starts_s, ends_s, names = placement.start_s, placement.end_s, problem.ops
    for op, device in enumerate(placement.device):
        start_s, end_s, seconds = starts_s[op], ends_s[op], problem.seconds[op][device]
        wrong = abs(end_s - start_s - seconds) > slack_s or start_s < -slack_s
        if seconds < INF and wrong:
            text = f"takes {seconds:g} s, not from {start_s:g} to {end_s:g}."
            yield "time", f"op {names[op]!r} {text}"
    for op, device in enumerate(placement.device):
        if starts_s[op] < problem.ready_s[op][device] - slack_s:
            yield "order", f"op {names[op]!r} starts before its inputs are there."
    for edge in problem.edges:
        source, target = placement.device[edge.source], placement.device[edge.target]
        there_s = ends_s[edge.source]
        if source != target:
            there_s += problem.latency_s[source][target]
            there_s += edge.num_bytes * problem.byte_s[source][target]
        if starts_s[edge.target] < there_s - slack_s:
            pair = f"{names[edge.target]!r} starts before {names[edge.source]!r}"
            yield "order", f"{pair} is there, at {there_s:g} s."
    lanes: list[list[tuple[float, float, str]]] = [[] for _ in problem.devices]
    for op, device in enumerate(placement.device):
        lanes[device].append((starts_s[op], ends_s[op], names[op]))
    for name, spans in zip(problem.devices, lanes, strict=True):
        for (_, end_s, first), (start_s, _, second) in pairwise(sorted(spans)):
            if start_s < end_s - slack_s:
                yield "overlap", f"ops {first!r} and {second!r} run on device {name!r} at once."
