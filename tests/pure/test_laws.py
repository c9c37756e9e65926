"""The laws of the house, on random graphs: what must hold for every graph, plan and strategy."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from torchweft.errors import GraphError, MemoryPlanError
from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Device, Lane, Link, Machine, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import (
    branches,
    dual_batch,
    multiplex,
    nanoflow,
    overlap,
    prefetch,
    sequential,
    single_batch,
)
from torchweft.plan.verify import findings, verify
from torchweft.plan.write.strategy import write
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.bench.cases.random_plans import random_plan
from torchweft_tools.bench.oracle import is_safe
from torchweft_tools.buffers import lower_into_buffers

SETTINGS = settings(max_examples=150, deadline=None)
CHOICES = [
    (sequential, 1),
    (sequential, 3),
    (overlap(parts=2), 1),
    (overlap(parts=3), 2),
    (branches, 1),
    (branches, 3),
    (nanoflow, 2),
    (nanoflow(shares=(1, 2, 1)), 2),
    (nanoflow(shares=(1, 1, 1, 3), compute=1, memory=3, network=4), 3),
    (single_batch, 1),
    (dual_batch, 2),
    (dual_batch(offset=2, shared="op[13]"), 3),
    (multiplex, 2),
    (prefetch, 1),
    (prefetch(window=0), 2),
    (multiplex(uses=("memory",)), 1),
]
CONTEXT = Context(batch=12, sizes={"s1": 4}, tokens_per_request=(1, 1, 1, 4, 5))
randoms = st.integers(0, 2**40).map(random.Random)
choices = st.sampled_from(CHOICES)


def planned(rng: random.Random, choice: tuple[object, int], *, buffers: bool = False) -> Plan:
    strategy, num_lanes = choice
    graph = random_graph(rng, num_ops=rng.randint(1, 10))
    bare = write(strategy, graph, CONTEXT, cpu(num_lanes, capacity=4.0))
    return lower_into_buffers(bare) if buffers else lower(bare)


@SETTINGS
@given(randoms, choices, st.booleans())
def test_law_1_a_plan_reads_back(rng, choice, buffers):
    plan = planned(rng, choice, buffers=buffers)
    assert Plan.parse(str(plan)) == plan
    drawn = random_plan(rng, random_graph(rng))
    assert Plan.parse(str(drawn)) == drawn


@settings(max_examples=600, deadline=None)
@given(randoms, choices, st.booleans())
def test_law_2_every_strategy_on_every_graph_passes_verify(rng, choice, buffers):
    verify(planned(rng, choice, buffers=buffers))


@SETTINGS
@given(randoms, st.booleans())
def test_law_3_every_wait_is_needed(rng, buffers):
    plan = planned(rng, (branches, 3), buffers=buffers)
    for index, step in enumerate(plan.steps):
        if step.kind == "wait":
            fewer = replace(plan, steps=plan.steps[:index] + plan.steps[index + 1 :])
            assert findings(fewer), f"{step} is redundant in\n{plan}"


@SETTINGS
@given(randoms, choices)
def test_law_4_no_plan_beats_its_critical_path_and_none_is_slower_than_one_by_one(rng, choice):
    plan = planned(rng, choice)
    trace = simulate(plan, CONTEXT, cpu(3, capacity=4.0), contention=False)
    assert trace.critical_path_s <= trace.makespan_s * (1 + 1e-9)
    assert trace.makespan_s <= sum(span.busy_s for span in trace.spans) * (1 + 1e-9)
    slowed = simulate(plan, CONTEXT, cpu(3, capacity=1.0, network_share=0.5))
    assert slowed.critical_path_s <= slowed.makespan_s * (1 + 1e-9)


@SETTINGS
@given(randoms, choices)
def test_law_5_values_alive_together_share_no_byte(rng, choice):
    plan = planned(rng, choice, buffers=True)
    assert_bytes_apart(plan, rng)


@settings(max_examples=60, deadline=None)
@given(randoms, choices, st.booleans())
def test_lowered_plans_are_safe_by_the_oracle_too(rng, choice, buffers):
    plan = planned(rng, choice, buffers=buffers)
    safe, why = is_safe([plan])
    assert safe, f"{why}\n{plan}"


def assert_bytes_apart(plan: Plan, rng: random.Random) -> None:
    """Run the plan in a random legal order on real offsets; nobody may read another's bytes."""
    graph = plan.graph
    rows = [rng.randint(1, 5) for _ in range(plan.num_parts)]
    env = {"s0": sum(rows), "s1": 3}
    owner: dict[tuple[str, int], str] = {}
    spots = {}
    for place in plan.places:
        if place.buffer is not None:
            unit = next(b.unit for b in plan.buffers if b.name == place.buffer).evaluate(env)
            size = graph.value[place.value].bytes.evaluate(env)
            spots[place.value] = (
                place.buffer,
                range(place.offset * unit, place.offset * unit + size),
            )
    for step in random_order(plan, rng):
        if step.kind not in ("run", "issue"):
            continue
        for name in step.names:
            op = graph.op[name]
            for read in op.reads + op.mutates:
                root = graph.root[read]
                if root in spots:
                    buffer, spot = spots[root]
                    held = {owner.get((buffer, byte)) for byte in spot} - {None}
                    assert held == {root}, f"{name} reads {root}, but its bytes hold {held}"
            for made in op.makes:
                if made in spots:
                    buffer, spot = spots[made]
                    owner.update({(buffer, byte): made for byte in spot})


def random_order(plan: Plan, rng: random.Random):
    """The steps in a random order that lanes and waits allow."""
    queues = {}
    for step in plan.steps:
        queues.setdefault(step.lane, []).append(step)
    done: set[str] = set()
    while any(queues.values()):
        free = [q for q in queues.values() if q and (q[0].target is None or q[0].target in done)]
        step = rng.choice(free).pop(0)
        done.add(step.label)
        yield step


def test_a_race_is_told_with_the_step_marked_and_the_cure():
    rng = random.Random(3)
    for _ in range(200):
        plan = planned(rng, (branches, 3))
        waits = [i for i, step in enumerate(plan.steps) if step.kind == "wait"]
        if waits:
            fewer = replace(plan, steps=plan.steps[: waits[0]] + plan.steps[waits[0] + 1 :])
            with pytest.raises(Exception, match="<-- here") as caught:
                verify(fewer)
            assert caught.value.rule in ("race", "memory", "order")
            assert caught.value.step is not None
            return
    raise AssertionError("no plan had a wait")


def test_a_row_wise_op_must_not_touch_all_rows_of_what_it_changes():
    rows, size = Batch(0), (Size.of("s0"),)
    values = (Value("x", size, batch=rows), Value("view", size, alias_of="x"))
    ops = (
        Op("look", ("x",), ("view",), rows="mixing"),
        Op("change", ("x", "view"), mutates=("x",)),
    )
    with pytest.raises(GraphError, match="use 'mixing'"):
        Graph("g", values, ops, ("x",), ("x",), "s0")


PAIR = Machine(
    "pair",
    (Device("cpu"), Device("gpu0")),
    (Lane("compute"), Lane("stream", "gpu0")),
    (Link("cpu", "gpu0"), Link("gpu0", "cpu")),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(randoms)
def test_a_plan_over_two_devices_waits_for_what_is_sent(rng):
    """Ops of random graphs, each on any of two devices: who reads a value there comes behind the
    copy that brings it, not only behind its maker."""
    graph = random_graph(rng, num_ops=rng.randint(1, 10))
    plain = replace(
        graph,
        ops=tuple(
            replace(op, uses="compute", two_phase=False, collective=None) for op in graph.ops
        ),
    )

    def anywhere(s):
        while ready := s.ready():
            for op, *parts in ready:
                s.run(op, *parts, lane=rng.choice(("compute", "stream")))

    plan = write(anywhere, plain, CONTEXT, PAIR)
    try:
        lowered = lower(plan)
    except MemoryPlanError:  # an op changes what the other device holds too: refused, and told
        assume(False)
    verify(lowered)
