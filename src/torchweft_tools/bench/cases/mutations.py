"""The mutation: a small change to a plan that is meant to make it unsafe.

    drop_wait          one wait less                         overlap_places   a place over another
    swap_steps         two steps of a lane change places     swap_collectives two on one rank
    drop_op            an op that never runs                 scramble         anything else
    double_op          an op that runs twice

Each takes a `Random` and a plan and gives a plan, or None if the plan has nothing of the kind. They
only change; whether the result is unsafe is for the oracle to say (`mutate` asks it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from torchweft.plan.plan import Place, Plan, Range, Step
from torchweft_tools.bench.oracle import by_closure

Mutation = Callable[[Random, Plan], Plan | None]


def mutate(
    rng: Random, plans: Sequence[Plan], mutation: Mutation, *, draws: int = 6
) -> list[Plan] | None:
    """The plans with one of them changed, unsafe if any of the draws is; None if none applies."""
    mutated = None
    for _ in range(draws):
        rank = rng.randrange(len(plans))
        changed = mutation(rng, plans[rank])
        if changed is None:
            continue
        mutated = [changed if number == rank else plan for number, plan in enumerate(plans)]
        if not by_closure(mutated):
            return mutated
    return mutated


def drop_wait(rng: Random, plan: Plan) -> Plan | None:
    """The plan without one of its waits."""
    return _drop(plan, _some(rng, plan, "wait"))


def swap_steps(rng: Random, plan: Plan) -> Plan | None:
    """The plan with two steps of one lane in each other's place, mostly close ones."""
    at = _some(rng, plan, *_ACTING)
    if at is None:
        return None
    lane = [n for n, step in enumerate(plan.steps) if step.lane == plan.steps[at].lane]
    near = lane[max(0, lane.index(at) - 3) : lane.index(at) + 4]
    others = [n for n in near if n != at and plan.steps[n].kind != "wait"]
    if not others:
        return None
    steps, other = list(plan.steps), rng.choice(others)
    steps[at], steps[other] = steps[other], steps[at]
    return replace(plan, steps=tuple(steps))


def drop_op(rng: Random, plan: Plan) -> Plan | None:
    """The plan without one run (or issue and complete), mostly without the waits for it too."""
    at = _some(rng, plan, "run", "issue")
    if at is None:
        return None
    gone = plan.steps[at]
    dropped = {("run", gone.names, gone.parts), ("issue", gone.names, gone.parts),
               ("complete", gone.names, gone.parts)}  # fmt: skip
    labels = {s.label for s in plan.steps if (s.kind, s.names, s.parts) in dropped}
    quiet = rng.random() < 0.8
    return _keep(
        plan,
        lambda s: (
            (s.kind, s.names, s.parts) not in dropped
            and not (quiet and s.kind == "wait" and s.target in labels)
        ),
    )


def double_op(rng: Random, plan: Plan) -> Plan | None:
    """The plan with one of its runs a second time, somewhere after the first."""
    at = _some(rng, plan, "run", "issue")
    if at is None:
        return None
    step, steps = plan.steps[at], list(plan.steps)
    steps.insert(rng.randint(at + 1, len(steps)), step)
    if step.kind == "issue":
        steps.append(step._replace(kind="complete", on=None))
    return replace(plan, steps=tuple(steps))


def overlap_places(rng: Random, plan: Plan) -> Plan | None:
    """The plan with one place moved onto another one."""
    has_batch = {place: plan.graph.value[place.value].batch is not None for place in plan.places}
    pairs = [
        (one, two)
        for one in plan.places
        for two in plan.places
        if one.value != two.value and two.buffer is not None and has_batch[one] == has_batch[two]
        if _device(plan, one.value) == _device(plan, two.value)
    ]
    if not pairs:
        return None
    one, two = rng.choice(pairs)
    moved = Place(one.value, two.buffer, max(0, two.offset + rng.choice((-1, 0, 0, 1))))
    return replace(plan, places=tuple(moved if p == one else p for p in plan.places))


def swap_collectives(rng: Random, plan: Plan) -> Plan | None:
    """The plan with two collectives of one communicator in each other's place."""

    def communicators(step: Step) -> set[str]:
        ops = [plan.graph.op[name] for name in step.names if step.kind in ("run", "issue")]
        return {op.collective.communicator for op in ops if op.collective is not None}

    pairs = [
        (one, two)
        for one in range(len(plan.steps))
        for two in range(one)
        if plan.steps[one].kind == plan.steps[two].kind
        and communicators(plan.steps[one]) & communicators(plan.steps[two])
    ]
    if not pairs:
        return None
    one, two = rng.choice(pairs)
    steps = list(plan.steps)
    first, second = steps[one], steps[two]
    steps[one] = second._replace(lane=first.lane, on=first.on)
    steps[two] = first._replace(lane=second.lane, on=second.on)
    return replace(plan, steps=tuple(steps))


def scramble(rng: Random, plan: Plan) -> Plan | None:
    """The plan with some other change: to a step, a place, a lane, or two runs made one."""
    steps = (_move, _move_up, _drop_any, _retarget, _change_range, _change_lane, _join_runs)
    return rng.choice((*steps, _change_place, _change_device))(rng, plan)


MUTATIONS: dict[str, Mutation] = {
    "drop_wait": drop_wait,
    "swap_steps": swap_steps,
    "drop_op": drop_op,
    "double_op": double_op,
    "overlap_places": overlap_places,
    "swap_collectives": swap_collectives,
    "scramble": scramble,
}
_ACTING = ("split", "run", "copy", "merge", "free", "issue", "complete")


def _some(rng: Random, plan: Plan, *kinds: str) -> int | None:
    places = [at for at, step in enumerate(plan.steps) if step.kind in kinds]
    return rng.choice(places) if places else None


def _drop(plan: Plan, at: int | None) -> Plan | None:
    return None if at is None else replace(plan, steps=plan.steps[:at] + plan.steps[at + 1 :])


def _keep(plan: Plan, good: Callable[[Step], bool]) -> Plan:
    return replace(plan, steps=tuple(step for step in plan.steps if good(step)))


def _device(plan: Plan, name: str) -> str | None:
    """The device on which a value is made."""
    maker = plan.graph.maker[name].name
    for step in plan.steps:
        if step.kind in ("run", "issue") and maker in step.names:
            return plan.lane[step.lane].device
    return None


def _move(rng: Random, plan: Plan) -> Plan | None:
    """A step to anywhere."""
    at = _some(rng, plan, "wait", *_ACTING)
    if at is None:
        return None
    steps = [*plan.steps[:at], *plan.steps[at + 1 :]]
    steps.insert(rng.randint(0, len(steps)), plan.steps[at])
    return replace(plan, steps=tuple(steps))


def _move_up(rng: Random, plan: Plan) -> Plan | None:
    """A free, copy, merge or complete a little earlier on its lane."""
    at = _some(rng, plan, "free", "copy", "merge", "complete")
    if at is None:
        return None
    lane = [n for n in range(at) if plan.steps[n].lane == plan.steps[at].lane]
    if not lane:
        return None
    target = rng.choice(lane[-3:])
    rest = plan.steps[target:at] + plan.steps[at + 1 :]
    return replace(plan, steps=(*plan.steps[:target], plan.steps[at], *rest))


def _drop_any(rng: Random, plan: Plan) -> Plan | None:
    """A split, copy, merge or free less, and the waits for it."""
    at = _some(rng, plan, "split", "copy", "merge", "free")
    if at is None:
        return None
    label = plan.steps[at].label
    return _keep(plan, lambda s: s.label != label and s.target != label)


def _retarget(rng: Random, plan: Plan) -> Plan | None:
    """A wait for another step."""
    at, other = _some(rng, plan, "wait"), _some(rng, plan, *_ACTING)
    if at is None or other is None:
        return None
    steps = list(plan.steps)
    steps[at] = steps[at]._replace(target=steps[other].label)
    return replace(plan, steps=tuple(steps))


def _change_range(rng: Random, plan: Plan) -> Plan | None:
    """A step over other parts; waits for it follow."""
    at = _some(rng, plan, "run", "copy", "free", "issue", "complete")
    if at is None:
        return None
    start = rng.randrange(plan.num_parts + 1)
    parts: Range | None = (start, rng.randint(start + 1, plan.num_parts + 1))
    changed = plan.steps[at]._replace(parts=parts if rng.random() < 0.7 else None)
    label = plan.steps[at].label
    steps = [s._replace(target=changed.label) if s.target == label else s for s in plan.steps]
    steps[at] = changed
    return replace(plan, steps=tuple(steps))


def _change_lane(rng: Random, plan: Plan) -> Plan | None:
    """A step on another lane, at the same line of the plan."""
    at = _some(rng, plan, "wait", *_ACTING)
    if at is None:
        return None
    steps = list(plan.steps)
    steps[at] = steps[at]._replace(lane=rng.choice(plan.lanes).name)
    return replace(plan, steps=tuple(steps))


def _join_runs(rng: Random, plan: Plan) -> Plan | None:
    """Two runs of a lane over the same parts as one kernel, where one of them stood."""
    runs = [at for at, step in enumerate(plan.steps) if step.kind == "run"]
    like = {at: (plan.steps[at].lane, plan.steps[at].parts) for at in runs}
    pairs = [(one, two) for one in runs for two in runs if one < two and like[one] == like[two]]
    if not pairs:
        return None
    pair = rng.choice(pairs)
    old = [plan.steps[at] for at in pair]
    joined = old[0]._replace(names=old[0].names + old[1].names, by="joined")
    labels, kept = {step.label for step in old}, rng.choice(pair)
    steps = [s._replace(target=joined.label) if s.target in labels else s for s in plan.steps]
    steps[kept] = joined
    return _drop(replace(plan, steps=tuple(steps)), pair[1] if kept == pair[0] else pair[0])


def _change_place(rng: Random, plan: Plan) -> Plan | None:
    """A value with another place, or with none."""
    graph = plan.graph
    made = [name for name in graph.maker if graph.value[name].alias_of is None]
    if not made:
        return None
    name, buffers = rng.choice(made), [buffer.name for buffer in plan.buffers]
    places = [place for place in plan.places if place.value != name]
    if rng.random() < 0.7:
        places.append(Place(name, rng.choice([None, *buffers]), 0))
    return replace(plan, places=tuple(places))


def _change_device(rng: Random, plan: Plan) -> Plan | None:
    """A lane on another device."""
    at, device = rng.randrange(len(plan.lanes)), rng.choice(("cpu", "gpu0"))
    lanes = [replace(lane, device=device) if n == at else lane for n, lane in enumerate(plan.lanes)]
    return replace(plan, lanes=tuple(lanes))
