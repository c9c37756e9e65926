"""The `Problem`: a graph, a machine and costs made numbers once, for planners to work on; what no
placement of it can beat (`bound_s`).

    graph, machine, costs --graph_problem--> Problem --planner--> Placement

              dev0  dev1                                 edges: source -> target, bytes
    seconds   1.0   1.6     op 0, inf: may not run       links: latency + bytes * seconds a byte
              0.4   0.6     op 1                         holds: bytes, and the ops that need them

The model, the same for every planner, bound, checker and simulation here:

    devices   run one op at a time, each for its seconds, without a break
    links     are free of contention: a value leaves when it is made and arrives after latency +
              bytes / rate, whatever else is under way, beside all computing
    values    go once to each device that needs them, however many ops read them there
    memory    a device holds, to the end, all that any op on it needs: weights, what it makes, what
              it is sent; each once. Their sum must not be above its room

Objectives: *latency*, the makespan of one input; *throughput*, the period of a stream of inputs,
which is the busiest device or link (in a stream a link carries one value at a time).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torchweft.errors import PlacementError, clip, unknown
from torchweft.plan.graph import Graph, check_name

OBJECTIVES = ("latency", "throughput")
MAX_OPS, MAX_DEVICES = 20_000, 256
INF = math.inf
Matrix = tuple[tuple[float, ...], ...]


class Edge(NamedTuple):
    """A value that one op makes and another reads; without a value: only an order."""

    source: int
    target: int
    num_bytes: int = 0
    value: str = ""


class Hold(NamedTuple):
    """Bytes that a device holds as soon as one of these ops is on it."""

    num_bytes: float
    ops: tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """What is to be placed, in numbers. Ops are numbered in an order that every edge follows.

    seconds[op][device]; latency_s and byte_s [source][target]; room_bytes[device] (inf: no limit);
    together: ops that must share a device; ready_s[op][device]: when inputs from outside are there.
    home: the device where those inputs are. A value has one maker and one size.
    """

    name: str
    ops: tuple[str, ...]
    devices: tuple[str, ...]
    seconds: Matrix
    edges: tuple[Edge, ...]
    latency_s: Matrix
    byte_s: Matrix
    holds: tuple[Hold, ...] = ()
    room_bytes: tuple[float, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()
    ready_s: Matrix = ()
    objective: str = "latency"
    home: int = 0
    graph: Graph | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.room_bytes:
            object.__setattr__(self, "room_bytes", (INF,) * len(self.devices))
        if not self.ready_s:
            object.__setattr__(self, "ready_s", ((0.0,) * len(self.devices),) * len(self.ops))
        for fault in _faults(self):
            raise PlacementError(fault)

    @property
    def num_ops(self) -> int:
        return len(self.ops)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @cached_property
    def values(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Every value that an op reads from another: (its maker, bytes, its readers)."""
        readers: dict[str, list[int]] = {}
        for edge in self.edges:
            if edge.value:
                readers.setdefault(edge.value, []).append(edge.target)
        makers = {edge.value: (edge.source, edge.num_bytes) for edge in self.edges}
        return tuple((*makers[value], tuple(ops)) for value, ops in readers.items())

    @cached_property
    def preds(self) -> tuple[tuple[tuple[int, Matrix], ...], ...]:
        """For each op (earlier op, seconds of its slowest value to it by [source][target])."""
        return self._neighbours[0]

    @cached_property
    def succs(self) -> tuple[tuple[tuple[int, Matrix], ...], ...]:
        """For each op (later op, seconds of the slowest value to it by [source][target])."""
        return self._neighbours[1]

    @cached_property
    def _neighbours(self) -> tuple[tuple[tuple[tuple[int, Matrix], ...], ...], ...]:
        largest: dict[tuple[int, int], int] = {}
        for edge in self.edges:
            key = edge.source, edge.target
            largest[key] = max(largest.get(key, 0), edge.num_bytes)
        known, every = dict[int, Matrix](), range(self.num_devices)
        preds: list[list[tuple[int, Matrix]]] = [[] for _ in self.ops]
        succs: list[list[tuple[int, Matrix]]] = [[] for _ in self.ops]
        for (source, target), num_bytes in largest.items():
            if num_bytes not in known:
                known[num_bytes] = tuple(
                    tuple(self.transfer_s(num_bytes, a, b) for b in every) for a in every
                )
            preds[target].append((source, known[num_bytes]))
            succs[source].append((target, known[num_bytes]))
        return tuple(map(tuple, preds)), tuple(map(tuple, succs))

    def transfer_s(self, num_bytes: float, source: int, target: int) -> float:
        """Seconds from when a value is made on one device until it is on another."""
        if source == target:
            return 0.0
        return self.latency_s[source][target] + num_bytes * self.byte_s[source][target]

    @cached_property
    def group(self) -> tuple[tuple[int, ...], ...]:
        """For each op all the ops that must be on its device, itself among them."""
        parent = list(range(self.num_ops))

        def root(op: int) -> int:
            while parent[op] != op:
                parent[op] = op = parent[parent[op]]
            return op

        for ops in self.together:
            for op in ops[1:]:
                parent[root(op)] = root(ops[0])
        members: dict[int, list[int]] = {}
        for op in range(self.num_ops):
            members.setdefault(root(op), []).append(op)
        groups = {first: tuple(ops) for first, ops in members.items()}
        return tuple(groups[root(op)] for op in range(self.num_ops))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every group once, in the order of its first op."""
        return tuple(group for op, group in enumerate(self.group) if group[0] == op)

    @cached_property
    def allowed(self) -> tuple[tuple[int, ...], ...]:
        """For each op the devices that can run all of its group, memory aside."""
        every = range(self.num_devices)
        devices = {
            group: tuple(d for d in every if all(self.seconds[op][d] < INF for op in group))
            for group in self.groups
        }
        return tuple(devices[group] for group in self.group)

    @cached_property
    def others_s(self) -> tuple[tuple[float, ...], ...]:
        """For each op and device the seconds of all that must be with the op; () if nothing must.

        The first op of a group decides for all of it, so a planner weighs these too.
        """
        rows: list[tuple[float, ...]] = []
        for op, group in enumerate(self.group):
            columns = zip(*(self.seconds[other] for other in group if other != op), strict=True)
            rows.append(tuple(map(sum, columns)))
        return tuple(rows)

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """For each op the numbers of the holds that it needs."""
        numbers: list[list[int]] = [[] for _ in self.ops]
        for number, hold in enumerate(self.holds):
            for op in hold.ops:
                numbers[op].append(number)
        return tuple(map(tuple, numbers))

    @cached_property
    def limited(self) -> bool:
        """Whether any device has a memory limit."""
        return any(room < INF for room in self.room_bytes)

    @cached_property
    def free(self) -> bool:
        """Whether any op may go to any device that can run it: no memory limits, no groups."""
        return not self.limited and len(self.groups) == self.num_ops

    def __str__(self) -> str:
        size = f"{self.num_ops} ops, {len(self.edges)} edges, {self.num_devices} devices"
        return f"problem {self.name}: {size}, for {self.objective}"


def _faults(problem: Problem) -> Iterator[str]:
    """What contradicts itself in a problem, or leaves it without an answer; each rule trusts those
    before it."""
    check_name(problem.name, "problem", PlacementError)
    where, num_ops, num_devices = f"problem {problem.name!r}", problem.num_ops, problem.num_devices
    for names, what, limit in (
        (problem.ops, "op", MAX_OPS),
        (problem.devices, "device", MAX_DEVICES),
    ):
        if not 0 < len(names) <= limit:
            yield f"size: {where} must have 1 to {limit} {what}s; got {len(names)}."
        for name in names:
            check_name(name, what, PlacementError)
        if len(set(names)) < len(names):
            yield f"duplicate: {where} has two {what}s of one name."
    if problem.objective not in OBJECTIVES:
        yield f"objective: {unknown('objective', problem.objective, OBJECTIVES)}"
    for matrix, num_rows, what, most in (
        (problem.seconds, num_ops, "seconds", INF),
        (problem.ready_s, num_ops, "ready_s", 1e300),
        (problem.latency_s, num_devices, "latency_s", 1e300),
        (problem.byte_s, num_devices, "byte_s", 1e300),
        ((problem.room_bytes,), 1, "room_bytes", INF),
    ):
        if len(matrix) != num_rows or any(len(row) != num_devices for row in matrix):
            yield f"shape: {what} is not {num_rows} x {num_devices}."
        if wrong := [n for row in matrix for n in row if not 0 <= n <= most]:  # NaN is not, either
            yield f"number: {what} must be numbers from 0 to {most:g}; got {clip(wrong[0])}."
    if not 0 <= problem.home < num_devices:
        yield f"home: must be a device's number, below {num_devices}; got {clip(problem.home)}."
    for edge in problem.edges:
        if not 0 <= edge.source < edge.target < num_ops or not 0 <= edge.num_bytes < 1e30:
            yield f"edge: {clip(edge)} does not lead from an op to a later one."
    sizes = {edge.value: (edge.source, edge.num_bytes) for edge in problem.edges}
    for edge in problem.edges:
        if edge.value and sizes[edge.value] != (edge.source, edge.num_bytes):
            yield f"value: {edge.value!r} has two makers or two sizes."
    for ops in (*(hold.ops for hold in problem.holds), *problem.together):
        if not ops or not all(0 <= op < num_ops for op in ops):
            yield f"op: holds and groups have numbers of ops, below {num_ops}; got {clip(ops)}."
    for op, devices in enumerate(problem.allowed):
        if not devices:
            text = f"no device can run op {problem.ops[op]!r} and all that must be with it"
            yield f"device: {text}. Add a device that takes it, or let fewer ops stay together."


def heads(problem: Problem) -> Matrix:
    """For each op and device: no placement ends the op on the device earlier."""
    rows: list[tuple[float, ...]] = []
    every = range(problem.num_devices)
    for op in range(problem.num_ops):
        row = []
        for device in every:
            at_s = problem.ready_s[op][device]
            for source, seconds in problem.preds[op]:
                early_s = rows[source]
                there_s = min(early_s[d] + seconds[d][device] for d in problem.allowed[source])
                at_s = max(at_s, there_s)
            row.append(at_s + problem.seconds[op][device])
        rows.append(tuple(row))
    return tuple(rows)


def tails(problem: Problem) -> Matrix:
    """For each op and device: after the op has ended there, no placement is done sooner.

    This is the optimistic cost table of PEFT.
    """
    rows: list[tuple[float, ...]] = [()] * problem.num_ops
    every = range(problem.num_devices)
    for op in reversed(range(problem.num_ops)):
        row = [0.0] * problem.num_devices
        for target, seconds in problem.succs[op]:
            own, behind, allowed = problem.seconds[target], rows[target], problem.allowed[target]
            left = [(d, own[d] + behind[d]) for d in allowed]
            for device in every:
                away = seconds[device]
                least_s = min(away[d] + left_s for d, left_s in left)
                if least_s > row[device]:
                    row[device] = least_s
        rows[op] = tuple(row)
    return tuple(rows)


def speeds(problem: Problem) -> list[float]:
    """How fast each device is: one over the seconds of all ops that it runs; 0 if they take 0."""
    totals = [
        sum(row[d] for row in problem.seconds if row[d] < INF) for d in range(problem.num_devices)
    ]
    return [1 / total if total > 0 else 0.0 for total in totals]


def load_s(problem: Problem) -> float:
    """The load bound, with equal weights and with weights by how fast each device is."""
    usable = [
        [(d, problem.seconds[op][d]) for d in problem.allowed[op]] for op in range(problem.num_ops)
    ]
    best_s = 0.0
    for weights in ([1.0] * problem.num_devices, speeds(problem)):
        if (whole := sum(weights)) > 0:
            found_s = sum(min(weights[d] * s for d, s in row) for row in usable) / whole
            best_s = max(best_s, found_s)
    return best_s


def bound_s(problem: Problem) -> float:
    """Seconds that no placement of a problem can beat, from paths and from loads; memory is left
    out, it can only make things slower.

        path    an op starts after its slowest input, wherever that was made: the longest way
                through the graph if every device ran any number of ops at once
        load    with weights y of the devices, adding up to 1: sum over ops of min(y * seconds);
                the least busy mix of devices must still do all the work
    """
    if problem.objective == "throughput":
        longest = [
            min(row[d] for d in problem.allowed[op]) for op, row in enumerate(problem.seconds)
        ]
        return max(load_s(problem), *longest)
    early, late = heads(problem), tails(problem)
    path_s = max(
        min(early[op][d] + late[op][d] for d in problem.allowed[op])
        for op in range(problem.num_ops)
    )
    return max(load_s(problem), path_s)
