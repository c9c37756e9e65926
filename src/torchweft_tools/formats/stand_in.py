"""A stand-in: a graph, a machine and costs that say what a problem of another format says.

    Problem without a graph --with_graph--> Problem --planner, as_plan--> Plan

It has the same ops, bytes and costs, so the same verifier and simulator take its plan.
"""

from __future__ import annotations

from dataclasses import replace

from torchweft.placement.problem import INF, Problem
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.machine import MAX_RATE, Costs, CostTable, Device, Lane, Link, Machine
from torchweft.plan.sizes import Size


def with_graph(problem: Problem) -> Problem:
    """The problem, with a graph if it has none."""
    return problem if problem.graph else replace(problem, graph=stand_in(problem)[0])


def stand_in(problem: Problem) -> tuple[Graph, Machine, Costs]:
    """A graph, a machine and costs that say what the problem says, for one without a graph."""
    reads: list[dict[str, None]] = [{} for _ in problem.ops]
    makes: list[dict[str, int]] = [{} for _ in problem.ops]
    for edge in problem.edges:
        value = edge.value or f"order.{problem.ops[edge.source]}"
        reads[edge.target][value] = None
        makes[edge.source][value] = edge.num_bytes
    for op, name in enumerate(problem.ops):
        if not makes[op]:
            makes[op][f"out.{name}"] = 0
    values = tuple(
        Value(value, (Size.of(num_bytes),), "uint8")
        for made in makes
        for value, num_bytes in made.items()
    )
    ops = tuple(
        Op(name, tuple(reads[op]), tuple(makes[op]), rows="batch-free")
        for op, name in enumerate(problem.ops)
    )
    read = {value for names in reads for value in names}
    outputs = tuple(value.name for value in values if value.name not in read)
    graph = Graph(problem.name, values, ops, (), outputs)
    return graph, *_stand_in_costs(problem)


def _stand_in_costs(problem: Problem) -> tuple[Machine, Costs]:
    every = range(problem.num_devices)
    devices = tuple(
        Device(name, memory_bytes=None if room == INF else int(room))
        for name, room in zip(problem.devices, problem.room_bytes, strict=True)
    )
    links = tuple(
        Link(problem.devices[a], problem.devices[b], _rate(problem.byte_s[a][b]), latency_s)
        for a in every
        for b, latency_s in enumerate(problem.latency_s[a])
        if a != b
    )
    lanes = tuple(Lane(name, name) for name in problem.devices)
    measured = {
        (name, problem.devices[d]): {0: problem.seconds[op][d]}
        for op, name in enumerate(problem.ops)
        for d in every
        if problem.seconds[op][d] < INF
    }
    machine = Machine(problem.name, devices, lanes, links)
    return machine, Costs(machine, CostTable.of(measured))


def _rate(byte_s: float) -> float:
    return 1 / byte_s if byte_s > 1 / MAX_RATE else MAX_RATE
