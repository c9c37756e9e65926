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
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor

from torchweft.plan.context import Context
from torchweft.plan.cost import Costs, CostTable, Env
from torchweft.plan.graph import Graph, Op
from torchweft.plan.machine import Device, Lane, Link, Machine
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.trace import Trace
from torchweft.run.driver.drift import FOLLOW, FROM, Drift, forget
from torchweft.run.workers.cell import Cell
from torchweft.run.workers.graphing import HOME, Drawing, body_of
from torchweft.run.workers.pool import WorkerPool

ROWS = (1, 2, 8, 64)  # one row takes other kernels than two
REPEATS, NUM_JITTER, NUM_DRAWN = 5, 200, 15
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
        prices = Prices(self.pool)
        prices.seconds, prices.links = dict(self.seconds), dict(self.links)
        return prices

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
        for name, runs_of in seen.items():
            ratio = self._jitter((name, device), runs_of)
            self.drift.saw((name, device), ratio, sum(seconds for seconds, _ in runs_of))

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
        begins_s, written_s = {}, 0.0
        for device, num in num_groups.items():
            written_s += (self.write_s or 0.0) * _units(num)
            begins_s[device] = max(0.0, written_s + self.read_s.get(device, 0.0) * _units(num))
        return begins_s

    def start_s(self, device: str) -> float:
        """Seconds to begin, for each group of a device."""
        return max(0.0, (self.write_s or 0.0) + self.read_s.get(device, 0.0))

    def carried(self, source: str, target: str, copies: Iterable[tuple[int, float]]) -> None:
        """The copies of a call over a link, as (bytes, seconds): the drift follows."""
        key, link = (FROM + source, target), self.links[source, target]
        ratio = self._jitter(key, [(s, _copy_s(link, size)) for size, s in copies])
        self.drift.saw(key, ratio / self.drift.get(key, 1.0), 0.0)

    def _jitter(self, key: tuple[str, str], runs: Sequence[tuple[float, float]]) -> float:
        """The ratio of what was (seen, priced), all together; how far each was off is kept."""
        took_s, priced_s = map(sum, zip(*runs, strict=True))
        ratio: float = max(1e-9, took_s) / priced_s
        jitter = self.jitter.setdefault(key, deque(maxlen=NUM_JITTER))
        jitter.extend(seconds / priced / ratio for seconds, priced in runs)
        return ratio

    def measure(self, cell: Cell, device: str, weights: Sequence[Tensor]) -> None:
        """Measure a cell on a device, with weights of these shapes; none are sent."""
        key, room = (cell.name, device), self.pool.mates[device].spot.memory_bytes
        need = sum(weight.nbytes for weight in weights)
        if cell.kind == "calls" and (room is None or need <= room):
            self.seconds[key] = self._ask(cell, device, weights)

    def measure_again(self, cell: Cell, device: str, weights: Sequence[Tensor]) -> None:
        """Measure a cell that was measured before: the drift follows, as after runs."""
        if (cell.name, device) in self.seconds:
            measured = self._ask(cell, device, weights)
            self.saw(device, [(cell, num_rows, seconds) for num_rows, seconds in measured.items()])

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
        for one, other in permutations(names, 2):
            if (one, other) not in self.links:
                times, legs = [], (self.links[HOME, one], self.links[other, HOME])
                for size in PROBE_BYTES:
                    legs_s = sum(_copy_s(link, size) for link in legs)
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

    def rehearse(self, plan: Plan, drawing: Drawing) -> Trace:
        """The trace that a plan of these groups would leave: of several with drawn jitter, the one
        in the middle. The seed is fixed: the same prices, the same trace."""
        machine, draw, traces = self.machine(), Random(0), []
        for _ in range(NUM_DRAWN):
            costs = CallCosts(machine, prices=self, plan=plan, drawing=drawing, draw=draw)
            traces.append(simulate(plan, Context(), machine, costs, contention=False))
        return sorted(traces, key=lambda trace: trace.makespan_s)[NUM_DRAWN // 2]

    def forget(self, device: str) -> None:
        """Forget a device that is gone: a new worker of that name is another one."""
        self.read_s.pop(device, None)
        self.message_s.pop(device, None)
        self.drift.forget(device)
        known: dict[tuple[str, str], Any]
        for known in (self.links, self.seconds, self.jitter):
            forget(known, device)


@dataclass(frozen=True, eq=False, kw_only=True)
class CallCosts(Costs):
    """What a call by a plan costs on workers: the planners' model, with what is known once there
    is a plan, all of it seen in calls before.

        begin      the driver writes one part after another, with the inputs; each device reads its
                   own before it begins
        messages   all that a group sends to one device is one message; it takes time from the
                   groups at both ends, and is that much less on its way
        jitter     single runs and messages are early or late: drawn from those that were seen
        end        what comes home last is followed by the end of the call
    """

    prices: Prices
    plan: Plan
    drawing: Drawing
    draw: Random
    way_s: dict[tuple[str, str], float] = field(default_factory=dict)  # of messages: (op, device)

    @cached_property
    def num_bytes(self) -> Counter[tuple[str, str]]:
        """Bytes of each message."""
        graph, num_bytes = self.plan.graph, Counter[tuple[str, str]]()
        for step in self.plan.steps:
            if step.kind == "copy" and step.on and (maker := graph.maker.get(step.names[0])):
                spec, _, count = self.drawing.blocks[step.names[0]]
                num_bytes[maker.name, step.on] += count * spec.num_bytes
        return num_bytes

    @cached_property
    def num_messages(self) -> Counter[str]:
        """Messages that an op sends, or is the first to need."""
        graph, handled = self.plan.graph, set[tuple[str, str]]()
        num = Counter(op for op, _ in self.num_bytes)
        for step in self.plan.steps:
            if step.kind == "run":
                makers = (graph.maker.get(value) for value in graph.op[step.names[0]].touched)
                needs = {(maker.name, step.lane) for maker in makers if maker is not None}
                new = needs & self.num_bytes.keys() - handled
                num[step.names[0]] += len(new)
                handled |= new
        return num

    @cached_property
    def begins_s(self) -> dict[str, float]:
        """When devices begin."""
        lanes = [step.lane for step in self.plan.steps if step.kind == "run"]
        return self.prices.begins_s(Counter(lane for lane in lanes if lane != HOME))

    def begin_s(self, device: str) -> float:
        """Seconds until a device has its part, and has read it."""
        return self.begins_s.get(device, 0.0)

    def run_s(self, graph: Graph, op: Op, env: Env, device: str = "cpu") -> float:
        """Seconds of a group, with the messages that it sends or needs first."""
        if device == HOME:
            return self.prices.finish_s
        group = self.drawing.groups[op.name]
        seconds = self.prices.of(group.cell, group.num_rows, device)
        seconds *= self._drawn((group.cell.name, device))
        return seconds + self.num_messages[op.name] * self.prices.message_s.get(device, 0.0)

    def send_s(self, value: str, num_bytes: int, source: str, target: str) -> float:
        """Seconds on its way of the message that a value goes with; inputs come with the part."""
        maker = self.plan.graph.maker.get(value)
        if maker is None:
            return 0.0
        message = maker.name, target
        if message not in self.way_s:
            seconds = self.copy_s(self.num_bytes[message], source, target)
            seconds *= self._drawn((FROM + source, target))
            ends_s = sum(self.prices.message_s.get(name, 0.0) for name in (source, target))
            self.way_s[message] = max(0.0, seconds - ends_s)
        return self.way_s[message]

    def _drawn(self, key: tuple[str, str]) -> float:
        seen = self.prices.jitter.get(key)
        return self.draw.choice(seen) if seen else 1.0


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


def _copy_s(link: Link, num_bytes: int) -> float:
    return link.latency_s + num_bytes / link.bytes_per_s


def _link(source: str, target: str, small_s: float, large_s: float) -> Link:
    small, large = PROBE_BYTES
    rate = (large - small) / max(1e-7, large_s - small_s)
    return Link(source, target, rate, max(1e-6, small_s - small / rate))
