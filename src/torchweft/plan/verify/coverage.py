"""The static rules: every op exactly once for every part, on lanes and devices that may run it.

Nothing here looks at order; that is the walk's business. A broken rule is a `Finding`, with the
step where it shows and the cure; findings come in step order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from torchweft.errors import PlanError, unknown
from torchweft.plan.graph import USES, Graph
from torchweft.plan.kernels.fitting import faults_of
from torchweft.plan.machine import Lane
from torchweft.plan.plan import Plan, Range, Step, bracket


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `step` is an index into the plan's steps, None if no step is at fault."""

    rule: str
    message: str
    step: int | None = None
    cure: str = ""
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"

    def error(self, plan: Plan, num_others: int = 0, num_ranks: int = 1) -> PlanError:
        """The error to raise: rule, excerpt with an arrow, cure."""
        where = f"rank {self.rank}: " if num_ranks > 1 else ""
        shown = [f"{self.rule}: {where}{self.message}"]
        if self.step is not None:
            shown.append(plan.excerpt(self.step))
        if self.cure:
            shown.append(f"  {self.cure}")
        if num_others:
            shown.append(f"  (and {num_others} more; findings(plan) lists all)")
        lane = plan.steps[self.step].lane if self.step is not None else None
        return PlanError("\n".join(shown), rule=self.rule, step=self.step, lane=lane)


MAX_FINDINGS = 1000


def static_findings(plan: Plan) -> list[Finding]:
    """What is wrong with a plan whatever the order of its steps: the first `MAX_FINDINGS`."""
    illegal = list(islice(_illegal(plan, plan.graph), MAX_FINDINGS))
    dealt = illegal or list(islice(_dealt(plan, plan.graph), MAX_FINDINGS))
    return dealt or list(islice(_coverage(plan, plan.graph), MAX_FINDINGS))


def _illegal(plan: Plan, graph: Graph) -> Iterator[Finding]:
    for text in _lanes(plan):
        yield Finding("legality", text)
    for text in _places(plan, graph):
        yield Finding("memory", text)
    for index, step in enumerate(plan.steps):
        for text in _step(plan, graph, step):
            yield Finding("legality", text, index)


def _lanes(plan: Plan) -> Iterator[str]:
    names = [lane.name for lane in plan.lanes]
    if not names:
        yield "the plan has no lanes."
    if len(plan.declaration) < len(plan.declared):
        yield "two kernels have one name."
    for lane in plan.lanes:
        if names.count(lane.name) > 1:
            yield f"two lanes are named {lane.name!r}."
        host = plan.lane.get(lane.via) if lane.via is not None else None
        if lane.via is not None and (host is None or host.via or host.device != lane.device):
            yield f"lane {lane.name!r} goes via {lane.via!r}: no lane with a thread on its device."
        for uses in lane.uses:
            if uses not in USES:
                yield f"lane {lane.name!r}: {unknown('resource', uses, USES)}"


def _places(plan: Plan, graph: Graph) -> Iterator[str]:
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    if len(buffers) < len(plan.buffers):
        yield "two buffers have one name."
    seen: set[str] = set()
    for value, buffer, _ in plan.places:
        if value in seen:
            yield f"value {value!r} has two places."
        seen.add(value)
        if value not in graph.value:
            yield f"place: {unknown('value', value, graph.value)}"
        elif value in graph.inputs or graph.value[value].alias_of is not None:
            yield f"value {value!r} is an input or an alias; only what an op makes has a place."
        elif buffer is not None and buffer not in buffers:
            yield f"place of {value!r}: {unknown('buffer', buffer, buffers)}"
        elif buffer is not None and num_units(plan, graph, value, buffer) is None:
            yield f"value {value!r} is no whole number of units of buffer {buffer!r}."


def num_units(plan: Plan, graph: Graph, value: str, buffer: str) -> int | None:
    """How many units of a buffer a value takes; None if it is no whole number of them."""
    unit = next(item.unit for item in plan.buffers if item.name == buffer).unit
    size = graph.value[value].bytes.unit
    if unit is None or size is None or size[1] != unit[1] or unit[0] <= 0 or size[0] % unit[0]:
        return None
    return size[0] // unit[0]


def _step(plan: Plan, graph: Graph, step: Step) -> Iterator[str]:
    lane = plan.lane.get(step.lane)
    if lane is None:
        yield unknown("lane", step.lane, plan.lane)
        return
    if lane.via is not None:
        yield f"lane {lane.name!r} has no thread; lane {lane.via!r} must issue {step.label}."
    if lane.to is not None and step.kind != "wait" and (step.kind, step.on) != ("copy", lane.to):
        yield f"lane {lane.name!r} is a link's; it takes waits and copies to {lane.to!r} only."
    if step.parts is not None:
        start, stop = step.parts
        if not 0 <= start < stop <= plan.num_parts:
            yield f"{step.label} names parts {bracket(step.parts)} of {plan.num_parts}."
        elif stop - start == plan.num_parts:
            yield f"{step.label} means all parts: write it without a range."
    if step.after:
        yield from _edges(plan, graph, step)
    if step.kind in ("run", "issue", "complete"):
        yield from _op_step(plan, graph, step)
    elif step.kind != "wait":
        yield from _value_step(plan, graph, step)


def _edges(plan: Plan, graph: Graph, step: Step) -> Iterator[str]:
    if step.kind not in ("run", "issue"):
        yield f"{step.label}: only what starts an op comes after others by an edge."
    for name, parts in step.after:
        if (op := graph.op.get(name)) is None:
            yield f"{step.label} after {unknown('op', name, graph.op)}"
        elif parts is not None and (op.whole or not 0 <= parts[0] < parts[1] <= plan.num_parts):
            yield f"{step.label} after {name}{bracket(parts)}: {name!r} does not have these parts."


def _op_step(plan: Plan, graph: Graph, step: Step) -> Iterator[str]:
    if len(step.names) > 1 and step.by is None:
        yield f"{step.label} joins ops, so it needs a kernel: 'by NAME'."
    if step.by is not None and all(name in graph.op for name in step.names):
        yield from faults_of(graph, step.names, step.by, plan.declaration.get(step.by))
    for name in step.names:
        op = graph.op.get(name)
        if op is None:
            yield unknown("op", name, graph.op)
            continue
        if op.whole and step.parts is not None:
            yield f"op {name!r} is {op.rows}: it runs once, without a range."
        if step.kind == "run" and not _takes(graph, plan.lane[step.lane], step):
            yield f"lane {step.lane!r} does not take {name!r}, which uses {op.uses}."
        phases = [graph.op[item].two_phase for item in step.names if item in graph.op]
        if step.kind != "run" and not any(phases):
            yield f"op {name!r} has one phase: run it, do not issue or complete it."
        if step.kind == "issue":
            hosted = plan.lane.get(step.on or "")
            if hosted is None or hosted.via != step.lane:
                yield f"lane {step.lane!r} cannot issue on {step.on!r}, which does not go via it."
            elif not _takes(graph, hosted, step):
                yield f"lane {step.on!r} does not take {name!r}, which uses {op.uses}."


def _takes(graph: Graph, lane: Lane, step: Step) -> bool:
    """A kernel may stand on any lane that takes one of its ops."""
    return any(graph.op[name].uses in lane.uses for name in step.names if name in graph.op)


def _value_step(plan: Plan, graph: Graph, step: Step) -> Iterator[str]:
    value = graph.value.get(step.names[0])
    if value is None:
        yield unknown("value", step.names[0], graph.value)
        return
    ends = {"split": graph.inputs, "merge": graph.outputs}
    if step.kind in ends:
        if plan.num_parts == 1 or value.batch is None or step.parts is not None:
            yield f"{step.label}: only a whole value with a batch, of a plan with several parts."
        if value.name not in ends[step.kind]:
            yield f"{value.name!r} is no {'in' if step.kind == 'split' else 'out'}put."
    elif step.parts is not None and value.batch is None:
        yield f"{step.label}: {value.name!r} has no batch, so it has no parts."
    if step.kind == "free" and (value.alias_of is not None or value.name not in graph.maker):
        yield f"{step.label}: only what an op made can be freed, and not through an alias."
    placed = any(place.value == value.name for place in plan.places)
    if step.kind == "copy" and step.on is None and not (placed and value.name in plan.copied):
        yield f"{step.label}: {value.name!r} has no place that its maker cannot write itself."
    if step.kind == "copy" and step.on is not None:
        devices = {lane.device for lane in plan.lanes} - {plan.lane[step.lane].device}
        if step.on not in devices:
            yield f"{step.label}: {unknown('device to copy to', step.on, devices)}"


def _dealt(plan: Plan, graph: Graph) -> Iterator[Finding]:
    """Shares are touched in the very parts in which they are made: the shares of two parts beside
    each other are not the share of both, and the share of both is not cut into theirs."""
    made: dict[str, set[Range | None]] = {name: set() for name in graph.dealt}
    runs = [(at, s) for at, s in enumerate(plan.steps) if s.kind in ("run", "issue")]
    for _, step in runs:
        for name in graph.dealt.intersection(n for op in step.names for n in graph.op[op].makes):
            made[name].add(step.parts)
    for index, step in runs:
        touched = {name for op in step.names for name in graph.op[op].touched}
        for name in sorted(touched & graph.dealt):
            root = graph.root[name]
            if root in made and step.parts not in made[root]:
                text = f"{step.label} reads {name!r}, of which each rank holds its shares of parts"
                cure = f"Run it on the very parts on which {graph.maker[root].name!r} runs."
                yield Finding("coverage", f"{text}, in other parts.", index, cure)
    for place in plan.places if plan.num_parts > 1 else ():
        if place.value in graph.dealt:
            text = f"{place.value!r} has a place, where its shares of all parts would be one value."
            yield Finding("memory", text)


def _coverage(plan: Plan, graph: Graph) -> Iterator[Finding]:
    runs: dict[tuple[str, str, int], int] = {}
    counts: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        if step.kind in ("split", "merge"):
            counts[step.label] = counts.get(step.label, 0) + 1
            if counts[step.label] == 2:
                yield Finding("coverage", f"{step.label} stands twice.", index)
        if step.kind not in ("run", "issue", "complete"):
            continue
        phases = ("issue", "complete") if step.kind == "run" else (step.kind,)
        for name in step.names:
            for part in range(*(step.parts or (0, 1 if graph.op[name].whole else plan.num_parts))):
                for phase in phases:
                    key = (phase, name, part)
                    if key in runs:
                        which = f"{name}{bracket((part, part + 1))}"
                        text = f"{which} runs twice: first as step {runs[key]}."
                        yield Finding("coverage", text, index, "Drop one of the two.")
                        break
                    runs[key] = index
    issued = {(s.names, s.parts, s.by) for s in plan.steps if s.kind == "issue"}
    for index, step in enumerate(plan.steps):  # each complete ends what one issue started
        if step.kind == "complete" and (step.names, step.parts, step.by) not in issued:
            yield Finding("coverage", f"{step.label} ends what no step issued.", index)
    for op in graph.ops:
        for part in range(1 if op.whole else plan.num_parts):
            which = "" if op.whole else bracket((part, part + 1))
            if ("issue", op.name, part) not in runs:
                yield Finding("coverage", f"{op.name}{which} never runs.")
            elif ("complete", op.name, part) not in runs:
                yield Finding("coverage", f"{op.name}{which} is issued and never completed.")
    if plan.num_parts > 1:
        for name in dict.fromkeys(graph.outputs):
            if graph.value[name].batch is not None and f"merge {name}" not in counts:
                text = f"output {name!r} is never merged."
                yield Finding("coverage", text, cure=f"Add: merge {name}")
