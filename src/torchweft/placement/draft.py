"""The `Draft`: a placement in the making. Ops are put on devices one by one, in any order that the
edges allow; it knows when a device could start an op, and whether there is room for it.

    draft = Draft(problem)
    for op in order:
        device = min(draft.open(op), key=lambda device: draft.end_s(op, device))
        draft.put(op, device)

An op may go into a gap that earlier ops left on a device (insertion), or behind them all.
`run(problem, devices, order)` times a whole assignment at once. Both mean what the simulator means
by the placement's plan (`as_plan`, without contention); a law in the tests holds them to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torchweft.errors import PlacementError
from torchweft.placement.problem import INF, Matrix, Problem


class Draft:
    """Devices, starts and ends of the ops put so far; -1 is no device yet."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.device = [-1] * problem.num_ops
        self.start_s = [0.0] * problem.num_ops
        self.finish_s = [0.0] * problem.num_ops
        self._starts: list[list[float]] = [[] for _ in problem.devices]
        self._ends: list[list[float]] = [[] for _ in problem.devices]
        self._room = OpenDevices(problem)

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

    def open(self, op: int) -> Sequence[int]:
        """The devices that may run the op, its group and memory considered; may be none."""
        return self._room.open(op)

    def put(self, op: int, device: int, start_s: float | None = None) -> None:
        """Put an op on a device, at a start from `begin_s` (or at the earliest)."""
        start_s = self.begin_s(op, device) if start_s is None else start_s
        finish_s = start_s + self.problem.seconds[op][device]
        at = bisect_right(self._ends[device], start_s)
        self._starts[device].insert(at, start_s)
        self._ends[device].insert(at, finish_s)
        self.device[op], self.start_s[op], self.finish_s[op] = device, start_s, finish_s
        self._room.take(op, device)


class OpenDevices:
    """Which devices are still open to an op: its group's device once that is decided, else those
    that can run the whole group and have room for all that it needs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.left = list(problem.room_bytes)
        self.holds: list[set[int]] = [set() for _ in problem.devices]
        self.group_device: dict[int, int] = {}  # by the group's first op

    def open(self, op: int) -> Sequence[int]:
        """The devices that are open to an op."""
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
