"""Weft's own files, which commands take: graphs, machines, costs, placements, traces, served runs.

    load_graph, load_machine, load_costs, load_measured, load_placement, load_trace, load_served

All are JSON objects whose first field says which they are, and of which version; plans, which are
text, read themselves (`Plan.load`). A file that is none raises the error of its kind, which names
the field that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from torchweft.errors import (
    GraphError,
    MachineError,
    PlacementError,
    WeftError,
    clip,
    unknown,
)
from torchweft.files import write_json
from torchweft.placement.graph_problem import ServedRun, graph_problem
from torchweft.placement.placement import Placement
from torchweft.placement.problem import OBJECTIVES, Problem
from torchweft.plan.graph import Graph, check_name, graph_data
from torchweft.plan.machine import Costs, CostTable, Machine
from torchweft.plan.trace import SPANS, Span, Trace
from torchweft_tools.formats.reader import Reader, read_item, read_json

VERSION = 1  # of every format here
MAX_SPANS = 25_000


def load_graph(path: str | Path) -> Graph:
    """Read a graph file. Raises `GraphError` for a file that is not one."""
    return read_graph(read_json(path, GraphError, "graph"))


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write the graph as a JSON file."""
    write_json(path, graph_data(graph))


def read_graph(data: object) -> Graph:
    """A graph from plain data. Raises `GraphError` naming the field that is wrong."""
    if not isinstance(data, dict) or "weft_graph" not in data:
        raise GraphError("file: this is not a graph: the field 'weft_graph' is missing.")
    if data["weft_graph"] != VERSION:
        raise GraphError(
            f"version: graph format {clip(data['weft_graph'])}; this torchweft reads {VERSION}."
        )
    plain = {name: value for name, value in data.items() if name != "weft_graph"}
    graph: Graph = read_item(Graph, plain, GraphError, communicators=_read_communicators)
    return graph


def _read_communicators(data: Mapping[str, object]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    groups = []
    for name, ranks in data.items():
        if not isinstance(ranks, list) or any(type(rank) is not int or rank < 0 for rank in ranks):
            text = f"communicator {clip(name)}: ranks must be whole numbers, from 0 on"
            raise GraphError(f"file: {text}; got {clip(ranks)}.")
        groups.append((check_name(name, "communicator"), tuple(ranks)))
    return tuple(groups)


def load_machine(path: str | Path) -> Machine:
    """Read a machine file. Raises `MachineError` for a file that is not one."""
    return read_machine(read_json(path, MachineError, "machine"))


def read_machine(data: object) -> Machine:
    """The machine of plain data. Raises `MachineError` for data that is none."""
    read = Reader(data, MachineError, "machine")
    if read.take("weft_machine", int, None) != VERSION:
        raise read.fail(f"this is not a machine file of version {VERSION}.")
    items = {"name": "machine", "devices": [], "lanes": [], **read.data}
    del items["weft_machine"]
    machine: Machine = read_item(Machine, items, MachineError)
    return machine


def save_costs(table: CostTable, path: str | Path) -> None:
    """Write the table as a JSON file."""
    write_json(path, {"weft_costs": VERSION, "entries": table.entries})


def load_costs(path: str | Path) -> CostTable:
    """Read a cost file. Raises `MachineError` for a file that is not one."""
    data = read_json(path, MachineError, "cost")
    if not isinstance(data, dict) or data.get("weft_costs") != VERSION:
        raise MachineError(f"file: {path} is not a cost file of version {VERSION}.")
    return _read_costs(data.get("entries"), f"cost file {path}")


def load_measured(path: str | Path) -> Costs:
    """Read the file of a profile: its costs, on the machine that they were fitted to.

    Raises `MachineError` for a file that is none.
    """
    read = Reader(read_json(path, MachineError, "cost"), MachineError, f"cost file {path}")
    if read.take("weft_costs", int, None) != VERSION or "machine" not in read.data:
        raise read.fail("this is not what `torchweft profile` writes.")
    read.take("about", str, "")
    costs = Costs(
        read_machine(read.take("machine", dict)),
        _read_costs(read.take("entries", list), f"cost file {path}"),
        _seconds(read, "call_s", 0.0),
        _read_costs(read.take("factors", list, []), f"cost file {path}"),
    )
    read.done()
    return costs


def _read_costs(entries: object, where: str) -> CostTable:
    """A table from the entries of a file. Raises `MachineError` if they are none."""
    try:
        rows = [(key, device, tuple(map(tuple, points))) for key, device, points in entries]  # type: ignore[attr-defined]
        return CostTable(tuple(rows))
    except (TypeError, ValueError) as cause:
        raise MachineError(f"file: {where} is damaged: {clip(cause)}.") from None


def placement_data(placement: Placement) -> dict[str, object]:
    """The placement as plain data, ready for JSON."""
    columns = placement.ops, placement.device, placement.start_s, placement.end_s
    rows = [
        {"op": op, "device": placement.devices[at], "start_s": start_s, "end_s": end_s}
        for op, at, start_s, end_s in zip(*columns, strict=True)
    ]
    facts = ("problem", "planner", "objective", "makespan_s", "period_s", "bound_s", "gap")
    plain = {name: getattr(placement, name) for name in (*facts, "optimal", "planning_s")}
    lists = {"devices": list(placement.devices), "placement": rows}
    return {"weft_placement": VERSION, **plain, **lists}


def save_placement(placement: Placement, path: str | Path) -> None:
    """Write the placement as a JSON file."""
    write_json(path, placement_data(placement))


def load_placement(path: str | Path) -> Placement:
    """Read a placement file. Raises `PlacementError` for a file that is none."""
    return read_placement(read_json(path, PlacementError, "placement"))


def read_placement(data: object) -> Placement:
    """A placement from plain data. Raises `PlacementError` naming the field that is wrong."""
    read = Reader(data, PlacementError, "placement")
    if read.take("weft_placement", int, None) != VERSION:
        raise read.fail(f"this is not a placement of version {VERSION}.")
    devices = tuple(check_name(name, "device", PlacementError) for name in read.names("devices"))
    numbers = {name: number for number, name in enumerate(devices)}
    rows = [_row(item, numbers) for item in read.take("placement", list)]
    if not rows or len({row[0] for row in rows}) < len(rows) or len(numbers) < len(devices):
        raise read.fail("it has no ops, or two ops or devices of one name.")
    ops, device, start_s, end_s = zip(*rows, strict=True)
    objective = read.take("objective", str, "latency")
    if objective not in OBJECTIVES:
        raise read.fail(unknown("objective", objective, OBJECTIVES))
    bound_s = read.take("bound_s", (int, float), None)
    return Placement(
        problem=check_name(read.take("problem", str), "problem", PlacementError),
        ops=ops,
        devices=devices,
        device=device,
        start_s=start_s,
        end_s=end_s,
        period_s=_seconds(read, "period_s"),
        objective=objective,
        planner=read.take("planner", str, ""),
        bound_s=None if bound_s is None else _seconds(read, "bound_s"),
        planning_s=_seconds(read, "planning_s", 0.0),
    )


def _row(data: object, numbers: Mapping[str, int]) -> tuple[str, int, float, float]:
    read = Reader(data, PlacementError, "placed op")
    name = check_name(read.take("op", str), "op", PlacementError)
    device = read.take("device", str)
    if device not in numbers:
        raise read.fail(unknown("device", device, numbers))
    start_s, end_s = _seconds(read, "start_s"), _seconds(read, "end_s")
    if end_s < start_s:
        raise read.fail(f"op {name!r} ends before it starts.")
    read.done()
    return name, numbers[device], start_s, end_s


def _seconds(read: Reader, name: str, default: object = ...) -> float:
    number = read.take(name, (int, float), default)
    if not 0 <= number < math.inf:
        raise read.fail(f"{name} must be a number of seconds from 0 on; got {clip(number)}.")
    return float(number)


def load_trace(path: str | Path) -> Trace:
    """Read a trace that was saved as .json. Raises `WeftError` for a file that is none."""
    data = read_json(path, WeftError, "trace")
    return read_trace(data.get("weft_trace") if isinstance(data, dict) else None)


def read_trace(data: object) -> Trace:
    """The trace of plain data. Raises `WeftError` for data that is none."""
    if not isinstance(data, Mapping) or data.get("version") != VERSION:
        raise WeftError(f"file: this is not a Weft trace of version {VERSION}.", rule="file")
    try:
        if len(data["spans"]) > MAX_SPANS:
            raise ValueError(f"it has more than {MAX_SPANS} spans")
        spans = tuple(map(_span, data["spans"]))
        lanes = tuple((str(lane), str(device)) for lane, device in data["lanes"])
        memory = tuple((_size(at_s), int(_size(live))) for at_s, live in data["memory"])
        path = tuple(spans[number] for number in data["critical_path"])
        return Trace(str(data["name"]), spans, memory, data["simulated"] is True, path, lanes)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as cause:
        raise WeftError(f"file: this Weft trace is damaged: {clip(cause)}.", rule="file") from None


def _span(fields: Any) -> Span:
    span = Span(*fields)
    start_s, end_s, _ = map(_size, span[7:])
    good = span.kind in SPANS and all(isinstance(word, str) for word in span[:6])
    if not good or start_s > end_s or (span.parts is not None and len(span.parts) != 2):
        raise ValueError(f"a span cannot be {clip(fields)}")
    return span._replace(parts=span.parts and (int(span.parts[0]), int(span.parts[1])))


def _size(number: Any) -> float:
    if type(number) not in (int, float) or not 0 <= number < math.inf:
        raise ValueError(f"a time or a size cannot be {clip(number)}")
    return number  # type: ignore[no-any-return]


def load_served(path: str | Path) -> ServedRun:
    """Read a served run. Raises `WeftError` for a file that is none, naming what is wrong."""
    read = Reader(read_json(path, PlacementError, "served"), PlacementError, f"served {path}")
    if read.take("weft_served", int, None) != VERSION:
        raise read.fail(f"this is not a served run of version {VERSION}.")
    served = ServedRun(
        read_graph(read.take("graph", dict)),
        read_machine(read.take("machine", dict)),
        _read_costs(read.take("costs", list), f"served {path}: its cost table"),
        read_trace(read.take("trace", dict)),
        read.take("home", str),
        read.names("resident"),
    )
    read.done()
    return served


def served_problem(served: ServedRun) -> Problem:
    """The problem of a served call, with the costs that were seen in it.

    An op on the device where it ran takes what its spans took there, and what that device takes to
    start one (`overhead_s`); on the others what the table says.
    """
    machine, spans = served.machine, dict[tuple[str, str], list[float]]()
    for span in served.trace.spans:
        op, device = served.graph.op.get(span.op), machine.device.get(span.device)
        if span.kind == "run" and op is not None and device is not None:
            seconds = device.overhead_s + span.end_s - span.start_s
            spans.setdefault((op.body or op.name, device.name), []).append(seconds)
    known = {key: dict(points) for key, points in served.table.seconds.items()}
    seen = CostTable.of(known | {key: {0: mean(times_s)} for key, times_s in spans.items()})
    costs = Costs(machine, seen)
    return graph_problem(served.graph, machine, costs, home=served.home, resident=served.resident)
