"""`Prices`: what cells cost on each device and values on each link, measured, and kept up to date.

    (cell, device) -> {rows: seconds}      measured by the worker itself, as it runs groups
    (device, device) -> latency, rate      measured with rows that go there and back

What it takes to begin a call is seen in every call. Spans of real runs and copies move the prices:
seconds = measured * drift (see `Drift`), so the table follows a device that slows down or recovers.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from statistics import median
from typing import Any

import torch
from torch import Tensor

from torchweft.plan.machine import Costs, CostTable, Device, Lane, Link, Machine
from torchweft.run.workers.cell import Cell
from torchweft.run.workers.pool import WorkerPool
from torchweft.run.workers.program import HOME, Drawing, body_of

ROWS = (1, 2, 8, 64)  # one row takes other kernels than two
REPEATS = 5
MEMORY_BYTES_PER_S, OVERHEAD_S = 4e9, 2e-5
PROBE_BYTES = (1_000, 1_000_000)
START_GROUPS = 10
FOLLOW = 0.3  # how far one call moves what has changed
STEADY = 0.1  # how far it moves what has not
LAST = 3  # calls
MOVED = 1.25
FADE = 0.99  # of the seconds that cells count by, with all that is seen of their device
FROM = "from "
Key = tuple[str, str]  # (cell, device); of a link (FROM + source, target)


class Drift(dict[Key, float]):
    """How far real runs have moved from what was measured: factors by (cell, device); a pair that
    is not in it has not moved. `epoch` changes when plans are out of date.

    A call moves a factor a part of the way (in logarithms) to the median of what the last calls
    saw: on a busy machine single runs are late by any factor. It is a small part, so that noise
    evens out, and a larger one while all the last calls were a quarter off on the same side. Plans
    are out of date once the work of a device, all its cells by the seconds they take, costs a
    quarter more or less than when they were made. One noisy cell does not throw all plans away;
    one that slows down for good and matters does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.settled: dict[Key, float] = {}
        self.spent_s: dict[Key, float] = {}
        self.seen: dict[Key, deque[float]] = {}

    def saw(self, key: Key, ratio: float, seconds: float) -> None:
        """Runs took these seconds, `ratio` times what they were expected to take."""
        before = self.get(key, 1.0)
        seen = self.seen.setdefault(key, deque(maxlen=LAST))
        seen.append(before * ratio)
        off = min(seen) > MOVED * before or max(seen) * MOVED < before
        self[key] = before * (median(seen) / before) ** (FOLLOW if off else STEADY)
        self.settled.setdefault(key, 1.0)
        self.spent_s[key] = self.spent_s.get(key, 0.0) + seconds
        beside = [other for other in self.spent_s if other[1] == key[1]]
        moved = total_s = 0.0
        for other in beside:
            self.spent_s[other] *= FADE
            total_s += self.spent_s[other]
            moved += self.spent_s[other] * math.log(self[other] / self.settled[other])
        if abs(moved) > total_s * math.log(MOVED):
            self.settled.update((other, self[other]) for other in beside)
            self.epoch += 1

    def forget(self, device: str, *tables: dict[Key, Any]) -> None:
        """Forget a device, and the links from and to it; in other tables too."""
        own: tuple[dict[Key, Any], ...] = (self, self.settled, self.spent_s, self.seen)
        for known in (*own, *tables):
            for key in [key for key in known if device in (key[0].removeprefix(FROM), key[1])]:
                del known[key]


class Prices:
    """Measured seconds of cells and links, with their drift."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.seconds: dict[tuple[str, str], dict[int, float]] = {}
        self.drift = Drift()
        self.links: dict[tuple[str, str], Link] = {}
        self.write_s: float | None = None  # of the driver, for one group
        self.read_s: dict[str, float] = {}
        self.ran: set[str] = set()  # devices that have run something since the last look around

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
        for name, runs_of in seen.items():
            ratio = self.ratio((name, device), runs_of)
            self.drift.saw((name, device), ratio, sum(seconds for seconds, _ in runs_of))

    def started(
        self, written: Mapping[str, tuple[int, float]], read_s: Mapping[str, float]
    ) -> None:
        """A call began. written: by device the groups of its part and the seconds until the driver
        had written and sent it, one after another; read_s: from then until its first group (less
        than nothing where a device is at work before the driver is back)."""
        num_units = sum(_units(num) for num, _ in written.values())
        self.write_s = followed(self.write_s, max(s for _, s in written.values()) / num_units)
        for device, seconds in read_s.items():
            seconds /= _units(written[device][0])
            self.read_s[device] = followed(self.read_s.get(device), seconds)

    def start_s(self, device: str) -> float:
        """Seconds to begin, for each group of a device."""
        return max(0.0, (self.write_s or 0.0) + self.read_s.get(device, 0.0))

    def carried(self, source: str, target: str, copies: Iterable[tuple[int, float]]) -> None:
        """The copies of a call over a link, as (bytes, seconds): the drift follows."""
        key, link = (FROM + source, target), self.links[source, target]
        ratio = self.ratio(key, [(s, link.copy_s(size)) for size, s in copies])
        self.drift.saw(key, ratio / self.drift.get(key, 1.0), 0.0)

    def ratio(self, key: Key, runs: Sequence[tuple[float, float]]) -> float:
        """How far the runs of a key were off, as (seconds seen, seconds priced), all together."""
        took_s, priced_s = map(sum, zip(*runs, strict=True))
        ratio: float = max(1e-9, took_s) / priced_s
        return ratio

    def measure(self, cell: Cell, device: str, weights: Sequence[Tensor]) -> None:
        """Measure a cell on a device, with weights of these shapes; none are sent. If it was
        measured before, the drift follows, as after runs."""
        key, room = (cell.name, device), self.pool.mates[device].spot.memory_bytes
        need = sum(weight.nbytes for weight in weights)
        if cell.kind != "calls" or (room is not None and need > room):
            return
        shapes = [[list(weight.shape), str(weight.dtype)] for weight in weights]
        ask = {"kind": "measure", "cell": cell.to_data(), "weights": shapes}
        answer, _ = self.pool.ask(device, {**ask, "rows": ROWS, "repeats": REPEATS})
        measured = dict(zip(ROWS, answer["seconds"], strict=True))
        if key in self.seconds:
            self.saw(device, [(cell, num_rows, seconds) for num_rows, seconds in measured.items()])
        else:
            self.seconds[key] = measured

    def measure_links(self) -> None:
        """Measure every link that is not known yet, over its real way."""
        names = self.pool.names
        for name in names:
            small, large = (self._around([name], size) / 2 for size in PROBE_BYTES)
            for pair in ((HOME, name), (name, HOME)):
                self.links.setdefault(pair, _link(*pair, small, large))
        for one, other in permutations(names, 2):
            if (one, other) not in self.links:
                times, legs = [], (self.links[HOME, one], self.links[other, HOME])
                for size in PROBE_BYTES:
                    legs_s = sum(link.copy_s(size) for link in legs)
                    times.append(max(1e-6, self._around([one, other], size) - legs_s))
                self.links[one, other] = _link(one, other, *times)

    def _around(self, way: Sequence[str], num_bytes: int) -> float:
        """Seconds of rows from home over these devices and back, the median of several."""
        rows, times = torch.zeros(num_bytes, dtype=torch.uint8), []
        for _ in range(9):
            began_s = time.perf_counter()
            self.pool.ask(way[0], {"kind": "echo", "way": [*way[1:], HOME]}, [rows])
            times.append(time.perf_counter() - began_s)
        return median(times)

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

    def forget(self, device: str) -> None:
        """Forget a device that is gone: a new worker of that name is another one."""
        self.read_s.pop(device, None)
        self.drift.forget(device, self.links, self.seconds)


def _between(measured: Mapping[int, float], rows: int) -> float:
    """Linear between measured points and beyond the last."""
    points = tuple(measured.items())
    at = min(max(1, bisect_left(points, (rows, 0.0))), len(points) - 1)
    (low, low_s), (high, high_s) = points[at - 1], points[at]
    return max(min(low_s, high_s), low_s + (high_s - low_s) * (rows - low) / (high - low))


def _units(num_groups: int) -> int:
    """A call costs as much to begin as some groups, and each of its groups."""
    return START_GROUPS + num_groups


def followed(before_s: float | None, seconds: float) -> float:
    """What is known of some seconds, moved towards those seen now."""
    return seconds if before_s is None else before_s + FOLLOW * (seconds - before_s)


def _link(source: str, target: str, small_s: float, large_s: float) -> Link:
    small, large = PROBE_BYTES
    rate = (large - small) / max(1e-7, large_s - small_s)
    return Link(source, target, rate, max(1e-6, small_s - small / rate))
