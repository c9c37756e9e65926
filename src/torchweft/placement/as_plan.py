"""A placement as the project's own `Plan`: one lane a device, and lanes for what goes over links.

    weft plan 1
    lane fast on fast uses compute,memory            one a device, named after it
    lane fast.to.slow on fast uses io                one for each copy under way at once
    steps
      fast          leaf0
      fast.to.slow  copy a to slow                   a value goes once to each device
      slow          root

The same verifier, simulator and trace take it. What fits: `simulate(plan, ...,
contention=False)` gives the starts and the makespan of the placement, since every copy under way
has a lane of its own. With contention, values that share a link slow each other down. Copies of
inputs from the home device are in the plan, those of resident inputs too: a runtime that keeps them
skips those. Waits and frees are in it; an op of two phases runs in one.

A problem that was read from another format has no graph: `stand_in` draws one with the same ops,
bytes and costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchweft.placement.placement import Placement
from torchweft.placement.problem import INF, Problem
from torchweft.plan.cost import Costs, CostTable
from torchweft.plan.cut import Cut
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.lower.memory import add_frees
from torchweft.plan.machine import MAX_RATE, Device, Lane, Link, Machine
from torchweft.plan.plan import Plan, Step, one_line
from torchweft.plan.sizes import Size

_INPUT = -1


class Transfer(NamedTuple):
    """A value on its way: from when to when, between which devices; `op` made it, -1: an input."""

    start_s: float
    end_s: float
    value: str
    op: int
    source: int
    target: int


def transfers(problem: Problem, placement: Placement) -> list[Transfer]:
    """What goes over the links, by start: each value once to each device that needs it."""
    found: set[Transfer] = set()
    for edge in problem.edges:
        source, target = placement.device[edge.source], placement.device[edge.target]
        if source != target and edge.value:
            start_s = placement.end_s[edge.source]
            end_s = start_s + problem.transfer_s(edge.num_bytes, source, target)
            found.add(Transfer(start_s, end_s, edge.value, edge.source, source, target))
    return sorted(found)


def as_plan(problem: Problem, placement: Placement) -> Plan:
    """The plan that runs the problem's graph (or its stand-in) as the placement says."""
    graph = problem.graph or stand_in(problem)[0]
    sent = [*_inputs_sent(problem, graph, placement), *transfers(problem, placement)]
    lanes, lane_of = _lanes(problem, graph, sent)
    copies: dict[int, list[Step]] = {}
    for item, lane in zip(sent, lane_of, strict=True):
        step = Step("copy", lane, (item.value,), on=problem.devices[item.target])
        copies.setdefault(item.op, []).append(step)
    writer = _Writer(graph, copies.get(_INPUT, []))
    needs: list[list[int]] = [[] for _ in problem.ops]
    for edge in problem.edges:
        needs[edge.target] += [] if edge.value else [edge.source]
    for op in placement.order:
        writer.run(op, problem, placement.device, needs[op])
        for step in copies.get(op, []):
            writer.add(step, problem.ops[op])
    note = one_line(f"place {placement.planner or 'by hand'}")
    plan = Plan(graph.name, graph.digest, Cut(), lanes, writer.steps, history=(note,), bound=graph)
    return add_frees(plan)


class _Writer:
    """Writes steps with the waits that they need; a lane waits for each label once."""

    def __init__(self, graph: Graph, steps: list[Step]) -> None:
        self.graph, self.found, self.told = graph, steps, set[tuple[str, str]]()

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self.found)

    def add(self, step: Step, *after: str) -> None:
        for label in after:
            if (step.lane, label) not in self.told:
                self.told.add((step.lane, label))
                self.found.append(Step("wait", step.lane, target=label))
        self.found.append(step)

    def run(self, op: int, problem: Problem, devices: Sequence[int], before: list[int]) -> None:
        """Run an op behind the copies that it reads and the ops that must come first."""
        name, device = problem.ops[op], devices[op]
        lane, after = problem.devices[device], []
        for value in self.graph.op[name].touched:
            maker = self.graph.maker.get(value)
            made_on = devices[problem.number[maker.name]] if maker else problem.home
            if made_on != device:
                after.append(f"copy {value} to {lane}")
        after += [problem.ops[other] for other in before if devices[other] != device]
        self.add(Step("run", lane, (name,)), *after)


def _inputs_sent(problem: Problem, graph: Graph, placement: Placement) -> Iterator[Transfer]:
    """The inputs that ops on other devices than the home read, each once a device."""
    inputs, seen = set(graph.inputs), set[tuple[str, int]]()
    for op, name in enumerate(problem.ops):
        target = placement.device[op]
        for value in graph.op[name].touched if target != problem.home else ():
            if value in inputs and (value, target) not in seen:
                seen.add((value, target))
                # Inputs may be under way for as long as they like: nothing else uses their lane.
                yield Transfer(0.0, INF, value, _INPUT, problem.home, target)


def _lanes(
    problem: Problem, graph: Graph, sent: Sequence[Transfer]
) -> tuple[tuple[Lane, ...], list[str]]:
    """A lane for each device, the home first, and those of the links; the lane of each copy."""
    uses = tuple(sorted({"compute", "memory", *(op.uses for op in graph.ops)}))
    ordered = sorted(problem.devices, key=lambda name: name != problem.devices[problem.home])
    links, lane_of = link_lanes(problem, sent)
    return (*(Lane(name, name, uses) for name in ordered), *links), lane_of


def link_lanes(problem: Problem, sent: Sequence[Transfer]) -> tuple[list[Lane], list[str]]:
    """Enough lanes for each link that none has two copies at once; the lane of each copy."""
    free_s: dict[tuple[int, int], list[float]] = {}
    lanes, lane_of = [], []
    for item in sent:
        ends = free_s.setdefault((item.source, item.target), [])
        source, target = problem.devices[item.source], problem.devices[item.target]
        number = next((n for n, end_s in enumerate(ends) if end_s <= item.start_s), len(ends))
        name = f"{source}.to.{target}" + (f".{number}" if number else "")
        if number == len(ends):
            ends.append(0.0)
            lanes.append(Lane(name, source, ("io",)))
        ends[number] = item.end_s
        lane_of.append(name)
    return lanes, lane_of


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
