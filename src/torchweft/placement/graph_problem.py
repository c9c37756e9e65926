"""A problem from our own graph, machine and costs; a placement of it as our own plan.

    Graph, Machine, Costs, Context --graph_problem--> Problem, Placement --as_plan--> Plan

A `ServedRun` is a call that was placed so, as data to learn from: `train` reads its file.

Each device of the machine is one place to run ops, one at a time; it takes an op if one of its
lanes does. Ops that touch a value which some op changes in place stay together, and with a changed
input on the home device. Inputs start on the home device, `resident` ones (weights) wherever they
are needed; both count as memory there, as does every value that is made, read or sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchweft.errors import MachineError, PlacementError, unknown
from torchweft.files import write_json
from torchweft.placement.placement import Placement
from torchweft.placement.problem import INF, Edge, Hold, Matrix, Problem
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Graph, Op, graph_data
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, CostTable, Lane, Machine
from torchweft.plan.machine import to_data as machine_data
from torchweft.plan.plan import Plan, Step, one_line
from torchweft.plan.precedence import precedence
from torchweft.plan.trace import Trace
from torchweft.plan.trace import to_data as trace_data


def graph_problem(
    graph: Graph,
    machine: Machine,
    costs: Costs | None = None,
    context: Context | None = None,
    *,
    home: str | None = None,
    resident: Collection[str] = (),
    objective: str = "latency",
) -> Problem:
    """The problem of running one call of the graph on the machine.

    home: the device where the inputs are, by default that of the machine's first lane.
    resident: inputs, such as weights, that are already wherever they are needed.
    Raises `PlacementError` if some op can run nowhere.
    """
    env, prices = (context or Context()).env(graph.batch), costs or Costs(machine)
    sizes = {value.name: max(0, value.bytes.evaluate(env)) for value in graph.values}
    home = machine.lanes[0].device if home is None else home
    if home not in machine.device:
        raise PlacementError(f"home: {unknown('device', home, machine.device)}", rule="home")
    if extra := sorted(set(resident) - set(graph.inputs)):
        raise PlacementError(f"resident: {unknown('input', extra[0], graph.inputs)}")
    devices = tuple(machine.device)
    start, (latency_s, byte_s) = devices.index(home), links(machine)
    takes = {(lane.device, uses) for lane in machine.lanes for uses in lane.uses}
    inputs = {graph.root[name] for name in graph.inputs}
    # A changed input stays at home: a copy elsewhere would not be what the caller gave.
    fixed = {op.name for op in graph.ops if inputs & {graph.root[name] for name in op.mutates}}
    sent = set(graph.inputs) - set(resident)
    given = [[sizes[name] for name in op.touched if name in sent] for op in graph.ops]
    ways, here = tuple(zip(latency_s[start], byte_s[start], strict=True)), (0.0,) * len(devices)
    ops_of = _touching(graph)

    def run_s(op: Op, device: str) -> float:
        can = (device, op.uses) in takes and (op.name not in fixed or device == home)
        return prices.run_s(graph, op, env, device) if can else INF

    rooms = [device.memory_bytes for device in machine.devices]
    return Problem(
        name=graph.name,
        ops=tuple(op.name for op in graph.ops),
        devices=devices,
        seconds=tuple(tuple(run_s(op, device) for device in devices) for op in graph.ops),
        edges=_edges(graph, sizes),
        latency_s=latency_s,
        byte_s=byte_s,
        holds=tuple(Hold(sizes[root], ops) for root, ops in ops_of.items() if sizes[root]),
        room_bytes=tuple(INF if room is None else float(room) for room in rooms),
        together=tuple(ops_of[root] for root in sorted(graph.mutated) if len(ops_of[root]) > 1),
        ready_s=tuple(
            tuple(late_s + max(read) * a_byte_s for late_s, a_byte_s in ways) if read else here
            for read in given
        ),
        objective=objective,
        home=start,
        graph=graph,
    )


def links(machine: Machine) -> tuple[Matrix, Matrix]:
    """Latencies and seconds a byte; a pair that nothing joins is an error of the machine."""
    names = tuple(machine.device)
    try:
        ways = [[machine.link(a, b) if a != b else None for b in names] for a in names]
    except MachineError as error:
        cure = "A placement needs a link between every two devices, in both directions."
        raise PlacementError(f"{error} {cure}", rule="link") from None
    latency_s = tuple(tuple(way.latency_s if way else 0.0 for way in row) for row in ways)
    byte_s = tuple(tuple(1 / way.bytes_per_s if way else 0.0 for way in row) for row in ways)
    return latency_s, byte_s


def _edges(graph: Graph, sizes: Mapping[str, int]) -> tuple[Edge, ...]:
    """Values from their makers to their readers, and orders that other dependencies ask for."""
    number = {op.name: at for at, op in enumerate(graph.ops)}
    before = precedence(graph)
    edges = []
    for op in graph.ops:
        at = number[op.name]
        makers = {name: graph.maker[name].name for name in op.touched if name in graph.maker}
        edges += [Edge(number[by], at, sizes[name], name) for name, by in makers.items()]
        made = set(makers.values())
        edges += [Edge(number[other], at) for other, _ in before[op.name, 0] if other not in made]
    return tuple(edges)


def _touching(graph: Graph) -> dict[str, tuple[int, ...]]:
    """For each root (weights, inputs, what is made) the ops that touch it, by any name."""
    ops_of: dict[str, list[int]] = {}
    for at, op in enumerate(graph.ops):
        for root in dict.fromkeys(graph.root[name] for name in op.touched + op.makes):
            ops_of.setdefault(root, []).append(at)
    return {root: tuple(ops) for root, ops in ops_of.items()}


def as_plan(problem: Problem, placement: Placement) -> Plan:
    """The plan that runs the problem's graph as the placement says: its order and its devices, a
    lane a device, named after it; `lower` does the rest (copies, each value once to each device).

    `simulate(plan, ..., contention=False)` gives the starts and the makespan of the placement.
    Copies of resident inputs are in the plan too: a runtime that keeps them skips those. An op of
    two phases runs in one. Raises `PlacementError` for a problem without a graph.
    """
    graph, home = problem.graph, problem.devices[problem.home]
    if graph is None:
        cure = "Make it with graph_problem, or see torchweft_tools.formats.stand_in"
        raise PlacementError(f"graph: problem {problem.name!r} has no graph. {cure}.", rule="graph")
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


@dataclass(frozen=True)
class ServedRun:
    """What one call was, on which devices, at which costs, and how long its ops took. home,
    resident: as in `graph_problem`."""

    graph: Graph
    machine: Machine
    table: CostTable
    trace: Trace
    home: str
    resident: tuple[str, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write the run as a JSON file: graph, machine, costs and trace, each in its own format."""
        data = {
            "weft_served": 1,
            "home": self.home,
            "resident": list(self.resident),
            "graph": graph_data(self.graph),
            "machine": machine_data(self.machine),
            "costs": self.table.entries,
            "trace": trace_data(self.trace),
        }
        write_json(path, data)
