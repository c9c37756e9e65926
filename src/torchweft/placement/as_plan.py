"""A placement as the project's own `Plan`: its order and its devices; `lower` does the rest.

    weft plan 2
    lane fast on fast uses compute,memory            one a device, named after it
    lane fast.to.slow on fast uses io to slow        one a link that is used, by `lower`
    steps
      fast          leaf0
      fast.to.slow  wait leaf0
      fast.to.slow  copy a to slow                   a value goes once to each device
      slow          wait copy a to slow
      slow          root

The same verifier, simulator and runtime take it. `simulate(plan, ..., contention=False)` gives the
starts and the makespan of the placement: without contention a link takes any number of copies at
once. Copies of inputs from the home device are in the plan, those of resident inputs too: a runtime
that keeps them skips those. An op of two phases runs in one.

A problem that was read from another format has no graph: `stand_in` draws one with the same ops,
bytes and costs.
"""

from __future__ import annotations

from torchweft.placement.placement import Placement
from torchweft.placement.problem import INF, Problem
from torchweft.plan.context import Cut
from torchweft.plan.cost import Costs, CostTable
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import MAX_RATE, Device, Lane, Link, Machine
from torchweft.plan.plan import Plan, Step, one_line
from torchweft.plan.sizes import Size


def as_plan(problem: Problem, placement: Placement) -> Plan:
    """The plan that runs the problem's graph (or its stand-in) as the placement says."""
    graph, home = problem.graph or stand_in(problem)[0], problem.devices[problem.home]
    uses = tuple(sorted({"compute", "memory", *(op.uses for op in graph.ops)}))
    devices = sorted(problem.devices, key=lambda name: name != home)  # inputs are on the first
    steps = [
        Step("run", problem.devices[placement.device[op]], (problem.ops[op],))
        for op in placement.order
    ]
    lanes = tuple(Lane(name, name, uses) for name in devices)
    note = one_line(f"place {placement.planner or 'by hand'}")
    bare = Plan(graph.name, graph.digest, Cut(), lanes, tuple(steps), history=(note,), bound=graph)
    return lower(bare)


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
