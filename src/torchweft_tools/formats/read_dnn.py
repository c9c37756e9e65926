"""DNN-partitioning files: layers or operators with times on CPUs and on accelerators (JSON).

The format of "Efficient Algorithms for Device Placement of DNN Graph Operators" (Tarnawski et al.,
NeurIPS 2020; msr-fiddle/dnn-partitioning on GitHub), where "FPGA" is any accelerator:

    maxFPGAs, maxCPUs      how many accelerators and CPU cores      maxSizePerFPGA   bytes of each
    nodes   id, supportedOnFpga, cpuLatency, fpgaLatency, size (bytes on an accelerator),
            colorClass (optional: equal ones share a device), isBackwardNode; others are notes
    edges   sourceId, destId, cost: seconds between an accelerator and the memory of the CPUs

CPU cores share their memory: a value moves from one to another in no time. From accelerator to
accelerator it moves through that memory, at twice its cost. Only accelerators have limits.
"""

from __future__ import annotations

from typing import Any

from torchweft.errors import PlacementError, clip
from torchweft.placement.problem import INF, MAX_DEVICES, MAX_OPS
from torchweft_tools.formats.reader import Reader
from torchweft_tools.formats.work import DevicePool, PoolDevice, Work, gib_links

MARKS = {"maxFPGAs", "maxCPUs", "nodes", "edges"}
"""A JSON object with one of these fields is a DNN-partitioning file."""


def read_dnn(data: object, name: str) -> tuple[Work, DevicePool]:
    """The work, and the devices that the file asks for.

    Raises `PlacementError` naming the field that is wrong.
    """
    read = Reader(data, PlacementError, "DNN graph")
    nodes, edges = read.take("nodes", list), read.take("edges", list)
    if not 0 < len(nodes) <= MAX_OPS:
        raise read.fail(f"it has {len(nodes)} nodes; 1 to {MAX_OPS} can be placed.")
    numbers: dict[int, int] = {}
    rows = []
    for at, item in enumerate(nodes):
        node = Reader(item, PlacementError, f"node {at}")
        if (key := node.take("id", int)) in numbers:
            raise node.fail(f"another node has the id {key}; ids must be unique.")
        numbers[key] = at
        rows.append(_node(node))
    cpu_s, accelerator_s, sizes, colors = zip(*rows, strict=True)
    classes: dict[int | None, list[int]] = {}
    for at, color in enumerate(colors):
        classes.setdefault(color, []).append(at)
    classes.pop(None, None)
    work = Work(
        name=name,
        ops=tuple(f"n{key}".replace("-", "_") for key in numbers),
        seconds={"cpu": cpu_s, "accelerator": accelerator_s},
        edges=tuple(_edge(item, at, numbers) for at, item in enumerate(edges)),
        num_bytes=sizes,
        together=tuple(tuple(ops) for ops in classes.values() if len(ops) > 1),
    )
    return work, _pool(read)


def _node(node: Reader) -> tuple[float, float, float, int | None]:
    supported = _flag(node, "supportedOnFpga", True)
    accelerator_s = _number(node, "fpgaLatency") if supported else INF
    size = _number(node, "size", 0.0)
    return _number(node, "cpuLatency"), accelerator_s, size, node.take("colorClass", int, None)


def _edge(data: object, at: int, numbers: dict[int, int]) -> tuple[int, int, float]:
    edge = Reader(data, PlacementError, f"edge {at}")
    ends = []
    for field in ("sourceId", "destId"):
        if (key := edge.take(field, int)) not in numbers:
            raise edge.fail(f"{field!r}: there is no node with the id {key}.")
        ends.append(numbers[key])
    if ends[0] == ends[1]:
        raise edge.fail("it leads from a node to itself.")
    return ends[0], ends[1], _number(edge, "cost")


def _pool(read: Reader) -> DevicePool:
    counts = [read.take(field, int) for field in ("maxCPUs", "maxFPGAs")]
    if min(counts) < 0 or not 0 < sum(counts) <= MAX_DEVICES:
        raise read.fail(
            f"there must be 1 to {MAX_DEVICES} devices in all; got {counts[0]} CPUs and "
            f"{counts[1]} accelerators."
        )
    room = _number(read, "maxSizePerFPGA") if counts[1] else INF
    spots = [PoolDevice(f"cpu{n}") for n in range(counts[0])]
    spots += [PoolDevice(f"accelerator{n}", "accelerator", 1.0, room) for n in range(counts[1])]

    def trips(a: int, b: int) -> int:
        return (spots[a].kind == "accelerator") + (spots[b].kind == "accelerator")

    return DevicePool(tuple(spots), *gib_links(len(spots), trips))


def _number(read: Reader, field: str, default: Any = ...) -> float:
    number = read.take(field, (int, float), default)
    if not 0 <= number < 1e18:  # also true of NaN
        raise read.fail(f"the field {field!r} cannot be {clip(number)}.")
    return float(number)


def _flag(read: Reader, field: str, default: bool) -> bool:
    """true, false, 1 or 0."""
    value = read.data.get(field, default)
    if value not in (0, 1) or isinstance(value, float):
        raise read.fail(f"the field {field!r} cannot be {clip(value)}.")
    return bool(value)
