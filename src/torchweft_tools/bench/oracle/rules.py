"""The rules that a plan breaks or keeps whatever the speed of its lanes: coverage and lanes.

`check` looks at steps one by one and counts them; it knows nothing of order or of bytes.
"""

from __future__ import annotations

from collections import Counter

from torchweft.plan.graph import Graph
from torchweft.plan.plan import Plan, Step
from torchweft_tools.bench.oracle.content import UnsafeError


def check(plan: Plan) -> None:
    """Raise `UnsafeError` if a step is not legal, or something is missing or doubled."""
    for hosted in plan.lanes:
        host = plan.lane.get(hosted.via or "")
        if hosted.via and (host is None or host.via or host.device != hosted.device):
            raise UnsafeError(f"lane {hosted.name}: no lane on its device has the thread for it")
    for step in plan.steps:
        lane = plan.lane.get(step.lane)
        if lane is None or lane.via is not None:
            raise UnsafeError(
                f"{step.label}: lane {step.lane} is unknown or has no steps of its own"
            )
        if lane.to and step.kind != "wait" and not (step.kind == "copy" and step.on == lane.to):
            raise UnsafeError(f"{step.label}: lane {step.lane} only copies to {lane.to}")
        for name, parts in step.after:
            if step.kind not in ("run", "issue") or name not in plan.graph.op:
                raise UnsafeError(f"{step.label}: it cannot come after {name}")
            first, last = parts or (0, plan.num_parts)
            has_parts = parts is None or not plan.graph.op[name].whole
            if not has_parts or not 0 <= first < last <= plan.num_parts:
                raise UnsafeError(f"{step.label}: {name} does not have these parts")
        if step.kind in ("run", "issue", "complete"):
            _check_ops(plan, step)
        elif step.kind != "wait":
            _check_value(plan, step)
    _check_places(plan)
    _check_coverage(plan)
    _check_phases(plan)
    _check_borders(plan)


def _check_range(plan: Plan, step: Step, has_batch: bool) -> None:
    if step.parts is None:
        return
    start, stop = step.parts
    if not has_batch or not 0 <= start < stop <= plan.num_parts or stop - start == plan.num_parts:
        raise UnsafeError(f"{step.label}: this range of parts is not possible")


def _check_ops(plan: Plan, step: Step) -> None:
    lane = plan.lane[step.lane]
    if len(step.names) > 1 and step.by is None:
        raise UnsafeError(f"{step.label}: several ops, and no kernel for them")
    if step.kind == "issue":
        if step.on is None or step.on not in plan.lane or plan.lane[step.on].via != step.lane:
            raise UnsafeError(f"{step.label}: not issued by the lane that {step.on} goes via")
        lane = plan.lane[step.on]
    for name in step.names:
        if name not in plan.graph.op:
            raise UnsafeError(f"{step.label}: no such op")
        op = plan.graph.op[name]
        _check_range(plan, step, not op.whole)
    ops = [plan.graph.op[name] for name in step.names]
    talks = [op.collective for op in ops if op.collective is not None]
    own = [one.talks for one in plan.declared if one.name == step.by]
    groups = {talk.communicator for talk in talks}
    if (own and own[0] and len(groups) != 1) or (step.by and groups and not own):
        raise UnsafeError(f"{step.label}: it is not known what the kernel says, and to whom")
    if own and any(talk.peer is not None for talk in talks):
        raise UnsafeError(f"{step.label}: a kernel sends no messages")
    if step.kind != "complete" and not any(op.uses in lane.uses for op in ops):
        raise UnsafeError(f"{step.label}: lane {lane.name} does not take it")
    if step.kind != "run" and not any(op.two_phase for op in ops):
        raise UnsafeError(f"{step.label}: it does not have two phases")


def _check_value(plan: Plan, step: Step) -> None:
    graph, name = plan.graph, step.names[0]
    if name not in graph.value:
        raise UnsafeError(f"{step.label}: no such value")
    value, device = graph.value[name], plan.lane[step.lane].device
    _check_range(plan, step, value.batch is not None)
    devices = {lane.device for lane in plan.lanes}
    is_input, is_root = name in graph.inputs, value.alias_of is None
    good = {
        "split": is_input and value.batch is not None,
        "merge": name in graph.outputs and value.batch is not None,
        "free": is_root and not is_input,
        "copy": step.on in devices - {device} if step.on else is_root and _has_place(plan, name),
    }[step.kind]
    if not good or (step.kind in ("split", "merge") and (plan.num_parts == 1 or step.parts)):
        raise UnsafeError(f"{step.label}: this {step.kind} is not possible")


def _has_place(plan: Plan, name: str) -> bool:
    return any(place.value == name for place in plan.places)


def _check_places(plan: Plan) -> None:
    buffers = {buffer.name for buffer in plan.buffers}
    counts = Counter(place.value for place in plan.places)
    for place in plan.places:
        value = plan.graph.value.get(place.value)
        known = place.buffer is None or place.buffer in buffers
        if value is None or value.alias_of or place.value in plan.graph.inputs or not known:
            raise UnsafeError(f"place {place.value}: this place is not possible")
        if counts[place.value] > 1:
            raise UnsafeError(f"place {place.value}: the value has two places")


def _check_coverage(plan: Plan) -> None:
    ran: Counter[tuple[str, int]] = Counter()
    for step in plan.steps:
        if step.kind in ("run", "issue"):
            for name in step.names:
                whole = plan.graph.op[name].whole
                parts = (0, 1) if whole else step.parts or (0, plan.num_parts)
                ran.update((name, part) for part in range(*parts))
    for op in plan.graph.ops:
        for part in range(1 if op.whole else plan.num_parts):
            if ran[op.name, part] != 1:
                raise UnsafeError(f"{op.name}[{part}] runs {ran[op.name, part]} times")


def _check_phases(plan: Plan) -> None:
    issues = Counter((s.names, s.parts) for s in plan.steps if s.kind == "issue")
    completes = Counter((s.names, s.parts) for s in plan.steps if s.kind == "complete")
    if issues != completes:
        raise UnsafeError("an issue without its complete, or a complete without its issue")


def _check_borders(plan: Plan) -> None:
    graph: Graph = plan.graph
    splits = Counter(step.names[0] for step in plan.steps if step.kind == "split")
    merges = Counter(step.names[0] for step in plan.steps if step.kind == "merge")
    if any(count > 1 for count in splits.values()):
        raise UnsafeError("an input is split twice")
    if plan.num_parts > 1:
        for name in dict.fromkeys(graph.outputs):
            if graph.value[name].batch is not None and merges[name] != 1:
                raise UnsafeError(f"output {name} is merged {merges[name]} times")
