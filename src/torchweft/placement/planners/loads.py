"""Loads: what each device and link has to do and to hold, kept up to date while groups move.

loads = Loads(problem, devices)        shares the list of devices, and changes it
loads.move(group, device)              all its ops go there; moving back undoes it
loads.fits(), loads.period_s()         within all memory limits? the busiest device or link
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchweft.placement.problem import Problem


class Loads:
    """Bytes on each device; for throughput also the seconds of each device and link."""

    def __init__(self, problem: Problem, devices: list[int]) -> None:
        self.problem, self.devices = problem, devices
        self.used = [0.0] * problem.num_devices
        self.counts: dict[tuple[int, int], int] = {}  # ops that need a hold on a device
        self.busy_s = [0.0] * problem.num_devices
        self.links: dict[tuple[int, int], float] = {}
        self.stream = problem.objective == "throughput"
        readers: dict[tuple[int, int, str], list[int]] = {}
        for edge in problem.edges if self.stream else ():
            if edge.value:
                readers.setdefault((edge.source, edge.num_bytes, edge.value), []).append(
                    edge.target
                )
        self.values = [(key[0], key[1], tuple(targets)) for key, targets in readers.items()]
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
