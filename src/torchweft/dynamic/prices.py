"""`Prices`: what cells cost on each device and values on each link, measured, and kept up to date.

    (cell, device) -> {rows: seconds}      measured by the worker itself, as it runs groups
    (device, device) -> latency, rate      measured with rows that go there and back

What it takes to hand a group to a device counts too. Spans of real runs and copies move the prices:
seconds = measured * drift (see `Drift`), so the table follows a device that slows down or recovers.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchweft.cost import Costs, CostTable
from torchweft.dynamic.cell import Cell
from torchweft.dynamic.drift import FOLLOW, FROM, Drift
from torchweft.dynamic.graphing import HOME, Drawing, body_of
from torchweft.dynamic.pool import Pool
from torchweft.machine import Device, Lane, Link, Machine

ROWS = (1, 8, 64)
REPEATS = 5
MEMORY_BYTES_PER_S, OVERHEAD_S = 4e9, 2e-5
PROBE_BYTES = (1_000, 1_000_000)
START_GROUPS = 10  # a call costs as much to start as so many groups, and each of its groups


class Prices:
    """Measured seconds of cells and links, with their drift."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.seconds: dict[tuple[str, str], dict[int, float]] = {}
        self.drift = Drift()
        self.links: dict[tuple[str, str], Link] = {}
        self.start_s: dict[str, float] = {}
        self.ran: set[str] = set()  # devices that have run something since the last look around

    @property
    def epoch(self) -> int:
        """Changes when prices have moved so far that plans should be made anew."""
        return self.drift.epoch

    def of(self, cell: Cell, num_rows: int, device: str) -> float:
        """Seconds of one run of a cell over so many rows."""
        points = self.seconds.get((cell.name, device))
        if points is None:  # gathers, and cells that nobody has measured
            moved = num_rows * sum(spec.num_bytes for spec in (*cell.reads, *cell.makes))
            slowness = self.pool.mates[device].spot.slowness
            base = (OVERHEAD_S + moved / MEMORY_BYTES_PER_S) * slowness
        else:
            base = _between(sorted(points.items()), num_rows)
        return base * self.drift.get((cell.name, device), 1.0)

    def saw(self, device: str, runs: Iterable[tuple[Cell, int, float]]) -> None:
        """The runs of a call on a device, as (cell, rows, seconds): the drift follows.

        A cell moves once a call, by all its runs together: what few rows are priced too high and
        many too low must not send it up and down.
        """
        self.ran.add(device)
        total: dict[str, tuple[float, float]] = {}
        for cell, num_rows, seconds in runs:
            took_s, priced_s = total.get(cell.name, (0.0, 0.0))
            total[cell.name] = took_s + seconds, priced_s + self.of(cell, num_rows, device)
        for name, (took_s, priced_s) in total.items():
            self.drift.saw((name, device), took_s / priced_s, took_s)

    def started(self, device: str, num_groups: int, seconds: float) -> None:
        """It took so long until a device had begun with so many groups: to write, send and read
        what it is to do. That is so much a group, and as much as some groups for any call."""
        seconds /= num_groups + START_GROUPS
        before_s = self.start_s.get(device, seconds)
        self.start_s[device] = before_s + FOLLOW * (seconds - before_s)

    def carried(self, source: str, target: str, copies: Iterable[tuple[int, float]]) -> None:
        """The copies of a call over a link, as (bytes, seconds): the drift follows."""
        took_s = priced_s = 0.0
        link = self.links[source, target]
        for num_bytes, seconds in copies:
            took_s += seconds
            priced_s += link.latency_s + num_bytes / link.bytes_per_s
        key = FROM + source, target
        self.drift.saw(key, took_s / priced_s / self.drift.get(key, 1.0), 0.0)

    def measure(self, cell: Cell, device: str, weights: Sequence[Tensor]) -> None:
        """Measure a cell on a device, once, with weights of these shapes; none are sent."""
        key, room = (cell.name, device), self.pool.mates[device].spot.memory_bytes
        need = sum(weight.numel() * weight.element_size() for weight in weights)
        if key in self.seconds or cell.kind != "calls" or (room is not None and need > room):
            return
        self.seconds[key] = self._ask(cell, device, weights)

    def measure_again(self, cell: Cell, device: str, weights: Sequence[Tensor]) -> None:
        """Measure a cell that was measured before: the drift follows, as after runs."""
        if (cell.name, device) in self.seconds:
            found = self._ask(cell, device, weights)
            self.saw(device, [(cell, num_rows, seconds) for num_rows, seconds in found.items()])

    def _ask(self, cell: Cell, device: str, weights: Sequence[Tensor]) -> dict[int, float]:
        shapes = [[list(weight.shape), str(weight.dtype)] for weight in weights]
        ask = {"kind": "measure", "cell": cell.to_data(), "weights": shapes}
        answer, _ = self.pool.ask(device, {**ask, "rows": ROWS, "repeats": REPEATS})
        return dict(zip(ROWS, answer["seconds"], strict=True))

    def measure_links(self) -> None:
        """Measure every link that is not known yet, over its real way."""
        names = self.pool.names
        for name in names:
            small, large = (self._around([name], size) / 2 for size in PROBE_BYTES)
            for pair in ((HOME, name), (name, HOME)):
                self.links.setdefault(pair, _link(*pair, small, large))
        for one in names:
            for other in names:
                if one != other and (one, other) not in self.links:
                    times = []
                    for size in PROBE_BYTES:
                        known = self.links[HOME, one], self.links[other, HOME]
                        legs = sum(link.latency_s + size / link.bytes_per_s for link in known)
                        times.append(max(1e-6, self._around([one, other], size) - legs))
                    self.links[one, other] = _link(one, other, *times)

    def _around(self, way: Sequence[str], num_bytes: int) -> float:
        """Seconds of rows from home over these devices and back, the median of several."""
        rows, times = torch.zeros(num_bytes, dtype=torch.uint8), []
        for _ in range(9):
            began_s = time.perf_counter()
            self.pool.ask(way[0], {"kind": "echo", "way": [*way[1:], HOME]}, [rows])
            times.append(time.perf_counter() - began_s)
        return sorted(times)[len(times) // 2]

    def machine(self) -> Machine:
        """The devices that are alive, the caller's first, and their links."""
        names = self.pool.names
        spots = [self.pool.mates[name].spot for name in names]
        devices = (Device(HOME), *(Device(s.name, memory_bytes=s.memory_bytes) for s in spots))
        lanes = (Lane(HOME, HOME, ("io",)), *(Lane(name, name) for name in names))
        alive = {HOME, *names}
        links = [self._link_now(link) for pair, link in self.links.items() if alive >= set(pair)]
        return Machine("workers", devices, lanes, tuple(links))

    def _link_now(self, link: Link) -> Link:
        """A link as it is now: its drift, and what it takes to start a call."""
        factor = self.drift.get((FROM + link.source, link.target), 1.0)
        latency_s = link.latency_s * factor
        if link.source == HOME:
            latency_s += START_GROUPS * self.start_s.get(link.target, 0.0)
        return replace(link, latency_s=latency_s, bytes_per_s=link.bytes_per_s / factor)

    def costs(self, drawing: Drawing, machine: Machine) -> Costs:
        """What the ops of a drawing cost on the devices of a machine."""
        measured: dict[tuple[str, str], Mapping[int, float]] = {("answer", HOME): {0: 1e-6}}
        for group in drawing.groups.values():
            for device in machine.devices[1:]:
                seconds = self.of(group.cell, group.num_rows, device.name)
                start_s = self.start_s.get(device.name, 0.0)
                measured[body_of(group), device.name] = {0: seconds + start_s}
        return Costs(machine, CostTable.of(measured))

    def table(self) -> CostTable:
        """All that was measured, with its drift, as a cost table."""
        return CostTable.of(
            {
                key: {rows: s * self.drift.get(key, 1.0) for rows, s in points.items()}
                for key, points in self.seconds.items()
            }
        )

    def forget(self, devices: Iterable[str]) -> None:
        """Forget devices that are gone: a new worker of that name is another one."""
        gone = set(devices)
        self.links = {pair: link for pair, link in self.links.items() if not gone & set(pair)}
        for name in gone:
            self.start_s.pop(name, None)
        self.drift.forget(gone)
        for key in [key for key in self.seconds if key[1] in gone]:
            del self.seconds[key]


def _between(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Linear between measured points and beyond the last."""
    at = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return max(min(low_s, high_s), low_s + (high_s - low_s) * (rows - low) / (high - low))


def _link(source: str, target: str, small_s: float, large_s: float) -> Link:
    small, large = PROBE_BYTES
    rate = (large - small) / max(1e-7, large_s - small_s)
    return Link(source, target, rate, max(1e-6, small_s - small / rate))
