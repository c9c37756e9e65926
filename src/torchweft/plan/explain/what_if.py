"""What another link, another device or more parts would bring: simulated, at the measured costs.

    plan, trace ----seen_costs----> SeenCosts    a plan of ours: the one simulator runs it again
    timeline --------rebuilt------> Rebuilt      a trace of others: a graph of blocks and flights

A rebuilt graph is a chain of compute blocks with flights between them. A flight reads all that was
computed before it began; the first block that begins behind its end reads it. In parts, a measured
time is split pro rata, and every kernel costs a launch for each further part. That is what a split
could bring if every op could be cut by rows: an estimate, and said to be one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from torchweft.errors import WeftError
from torchweft.plan.context import MAX_PARTS, Context
from torchweft.plan.explain.intervals import Interval, clipped, total_s, union, without
from torchweft.plan.explain.timeline import Timeline
from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, Env, Machine, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import overlap
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import write

ROWS, MAX_OPS = 1 << 16, 4000
NEAR_S = 2e-5


class WhatIf(NamedTuple):
    """A change, and how long the step would take by the simulator; `factor`: times as fast."""

    change: str
    step_s: float
    factor: float


@dataclass(frozen=True)
class SeenCosts(Costs):
    """Costs that a trace has shown: seconds by op and rows; sped up by `link` and `compute`.

    launches: how many kernels an op launches, each `launch_s` long, in every part again.
    fixed: seconds of an op in which its host was too slow, in every part and at any speed.
    """

    seen: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    launches: Mapping[str, int] = field(default_factory=dict)
    fixed: Mapping[str, float] = field(default_factory=dict)
    link: float = 1.0
    compute: float = 1.0
    launch_s: float = 0.0

    def run_s(self, graph: Graph, op: Op, env: Env, device: str = "cpu") -> float:
        """Seconds of one run of an op, as seen."""
        seconds = self._seen_s(op.name, env.get(graph.batch) if graph.batch else None)
        if seconds is None:
            seconds = super().run_s(graph, op, env, device)
        speed = {"network": self.link, "io": 1.0}.get(op.uses, self.compute)
        return seconds / speed + self.fixed.get(op.name, 0.0)

    def group_s(
        self, graph: Graph, ops: Sequence[Op], by: str, env: Env, device: str = "cpu"
    ) -> float:
        """Seconds of a kernel in the place of ops, as seen."""
        key = " ".join(op.name for op in ops)
        seconds = self._seen_s(key, env.get(graph.batch) if graph.batch else None)
        return super().group_s(graph, ops, by, env, device) if seconds is None else seconds

    def _seen_s(self, key: str, rows: int | None) -> float | None:
        points = self.seen.get(key)
        if not points:
            return None
        if rows is None or rows in points:
            return points.get(rows or 0, next(iter(points.values())))
        near = min(points, key=lambda known: abs(known - rows))
        share = rows / near if near else 1.0
        return (
            points[near] * share + max(0.0, 1 - share) * self.launches.get(key, 1) * self.launch_s
        )


def seen_costs(
    trace: Trace, machine: Machine, bounds: Sequence[int], *, launch_s: float = 5e-6
) -> SeenCosts:
    """What the ops of a measured trace took. bounds: the row borders of its parts."""
    seen: dict[str, dict[int, list[float]]] = {}
    landed_s: dict[str, float] = {}
    for span in sorted(trace.spans, key=lambda span: span.start_s):
        if span.kind not in ("run", "transfer") or not span.op:
            continue
        start_s = span.start_s
        if span.kind == "transfer":  # behind another one it waits, which is no cost of its own
            start_s = min(span.end_s, max(start_s, landed_s.get(span.lane, 0.0)))
            landed_s[span.lane] = span.end_s
        first, last = span.parts or (0, len(bounds) - 1)
        rows = bounds[min(last, len(bounds) - 1)] - bounds[first]
        seen.setdefault(span.op, {}).setdefault(rows, []).append(span.end_s - start_s)
    known = {op: {rows: median(s) for rows, s in points.items()} for op, points in seen.items()}
    return SeenCosts(machine, seen=known, launch_s=launch_s)


def what_ifs(plan: Plan, context: Context, costs: SeenCosts) -> tuple[Trace, tuple[WhatIf, ...]]:
    """The plan as it would run at these costs; and with another link, compute, more parts."""
    planned = simulate(plan, context, costs.machine, costs)

    def faster(change: str, step_s: float) -> WhatIf:
        return WhatIf(change, step_s, planned.makespan_s / step_s if step_s > 0 else 1.0)

    items, changes = [], [("twice the compute", replace(costs, compute=2.0))]
    if any(op.uses == "network" for op in plan.graph.ops):
        changes.insert(0, ("twice the link", replace(costs, link=2.0)))
    for change, other in changes:
        items.append(faster(change, simulate(plan, context, costs.machine, other).makespan_s))
    for times in (2, 4):
        num_parts = plan.num_parts * times
        if plan.graph.batch is None or num_parts > min(context.batch, MAX_PARTS):
            break
        try:
            bare = write(overlap(parts=num_parts), plan.graph, context, costs.machine, costs=costs)
            simulated = simulate(lower(bare), context, costs.machine, costs)
        except WeftError:  # this graph cannot be cut so often: nothing to tell
            break
        items.append(faster(f"overlap in {num_parts} parts", simulated.makespan_s))
    return planned, tuple(items)


class Rebuilt(NamedTuple):
    """A graph that behaves as a trace of others did, with its costs."""

    graph: Graph
    costs: SeenCosts
    context: Context

    def what_ifs(self) -> tuple[Trace, tuple[WhatIf, ...]]:
        """As it ran, and otherwise."""
        machine = self.costs.machine
        bare = write(overlap(parts=1), self.graph, self.context, machine, costs=self.costs)
        return what_ifs(lower(bare), self.context, self.costs)


class _Block:
    """Compute works between two flights."""

    def __init__(self, needs: Sequence[int]) -> None:
        self.needs, self.times = tuple(needs), list[Interval]()
        self.idle_s = 0.0


def rebuilt(timeline: Timeline) -> Rebuilt | None:
    """The graph of a timeline; None if nothing is in flight, or too much for an estimate."""
    flights = [work for work in timeline.own if work.uses == "network"]
    if not flights or 2 * len(flights) + 1 > MAX_OPS:
        return None
    blocks, talks = [_Block(())], list[tuple[int, float]]()  # a flight: its block, its seconds
    pending: dict[int, float] = {}
    closed, landed_s, seen_s = False, 0.0, timeline.start_s
    idle = without(timeline.gaps, timeline.network)
    for work in timeline.own:
        if work.uses == "network":
            pending[len(talks)] = work.end_s
            seconds = work.end_s - max(work.start_s, min(work.end_s, landed_s))
            talks.append((len(blocks) - 1, seconds))
            closed, landed_s = True, max(landed_s, work.end_s)
        elif work.uses == "compute":
            needs = [n for n, end_s in pending.items() if end_s <= work.start_s + NEAR_S]
            if needs or closed:
                blocks.append(_Block(needs))
                closed = False
                for number in needs:
                    del pending[number]
            blocks[-1].times.append(work.time)
            if work.start_s > seen_s:
                blocks[-1].idle_s += total_s(clipped(idle, seen_s, work.start_s))
                seen_s = work.start_s
    return _graph_of(timeline, blocks, talks)


def _graph_of(
    timeline: Timeline, blocks: Sequence[_Block], talks: Sequence[tuple[int, float]]
) -> Rebuilt:
    rows, ops, seen = Size.of("s0"), list[Op](), dict[str, dict[int, float]]()
    after: dict[int, list[int]] = {}
    for number, (behind, seconds) in enumerate(talks):
        after.setdefault(behind, []).append(number)
        seen[f"flight{number}"] = {ROWS: seconds}
    for number, block in enumerate(blocks):
        name, before = f"block{number}", f"block{number - 1}_out" if number else "x"
        reads = (before, *(f"flight{n}_out" for n in block.needs))
        ops.append(Op(name, reads, (f"{name}_out",)))
        seen[name] = {ROWS: total_s(union(block.times))}
        for flight in after.get(number, ()):
            talk, made = Collective("all_reduce", "network"), (f"flight{flight}_out",)
            given = (f"{name}_out",), made
            ops.append(
                Op(f"flight{flight}", *given, uses="network", two_phase=True, collective=talk)
            )
    names = ["x", *(made for op in ops for made in op.makes)]
    values = tuple(Value(name, (rows,), batch=Batch(0)) for name in names)
    used = {name for op in ops for name in op.reads}
    outputs = tuple(name for name in names if name not in used)
    graph = Graph("rebuilt", values, tuple(ops), ("x",), outputs, "s0")
    machine = cpu(overhead_s=timeline.launch_s)
    launches = {f"block{n}": len(block.times) for n, block in enumerate(blocks)}
    fixed = {f"block{n}": block.idle_s for n, block in enumerate(blocks)}
    known = {"seen": seen, "launches": launches, "fixed": fixed}
    costs = SeenCosts(machine, launch_s=timeline.launch_s, **known)  # type: ignore[arg-type]
    return Rebuilt(graph, costs, Context(ROWS))
