"""The `Bound`: seconds that no plan of a graph can beat in a context, on a machine, at these costs.

    graph, context, machine, costs --bound--> Bound: seconds, and what they are made of

It holds for every plan that a strategy can write and `lower` lowers, whatever its parts, order,
lanes and merged runs, as `simulate` times it with contention; kernels of users are left out. A run
is an op over some rows; the runs of an op that may be split share the batch. What is used:

    path      A run ends before runs of later ops on the same rows start. So each row has to go
              through a chain of runs, each at least as long as the op's shortest run of any size.
    load      A resource does no more work in a time than its capacity allows, a lane no more than
              one step at a time. An op in one run costs its seconds over all rows, in several at
              least what fractions of runs could do (`_split_s`). No work comes before the shortest
              path to it, or after the shortest path from it.
    barriers  An op that runs once, over all rows, and that every other op comes before or behind,
              cuts a call in two. So a network op between two ops that are not split is waited for
              in full; if one of them is split, then that one costs more. A plan chooses which ops
              are barriers. The bound is the least over all choices: a shortest path over the ops.

      |attn0|  reduce  |mlp0| ...     barriers: their seconds add up
      |attn0[0]|attn0[1]|mlp0[0] ...  none: the load of compute, in more runs

Each size of a run is looked at, so costs may fall as rows grow. Above EXACT_ROWS rows steps of
1/256 are; within such a step costs are taken to lie nowhere below both of its ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torchweft.errors import MachineError
from torchweft.plan.context import Context
from torchweft.plan.graph import Graph, Op
from torchweft.plan.machine import Costs, Machine
from torchweft.plan.precedence import precedence

EXACT_ROWS = 1024
STEP = 256
INF = float("inf")
PATH = "path"
HAIR = 0.02


@dataclass(frozen=True)
class Bound:
    """Seconds that no plan can beat.

    parts: what holds a plan up, resource by resource; they add up to `seconds`.
    loads: what each resource (and the longest path) alone would take; each is a bound by itself.
    """

    seconds: float
    parts: tuple[tuple[str, float], ...] = ()
    loads: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """What holds a plan up longest: a resource, a lane, or the longest path."""
        return max(self.parts, key=lambda part: part[1], default=(PATH, 0.0))[0]

    @property
    def share(self) -> float:
        """The share of the seconds that is due to what holds a plan up longest."""
        return dict(self.parts).get(self.name, 0.0) / self.seconds if self.seconds > 0 else 1.0

    def gap(self, reached_s: float) -> float:
        """How far a makespan is above the bound: 0.04 for 4 %."""
        return max(0.0, reached_s / self.seconds - 1.0) if self.seconds > 0 else 0.0

    def sentence(self, reached_s: float, plain_s: float = INF) -> str:
        """What a makespan is worth; `plain_s` is that of the ops one by one, if it is known."""
        room = self.gap(plain_s)
        if room < 0.02:
            least = f"more than {100 * room:.0f} % " if room >= 0.005 else ""
            return f"no strategy can win {least}here: {100 * self.share:.0f} % is {self.name}"
        return f"within {100 * self.gap(reached_s):.0f} % of what any schedule can reach"


def bound(graph: Graph, context: Context, machine: Machine, costs: Costs | None = None) -> Bound:
    """The bound for a graph in a context; the same for every call with equal arguments.

    Raises `MachineError` if no lane takes one of the ops.
    """
    if not graph.ops:
        return Bound(0.0)
    chain = _Chain(graph, _Work(graph, context, machine, costs or Costs(machine)))
    seconds, parts = chain.shortest()
    loads = sorted(chain.loads(), key=lambda load: -load[1])
    if loads[0][1] > seconds:  # a link, which the walk over barriers does not look at
        seconds, parts = loads[0][1], {loads[0][0]: loads[0][1]}
    return Bound(seconds, tuple(sorted(parts.items(), key=lambda part: -part[1])), tuple(loads))


class _Way(NamedTuple):
    """A way to run an op: a device, its thread's lane, and how."""

    device: str
    lane: str  # that runs it, or issues and completes it
    host_s: float  # to issue it, and again to complete it; 0: the lane runs it itself
    pace: float  # its rate when it is alone
    hosted: bool


class _Group(NamedTuple):
    """Something that can do only so much at once: a resource of some devices, or some lanes."""

    name: str
    capacity: float
    asks: Callable[[Op, _Way], tuple[float, float]]  # of a run: a factor of its seconds, and more
    in_flight: bool  # asked for between issue and complete, not by them


class _Load(NamedTuple):
    """What an op asks of a group: in one run, in two or more, and how far from its own ends."""

    once_s: float
    split_s: float
    margin_s: float


_NO_LOAD = _Load(0.0, 0.0, 0.0)


class _Work:
    """Seconds of ops over sizes of runs, and what they ask of each group."""

    def __init__(self, graph: Graph, context: Context, machine: Machine, costs: Costs) -> None:
        self.graph, self.context, self.machine, self.costs = graph, context, machine, costs
        self.batch = int(context.batch)
        self.splits = graph.batch is not None and self.batch > 1
        self.grid = _grid(self.batch, costs) if self.splits else [self.batch]
        self.ways = {op.name: self._ways(op) for op in graph.ops}
        self.groups = [*self._resources(), *self._lanes()]
        self._keys = {op.name: self._key(op) for op in graph.ops}
        self._known: dict[object, list[float]] = {}
        self._loads: dict[object, _Load] = {}

    def once(self, op: Op) -> bool:
        """Whether every plan runs it over all rows at once."""
        return op.whole or not self.splits

    def seconds(self, op: Op, device: str) -> list[float]:
        """Seconds of a run, for each size of the grid (for the last alone if it runs once)."""
        key = self._keys[op.name], device
        if key not in self._known:
            graph, env = self.graph, self.context.env
            rows = self.grid[-1:] if self.once(op) else self.grid
            self._known[key] = [self._run_s(op, env(graph.batch, size), device) for size in rows]
        return self._known[key]

    def _run_s(self, op: Op, env: Mapping[str, int], device: str) -> float:
        """The least seconds of a run: a flight may gain beside compute (`Costs.factors`)."""
        factor = self.costs.factor(self.graph, op, env, device)
        return self.costs.run_s(self.graph, op, env, device) * min(1.0, factor or 1.0)

    def whole_s(self, op: Op) -> float:
        """The least seconds from the start to the end of one run over all rows."""
        alone = min(self._last(op, way) for way in self.ways[op.name])
        return max(alone, *(self.load(op, group).once_s for group in self.groups))

    def least_s(self, op: Op) -> float:
        """The least seconds of a run of any size."""
        return min(
            min(self.seconds(op, way.device)) / way.pace + 2 * way.host_s
            for way in self.ways[op.name]
        )

    def load(self, op: Op, group: _Group) -> _Load:
        """What all runs of an op ask of a group at least, in seconds of the whole group."""
        ways = self.ways[op.name]
        asked = tuple((way.device, *group.asks(op, way)) for way in ways)
        if any(factor == more == 0 for _, factor, more in asked):
            return _NO_LOAD
        key = self._keys[op.name], asked, group.capacity, group.in_flight
        if key not in self._loads:
            tables = [[f * s + more for s in self.seconds(op, d)] for d, f, more in asked]
            amounts = [min(column) for column in zip(*tables, strict=True)]
            split = amounts[-1] if self.once(op) else _split_s(self.grid, amounts)
            margin_s = min(way.host_s for way in ways) if group.in_flight else 0.0
            each = amounts[-1] / group.capacity, split / group.capacity, margin_s
            self._loads[key] = _Load(*each)
        return self._loads[key]

    def lead_s(self, op: Op, before: Iterable[Op]) -> float:
        """The least seconds between the last end of what it comes behind and its start: until a
        value is on its device, or (of a first op) until that device begins."""
        devices, makers = {way.device for way in self.ways[op.name]}, list(before)
        if makers:
            return min(self._way_s(op, maker, devices) for maker in makers)
        home, inputs = self.machine.lanes[0].device, set(self.graph.inputs)
        needs = [name for name in op.touched if name in inputs]
        return min(
            max(self.costs.begin_s(d), *(self.send_s(name, home, d, least=False) for name in needs))
            if needs
            else self.costs.begin_s(d)
            for d in devices
        )

    def send_s(self, name: str, source: str, target: str, *, least: bool) -> float:
        """Seconds of a copy of a value: of the whole of it, or of its quickest piece."""
        if source == target:
            return 0.0
        seconds = self.pieces_s(name, source, target)
        return min(seconds) if least else seconds[-1]

    def pieces_s(self, name: str, source: str, target: str) -> list[float]:
        """Seconds of a copy of a value, for each size of the grid."""
        value, env = self.graph.value[name], self.context.env
        rows = self.grid if value.batch is not None else self.grid[-1:]
        sizes = [max(0, value.bytes.evaluate(env(self.graph.batch, row))) for row in rows]
        try:
            return [self.costs.send_s(name, size, source, target) for size in sizes]
        except MachineError:  # nothing joins the two: no plan can send it
            return [0.0]

    def _way_s(self, op: Op, maker: Op, devices: set[str]) -> float:
        sources = {way.device for way in self.ways[maker.name]}
        names = [name for name in maker.makes if name in op.touched]
        ways = [
            max((self.send_s(name, source, target, least=True) for name in names), default=0.0)
            for source in sources
            for target in devices
        ]
        return min(ways)

    def _last(self, op: Op, way: _Way) -> float:
        return self.seconds(op, way.device)[-1] / way.pace + 2 * way.host_s

    def _ways(self, op: Op) -> list[_Way]:
        """The ways to run an op. Raises `MachineError` if there is none."""
        self.machine.lane_for(op)
        ways = []
        for lane in self.machine.lanes_for(op):
            device = self.machine.device[lane.device]
            share = device.network_share if op.uses == "network" else 0.0
            pace = min(1.0, device.capacity / share) if share > 0 else 1.0
            pace = pace if op.uses == "network" else min(1.0, device.capacity)
            host_s = self.costs.host_s(lane.device) if lane.via else 0.0
            ways.append(_Way(lane.device, lane.via or lane.name, host_s, pace, bool(lane.via)))
        return list(dict.fromkeys(ways))

    def _resources(self) -> list[_Group]:
        """Compute, memory, network and io of each device, and of all devices together."""
        devices = self.machine.devices
        sets = [(device,) for device in devices] + ([devices] if len(devices) > 1 else [])
        groups = []
        for some in sets:
            names = {device.name for device in some}
            known = self.costs.factors.entries  # op by op: some may not slow anybody down
            shares = {d.name: d.network_share if known else d.eaten for d in some}
            for uses in dict.fromkeys(op.uses for op in self.graph.ops):
                where = f"{some[0].name} " if len(some) < len(devices) else ""
                capacity = sum(1.0 if uses == "network" else d.capacity for d in some)
                asks = _asks_resource(uses, names, shares)
                groups.append(_Group(f"{where}{uses}", capacity, asks, in_flight=True))
        return groups

    def _lanes(self) -> list[_Group]:
        """The lanes that can run or issue the same ops, and all of those lanes together."""
        sets = [frozenset(way.lane for way in ways) for ways in self.ways.values()]
        sets = list(dict.fromkeys([*sets, frozenset[str]().union(*sets)]))
        return [
            _Group(f"lane {' or '.join(sorted(some))}", len(some), _asks_lane(some), False)
            for some in sets
        ]

    def _key(self, op: Op) -> object:
        """Equal keys, equal seconds: asked once for equal ops, unless costs have a way of their
        own to tell them apart."""
        if not self.splits or type(self.costs).run_s is not Costs.run_s:
            return self.costs.alike(self.graph, op) or op.name
        graph, names = self.graph, op.touched + op.makes
        roots = list(dict.fromkeys(graph.root[name] for name in names))
        values = [graph.value[name] for name in names]
        places = [roots.index(graph.root[name]) for name in names]
        shapes = tuple((v.shape, v.dtype, v.alias_of is None) for v in values)
        kind = op.collective.kind if op.collective else ""
        counts = len(op.reads), len(op.mutates), len(op.makes)
        return op.body or op.name, op.uses, op.whole, op.flops, kind, shapes, (*places, *counts)


def _asks_resource(
    uses: str, names: set[str], shares: dict[str, float]
) -> Callable[[Op, _Way], tuple[float, float]]:
    def asks(op: Op, way: _Way) -> tuple[float, float]:
        if way.device not in names:
            return 0.0, 0.0
        eats = uses == "compute" and op.uses == "network"
        return (1.0 if op.uses == uses else shares[way.device] if eats else 0.0), 0.0

    return asks


def _asks_lane(names: frozenset[str]) -> Callable[[Op, _Way], tuple[float, float]]:
    def asks(op: Op, way: _Way) -> tuple[float, float]:
        if way.lane not in names:
            return 0.0, 0.0
        return (0.0, 2 * way.host_s) if way.hosted else (1.0, 0.0)

    return asks


def _grid(batch: int, costs: Costs) -> list[int]:
    """The sizes of runs that are looked at: all of them, or steps that grow with the size."""
    if batch <= EXACT_ROWS:
        return list(range(1, batch + 1))
    measured = {rows for _, _, points in costs.table.entries for rows, _ in points}
    sizes = {row for row in measured if 0 < row < batch}
    sizes |= {batch // 2, (batch + 1) // 2, batch - 1, batch}
    size = 1
    while size < batch:
        sizes.add(size)
        size += max(1, size // STEP)
    return sorted(sizes)


def _split_s(grid: Sequence[int], amounts: Sequence[float]) -> float:
    """The least that two or more runs, each smaller than the batch, together ask for.

    Runs of all sizes may be taken in fractions, as long as they have all rows and are two or more
    in number: a relaxation. Its optimum is k runs of batch/k rows, at the amounts of the lower
    convex hull: at two runs, or at the size whose amount a row is least if that is smaller.
    """
    batch = grid[-1]
    points = list(zip(grid[:-1], amounts[:-1], strict=True))
    for (low, low_s), (high, high_s) in pairwise(list(points)):
        if high - low > 1:  # sizes in between, taken to ask for no less than both ends
            least = min(low_s, high_s)
            points += [(low + 1, least), (high - 1, least)]
    points.sort()
    best = min(points, key=lambda point: point[1] / point[0])
    if 2 * best[0] <= batch:
        return batch * best[1] / best[0]
    hull: list[tuple[int, float]] = []
    for x, y in points:
        while len(hull) > 1 and _above(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    half = batch / 2
    for (low, low_s), (high, high_s) in pairwise(hull):
        if low <= half <= high:
            if high == low:
                return 2 * min(low_s, high_s)
            return 2 * (low_s + (high_s - low_s) * (half - low) / (high - low))
    return 2 * min(y for _, y in hull)


def _above(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    (x1, y1), (x2, y2), (x3, y3) = first, middle, last
    return (y2 - y1) * (x3 - x1) >= (y3 - y1) * (x2 - x1)


_Block = list[tuple[int, float, float, float]]
"""Some ops, and what they ask of groups: group, earliest start, seconds, least time afterwards."""


class _Chain:
    """The ops as a row: those that may be barriers, and the others between them."""

    def __init__(self, graph: Graph, work: _Work) -> None:
        self.graph, self.work = graph, work
        self.before = _op_precedence(graph, 2 if work.splits else 1)
        self.barriers, self.gaps = _cut_at_barriers(graph, self.before)
        self.least = {op.name: work.least_s(op) for op in graph.ops}
        self.lead = {
            op.name: work.lead_s(op, [graph.op[name] for name in self.before[op.name]])
            for op in graph.ops
        }
        self._find_paths()
        self.path_s = max(map(self.end, graph.op))
        blocks = [self._block(gap, split=False) for gap in self.gaps]
        middles = [self._block([op], split=True) for op in self.barriers]
        self.blocks = [blocks[0]]
        for middle, gap in zip(middles, blocks[1:], strict=True):
            self.blocks += [middle, gap]

    def _find_paths(self) -> None:
        """Of each op the earliest start, and the least seconds behind its end."""
        self.start = dict[str, float]()
        self.rest = dict.fromkeys(self.graph.op, 0.0)
        for op in self.graph.ops:
            ends = [self.end(name) for name in self.before[op.name]]
            self.start[op.name] = max(ends, default=0.0) + self.lead[op.name]
        for op in reversed(self.graph.ops):
            here = self.rest[op.name] + self.least[op.name] + self.lead[op.name]
            for name in self.before[op.name]:
                self.rest[name] = max(self.rest[name], here)

    def end(self, name: str) -> float:
        return self.start[name] + self.least[name]

    def loads(self) -> list[tuple[str, float]]:
        """What each group, each link and the longest path take by themselves."""
        loads = {PATH: self.path_s}
        for number, start, seconds, rest in self._block(self.graph.ops, split=False):
            loads[self.work.groups[number].name] = start + seconds + rest
        for (source, target), seconds in self._crossings().items():
            loads[f"{source} to {target}"] = seconds
        return list(loads.items())

    def shortest(self) -> tuple[float, dict[str, float]]:
        """The least seconds over all choices of barriers, and what they are due to."""
        count = len(self.barriers)
        reached = [0.0] + [INF] * (count + 1)  # before all, behind each barrier, behind all
        back: list[tuple[int, str]] = [(0, "")] * (count + 2)
        for at in range(count + 1):
            for until, seconds, name in self._segments(at):
                if reached[at] + seconds < reached[until]:
                    reached[until], back[until] = reached[at] + seconds, (at, name)
            if at < count:
                reached[at + 1] += self._turn_s(self.barriers[at])
        parts: dict[str, float] = {}
        until, seconds = count + 1, reached[count + 1]
        while until:
            at, name = back[until]
            turn_s = self._turn_s(self.barriers[until - 1]) if until <= count else 0.0
            if turn_s:
                uses = self.barriers[until - 1].uses
                parts[uses] = parts.get(uses, 0.0) + turn_s
            if (between := reached[until] - turn_s - reached[at]) > 1e-12 * seconds:
                parts[name] = parts.get(name, 0.0) + between
            until = at
        return seconds, parts

    def _turn_s(self, op: Op) -> float:
        return self.lead[op.name] + self.work.whole_s(op)

    def _segments(self, at: int) -> Iterable[tuple[int, float, str]]:
        """From behind barrier `at` (0: from the start) to before each later one (the last: to the
        end), with no barrier in between: the least seconds, and what they are due to."""
        num_groups, count = len(self.work.groups), len(self.barriers)
        begin = self.end(self.barriers[at - 1].name) if at else 0.0
        done, opened, closed = [0.0] * num_groups, [-INF] * num_groups, [-INF] * num_groups
        for until in range(at + 1, count + 2):
            first = 2 * at if until == at + 1 else 2 * until - 3
            for block in self.blocks[first : 2 * until - 1]:
                for group, start, seconds, rest in block:
                    opened[group] = max(opened[group], start - begin - done[group])
                    done[group] += seconds
                    closed[group] = max(closed[group], opened[group] + done[group] + rest)
            if until <= count:
                op = self.barriers[until - 1].name
                path_s = self.start[op] - self.lead[op] - begin
                rest_s = self.rest[op] + self.least[op] + self.lead[op]
            else:
                path_s, rest_s = self.path_s - begin, 0.0
            load_s = max(closed)
            if load_s - rest_s > path_s:
                # Named by the first that is as long but for a hair: resources before lanes.
                name = next(i for i, end in enumerate(closed) if end >= load_s - HAIR * load_s)
                yield until, load_s - rest_s, self.work.groups[name].name
            else:
                yield until, max(0.0, path_s), PATH
            if until <= count and self.work.once(self.barriers[until - 1]):
                return

    def _block(self, ops: Iterable[Op], *, split: bool) -> _Block:
        asked: _Block = []
        for number, group in enumerate(self.work.groups):
            start, total, rest = INF, 0.0, INF
            for op in ops:
                load = self.work.load(op, group)
                seconds = load.split_s if split else min(load.once_s, load.split_s)
                if seconds > 0:
                    start = min(start, self.start[op.name] + load.margin_s)
                    rest = min(rest, self.rest[op.name] + load.margin_s)
                    total += seconds
            if total > 0:
                asked.append((number, start, total, rest))
        return asked

    def _crossings(self) -> dict[tuple[str, str], float]:
        """The load of each link by values that are made on one device and needed on another,
        whatever a plan does."""
        work, home = self.work, self.work.machine.lanes[0].device
        loads: dict[tuple[str, str], float] = {}
        for name, readers in self.graph.readers.items():
            maker = self.graph.maker.get(name)
            sources = {way.device for way in work.ways[maker.name]} if maker else {home}
            needed = [{way.device for way in work.ways[op.name]} for op in readers]
            for target in sorted({min(some) for some in needed if len(some) == 1}):
                if len(sources) == 1 and target not in sources:
                    source = min(sources)
                    seconds = work.pieces_s(name, source, target)
                    least = seconds[-1]
                    if maker is not None and not work.once(maker) and len(seconds) > 1:
                        least = min(least, _split_s(work.grid, seconds))
                    loads[source, target] = loads.get((source, target), 0.0) + least
        return loads


def _op_precedence(graph: Graph, num_parts: int) -> dict[str, list[str]]:
    """The ops that each op comes behind, row by row at least."""
    before: dict[str, dict[str, None]] = {op.name: {} for op in graph.ops}
    for (name, _), ahead in precedence(graph, num_parts).items():
        before[name].update((other, None) for other, _ in ahead if other != name)
    return {name: list(ahead) for name, ahead in before.items()}


def _cut_at_barriers(graph: Graph, before: dict[str, list[str]]) -> tuple[list[Op], list[list[Op]]]:
    """The ops that all others come before or behind, and the others between each two of them."""
    bit = {op.name: 1 << number for number, op in enumerate(graph.ops)}
    ahead: dict[str, int] = {}
    behind = dict.fromkeys(bit, 0)
    for op in graph.ops:
        ahead[op.name] = 0
        for name in before[op.name]:
            ahead[op.name] |= ahead[name] | bit[name]
    for op in reversed(graph.ops):
        for name in before[op.name]:
            behind[name] |= behind[op.name] | bit[op.name]
    all_ops = sum(bit.values())
    barriers = [o for o in graph.ops if ahead[o.name] | behind[o.name] | bit[o.name] == all_ops]
    gaps: list[list[Op]] = [[] for _ in range(len(barriers) + 1)]
    chosen = {op.name for op in barriers}
    for op in graph.ops:
        if op.name not in chosen:
            gaps[sum(1 for other in barriers if ahead[op.name] & bit[other.name])].append(op)
    return barriers, gaps
