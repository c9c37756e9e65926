"""`Work`: what a file of another format says, before it meets devices.

    DNN-partitioning JSON, STG, bracketed trees --read--> Work, DevicePool --on_pool--> Problem

Seconds are given for each kind of device (`cpu`, `accelerator`). A `DevicePool` has the devices,
each with its kind, its slowness relative to the file and its memory, and the links between them.
The times of a file, whatever their unit, are read as seconds. A value that takes c seconds from one
device to another becomes c * 2**30 bytes over a link of 1 GiB/s, so that it has a size.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchweft.errors import PlacementError, clip
from torchweft.placement.graph_problem import links
from torchweft.placement.problem import INF, MAX_DEVICES, MAX_OPS, Edge, Hold, Matrix, Problem
from torchweft.plan.graph import NAME
from torchweft.plan.machine import Machine

GIB, MAX_EDGES = 2**30, 200_000


class PoolDevice(NamedTuple):
    """One device of a pool."""

    name: str
    kind: str = "cpu"
    slowness: float = 1.0
    room_bytes: float = INF


class DevicePool(NamedTuple):
    """Devices, and links between them as in a `Problem`."""

    spots: tuple[PoolDevice, ...]
    latency_s: Matrix
    byte_s: Matrix


@dataclass(frozen=True)
class Work:
    """Ops in any order; seconds[kind][op], inf if it cannot run there; edges (source, target,
    seconds)."""

    name: str
    ops: tuple[str, ...]
    seconds: Mapping[str, tuple[float, ...]]
    edges: tuple[tuple[int, int, float], ...]
    num_bytes: tuple[float, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()


def slowness_pool(slowness: Sequence[float]) -> DevicePool:
    """Devices of one kind, slower than the file says by these factors; every value takes its own
    seconds between any two."""
    if not slowness or len(slowness) > MAX_DEVICES or not all(0 < s < 1e9 for s in slowness):
        text = f"give 1 to {MAX_DEVICES} numbers above 0, such as 1,1.6,4, or a count of equal ones"
        raise PlacementError(f"devices: {text}; got {clip(list(slowness))}.", rule="devices")
    spots = tuple(PoolDevice(f"device{n}", slowness=float(s)) for n, s in enumerate(slowness))
    return DevicePool(spots, *gib_links(len(spots), lambda a, b: 1))


def gib_links(num_devices: int, trips: Callable[[int, int], int]) -> tuple[Matrix, Matrix]:
    """Latencies and seconds a byte if a value takes its own seconds times `trips(a, b)` between two
    devices."""
    every = range(num_devices)
    byte_s = tuple(tuple(trips(a, b) / GIB if a != b else 0.0 for b in every) for a in every)
    return ((0.0,) * num_devices,) * num_devices, byte_s


def machine_pool(machine: Machine, kinds: Sequence[str], room_bytes: float = INF) -> DevicePool:
    """The devices of a machine, the fastest of each kind as fast as the file says.

    If the file has accelerators, devices whose names do not start with "cpu" are accelerators;
    those without a memory limit of their own get `room_bytes`.
    """
    kinds_of = {
        name: "accelerator" if "accelerator" in kinds and not name.startswith("cpu") else "cpu"
        for name in machine.device
    }
    fastest: dict[str, float] = {}
    for name, kind in kinds_of.items():
        fastest[kind] = max(fastest.get(kind, 0.0), machine.device[name].flops_per_s)
    spots = []
    for name, kind in kinds_of.items():
        device, room = machine.device[name], room_bytes if kind == "accelerator" else INF
        room = float(device.memory_bytes) if device.memory_bytes is not None else room
        spots.append(PoolDevice(name, kind, fastest[kind] / device.flops_per_s, room))
    return DevicePool(tuple(spots), *links(machine))


def on_pool(work: Work, pool: DevicePool, *, objective: str = "latency") -> Problem:
    """The problem of doing the work on the devices. Raises `PlacementError` for a circle."""
    order = in_order(work.ops, [(source, target) for source, target, _ in work.edges])
    number = {op: at for at, op in enumerate(order)}
    spots, sizes = pool.spots, work.num_bytes
    return Problem(
        name=work.name,
        ops=tuple(work.ops[op] for op in order),
        devices=tuple(spot.name for spot in spots),
        seconds=tuple(
            tuple(work.seconds[spot.kind][op] * spot.slowness for spot in spots) for op in order
        ),
        edges=_edges(work, number),
        latency_s=pool.latency_s,
        byte_s=pool.byte_s,
        holds=tuple(Hold(sizes[op], (at,)) for at, op in enumerate(order) if sizes and sizes[op]),
        room_bytes=tuple(spot.room_bytes for spot in spots),
        together=tuple(tuple(sorted(number[op] for op in ops)) for ops in work.together),
        objective=objective,
    )


def _edges(work: Work, number: Mapping[int, int]) -> tuple[Edge, ...]:
    """Each pair once, with its slowest value; edges of one op and one size carry one value."""
    slowest: dict[tuple[int, int], float] = {}
    for source, target, seconds in work.edges:
        slowest[source, target] = max(slowest.get((source, target), 0.0), seconds)
    names: dict[int, dict[int, str]] = {}
    edges = []
    for (source, target), seconds in sorted(
        slowest.items(), key=lambda item: (number[item[0][0]], number[item[0][1]])
    ):
        num_bytes, known = round(seconds * GIB), names.setdefault(source, {})
        suffix = f".{len(known)}" if known else ""
        value = known.setdefault(num_bytes, f"v.{work.ops[source]}{suffix}")
        edges.append(Edge(number[source], number[target], num_bytes, value))
    return tuple(edges)


def in_order(ops: Sequence[str], pairs: Sequence[tuple[int, int]]) -> list[int]:
    """The ops in an order that respects all (source, target) pairs, otherwise as given.

    Raises `PlacementError` if ops depend on each other in a circle, or if there are too many.
    """
    if len(ops) > MAX_OPS:
        raise PlacementError(f"size: {len(ops)} ops; at most {MAX_OPS} can be placed.")
    if len(pairs) > MAX_EDGES:
        raise PlacementError(f"size: {len(pairs)} edges; at most {MAX_EDGES} can be placed.")
    waiting, behind = [0] * len(ops), [list[int]() for _ in ops]
    for source, target in pairs:
        waiting[target] += 1
        behind[source].append(target)
    ready = [op for op, count in enumerate(waiting) if not count]
    order = []
    while ready:
        order.append(op := heapq.heappop(ready))
        for target in behind[op]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    if len(order) < len(ops):
        stuck = next(op for op, count in enumerate(waiting) if count)
        raise PlacementError(
            f"circle: op {ops[stuck]!r} depends on itself, through the ops that it reads from.",
            rule="circle",
        )
    return order


def as_name(text: str) -> str:
    """A valid name for a problem, made from any text."""
    kept = "".join(c if NAME.fullmatch(f"a{c}") else "_" for c in text)[:100]
    return kept if NAME.fullmatch(kept) else f"graph_{kept}"
