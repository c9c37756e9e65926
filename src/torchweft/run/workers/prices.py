"""`Prices`: what cells cost on each device and values on each link, measured, and kept up to date.

    (cell, device) -> {rows: seconds}      measured by the worker itself, as it runs groups
    (device, device) -> latency, rate      measured with rows that go there and back

What it takes to begin and to end a call, and what messages take from the groups of a device, is
seen in every call. Spans of real runs and copies move the prices: seconds = measured * drift (see
`Drift`), so the table follows a device that slows down or recovers.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchweft.plan.cost import Costs, CostTable
from torchweft.plan.machine import Device, Lane, Link, Machine
from torchweft.run.workers.cell import Cell
from torchweft.run.workers.drift import FOLLOW, FROM, Drift
from torchweft.run.workers.graphing import HOME, Drawing, body_of
from torchweft.run.workers.pool import WorkerPool

ROWS = (1, 2, 8, 64)  # one row takes other kernels than two
REPEATS, NUM_JITTER = 5, 200
MEMORY_BYTES_PER_S, OVERHEAD_S = 4e9, 2e-5
PROBE_BYTES = (1_000, 1_000_000)
START_GROUPS = 10


class Prices:
    """Measured seconds of cells and links, with their drift."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.seconds: dict[tuple[str, str], dict[int, float]] = {}
        self.drift = Drift()
        self.jitter: dict[tuple[str, str], deque[float]] = {}  # of single runs, 1: as the others
        self.links: dict[tuple[str, str], Link] = {}
        self.write_s: float | None = None  # of the driver, for one group
        self.read_s: dict[str, float] = {}
        self.message_s: dict[str, float] = {}  # that one takes from the groups of a device
        self.finish_s = 0.0
        self.ran: set[str] = set()  # devices that have run something since the last look around

    def anew(self) -> Prices:
        """What was measured, without anything that was seen since."""
        found = Prices(self.pool)
        found.seconds, found.links = dict(self.seconds), dict(self.links)
        return found

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
            base = _between(points, num_rows)
        return base * self.drift.get((cell.name, device), 1.0)

    def saw(self, device: str, runs: Iterable[tuple[Cell, int, float]]) -> None:
        """The runs of a call on a device, as (cell, rows, seconds): the drift follows.

        A cell moves once a call, by all its runs together: what few rows are priced too high and
        many too low must not send it up and down.
        """
        self.ran.add(device)
        seen: dict[str, list[tuple[float, float]]] = {}
        known: dict[tuple[str, int], float] = {}
        for cell, num_rows, seconds in runs:
            key = cell.name, num_rows
            if key not in known:
                known[key] = self.of(cell, num_rows, device)
            seen.setdefault(cell.name, []).append((max(0.0, seconds), known[key]))
        for name, found in seen.items():
            ratio = self._jitter((name, device), found)
            self.drift.saw((name, device), ratio, sum(seconds for seconds, _ in found))

    def started(
        self, written: Mapping[str, tuple[int, float]], read_s: Mapping[str, float]
    ) -> None:
        """A call began. written: by device the groups of its part and the seconds until the driver
        had written and sent it, one after another; read_s: from then until its first group (less
        than nothing where a device is at work before the driver is back)."""
        num_units = sum(_units(num) for num, _ in written.values())
        self.write_s = _followed(self.write_s, max(s for _, s in written.values()) / num_units)
        for device, seconds in read_s.items():
            seconds /= _units(written[device][0])
            self.read_s[device] = _followed(self.read_s.get(device), seconds)

    def ended(self, taken_s: Mapping[str, tuple[int, float]], finish_s: float) -> None:
        """A call ended. taken_s: by device its messages and the seconds that they took from its
        groups; finish_s: from when the last rows were home until the call was over."""
        for device, (num, seconds) in taken_s.items():
            if num:
                self.message_s[device] = _followed(self.message_s.get(device), seconds / num)
        self.finish_s = _followed(self.finish_s or None, finish_s)

    def begins_s(self, num_groups: Mapping[str, int]) -> dict[str, float]:
        """When devices begin that have so many groups: the driver writes one part after another,
        in this order, and each device reads its own."""
        found, written_s = {}, 0.0
        for device, num in num_groups.items():
            written_s += (self.write_s or 0.0) * _units(num)
            found[device] = max(0.0, written_s + self.read_s.get(device, 0.0) * _units(num))
        return found

    def start_s(self, device: str) -> float:
        """Seconds to begin, for each group of a device."""
        return max(0.0, (self.write_s or 0.0) + self.read_s.get(device, 0.0))

    def carried(self, source: str, target: str, copies: Iterable[tuple[int, float]]) -> None:
        """The copies of a call over a link, as (bytes, seconds): the drift follows."""
        key, link = (FROM + source, target), self.links[source, target]
        found = [(s, link.latency_s + size / link.bytes_per_s) for size, s in copies]
        ratio = self._jitter(key, found)
        self.drift.saw(key, ratio / self.drift.get(key, 1.0), 0.0)

    def _jitter(self, key: tuple[str, str], found: Sequence[tuple[float, float]]) -> float:
        """All of what was (seen, priced) together, and how far each was from that."""
        took_s, priced_s = map(sum, zip(*found, strict=True))
        ratio: float = max(1e-9, took_s) / priced_s
        jitter = self.jitter.setdefault(key, deque(maxlen=NUM_JITTER))
        jitter.extend(seconds / priced / ratio for seconds, priced in found)
        return ratio

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
            latency_s += START_GROUPS * self.start_s(link.target)
        return replace(link, latency_s=latency_s, bytes_per_s=link.bytes_per_s / factor)

    def costs(self, drawing: Drawing, machine: Machine) -> Costs:
        """What the ops of a drawing cost on the devices of a machine."""
        measured: dict[tuple[str, str], Mapping[int, float]] = {("answer", HOME): {0: 1e-6}}
        for group in drawing.groups.values():
            for device in machine.devices[1:]:
                seconds = self.of(group.cell, group.num_rows, device.name)
                seconds += self.start_s(device.name)
                measured[body_of(group), device.name] = {0: seconds}
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
            self.read_s.pop(name, None)
            self.message_s.pop(name, None)
        self.drift.forget(gone)
        known: dict[tuple[str, str], Any]
        for known in (self.seconds, self.jitter):
            for key in [key for key in known if gone & {key[0].removeprefix(FROM), key[1]}]:
                del known[key]


def _between(measured: Mapping[int, float], rows: int) -> float:
    """Linear between measured points and beyond the last."""
    points = tuple(measured.items())
    at = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return max(min(low_s, high_s), low_s + (high_s - low_s) * (rows - low) / (high - low))


def _units(num_groups: int) -> int:
    """A call costs as much to begin as some groups, and each of its groups."""
    return START_GROUPS + num_groups


def _followed(before_s: float | None, seconds: float) -> float:
    return seconds if before_s is None else before_s + FOLLOW * (seconds - before_s)


def _link(source: str, target: str, small_s: float, large_s: float) -> Link:
    small, large = PROBE_BYTES
    rate = (large - small) / max(1e-7, large_s - small_s)
    return Link(source, target, rate, max(1e-6, small_s - small / rate))
