"""Control edges: recorded, written, lowered to waits, verified, judged, simulated, replayed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import PlanError, StrategyError
from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.improve import improve, replay
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.verify import findings, verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import write
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.bench.oracle import by_closure, is_safe
from torchweft_tools.buffers import lower_into_buffers
from torchweft_tools.demo.blueprint import transformer

CONTEXT = Context(batch=12, sizes={"s1": 4})
randoms = st.integers(0, 2**40).map(random.Random)


def drawn(rng: random.Random, num_parts: int, num_lanes: int, *, share: float = 0.5) -> Plan:
    """A bare plan of a random graph: any order, any lanes, edges to anything before."""

    def author(s: Scheduler) -> None:
        if num_parts > 1:
            s.split(num_parts)
        done = []
        while ready := s.ready():
            op, part = rng.choice(ready)
            after = rng.sample(done, min(len(done), rng.randint(1, 2)))
            after = after if rng.random() < share else []
            s.run(op, part, lane=rng.choice(s.lanes(op)), after=after)
            done.append((op, part))
        s.merge()

    graph = random_graph(rng, num_ops=rng.randint(2, 9))
    return write(author, graph, CONTEXT, cpu(num_lanes, capacity=4.0))


def without(plan: Plan, at: int) -> Plan:
    return replace(plan, steps=plan.steps[:at] + plan.steps[at + 1 :])


shapes = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(randoms, shapes, st.booleans())
def test_edges_read_back_are_lowered_and_every_wait_is_needed(rng, shape, buffers):
    bare = drawn(rng, *shape)
    assert Plan.parse(str(bare)) == bare
    plan = verify(lower_into_buffers(bare) if buffers else lower(bare))
    assert Plan.parse(str(plan)) == plan
    assert sum(len(s.after) for s in plan.steps) == sum(len(s.after) for s in bare.steps)
    simulate(plan, CONTEXT, cpu(3, capacity=4.0))
    for index, step in enumerate(plan.steps):
        if step.kind == "wait":
            assert findings(without(plan, index)), f"{step} is redundant in\n{plan}"


@settings(max_examples=50, deadline=None)
@given(randoms, shapes)
def test_the_oracle_agrees_with_and_without_a_wait(rng, shape):
    plan = lower(drawn(rng, *shape))
    safe, why = is_safe([plan])
    assert safe, f"{why}\n{plan}"
    assert by_closure([plan])
    for index in [i for i, step in enumerate(plan.steps) if step.kind == "wait"][:4]:
        assert not is_safe([without(plan, index)])[0]
        assert not by_closure([without(plan, index)])


@settings(max_examples=60, deadline=None)
@given(randoms, shapes)
def test_an_edge_is_kept_at_every_speed(rng, shape):
    """In the trace of a simulation with random costs nothing begins before what it comes after."""
    plan = lower(drawn(rng, *shape))
    machine = cpu(3, capacity=4.0, overhead_s=rng.choice([0.0, 1e-3]))
    spans = simulate(plan, CONTEXT, machine).spans
    start = {s.label.removeprefix("issue "): s.start_s for s in spans if s.kind in ("run", "issue")}
    end = {s.label: s.end_s for s in spans if s.kind in ("run", "transfer")}
    for step in plan.steps:
        label = step._replace(kind="run").label
        for name, parts in step.after:
            earlier = step._replace(kind="run", names=(name,), parts=parts).label
            if label in start and earlier in end:
                assert end[earlier] <= start[label] + 1e-12


@settings(max_examples=60, deadline=None)
@given(randoms, shapes)
def test_replay_writes_the_edges_again_and_the_search_keeps_them(rng, shape):
    bare = drawn(rng, *shape)
    machine = cpu(shape[1], capacity=4.0)
    again = write(replay(plan=str(bare)), bare.graph, CONTEXT, machine)
    assert again.steps == bare.steps
    better = improve(bare, CONTEXT, machine, budget=10)
    assert edges_of(better) == edges_of(bare)
    verify(lower(better))


def edges_of(plan: Plan) -> set[object]:
    return {(step.names, step.parts, step.after) for step in plan.steps if step.after}


def lonely() -> Graph:
    """Three ops that have nothing to do with each other; `talk` is on the wire."""
    values = [Value(name, (Size.of("s0"),), batch=Batch(0)) for name in "xabc"]
    ops = (
        Op("a", ("x",), ("a",)),
        Op("b", ("x",), ("b",)),
        Op("talk", ("x",), ("c",), uses="network", two_phase=True),
    )
    return Graph("lonely", tuple(values), ops, ("x",), ("a", "b", "c"), "s0")


def test_an_issue_does_not_move_ahead_of_what_it_comes_after():
    def free(s: Scheduler) -> None:
        for op in ("a", "b", "talk"):
            s.run(op)

    def held(s: Scheduler) -> None:
        s.run("a")
        s.run("b")
        s.run("talk", after=[("a", None)])

    def steps(author) -> list[str]:
        return [str(step) for step in lower(write(author, lonely(), CONTEXT)).steps]

    assert steps(free)[0] == "compute  issue talk on network"
    assert steps(held)[:2] == ["compute  a", "compute  issue talk on network after a"]


def test_what_comes_after_a_two_phase_op_waits_for_its_end():
    def author(s: Scheduler) -> None:
        s.run("talk")
        s.run("a", lane="compute1", after=[("talk", None)])
        s.run("b")

    plan = verify(lower(write(author, lonely(), CONTEXT, cpu(2))))
    assert "compute1  wait complete talk" in map(str, plan.steps)
    bad = replace(plan, steps=tuple(step for step in plan.steps if step.kind != "wait"))
    with pytest.raises(PlanError, match="nothing orders a behind talk") as caught:
        verify(bad)
    assert caught.value.rule == "order"
    assert "wait for it" in str(caught.value)


def refused(author, says: str, rule: str = "after") -> StrategyError:
    with pytest.raises(StrategyError, match=says) as caught:
        write(author, transformer(1), Context(batch=16), cpu(2))
    assert caught.value.rule == rule
    return caught.value


def test_an_edge_to_what_was_not_recorded_is_refused_at_its_line():
    def author(s: Scheduler) -> None:
        s.split(2)
        s.run("attn0", 0)
        s.run("reduce_attn0", 0, after=[("attn0", 1)])

    error = refused(author, r"come after attn0\[1\], which has not been run yet: run it first")
    assert 's.run("reduce_attn0", 0, after' in (error.source or "")


@pytest.mark.parametrize("target", ["attn0", "mlp0"])
def test_a_cycle_is_refused(target):
    refused(lambda s: s.run("attn0", after=[(target, None)]), "needs it: a cycle|cycle")


def test_a_wrong_edge_says_how_to_write_it():
    refused(lambda s: s.run("attn0", after=["mlp0"]), "not an .op, part. pair")
    refused(lambda s: s.run("attn0", after=[("nlp0", None)]), "Did you mean", "op")
    refused(lambda s: s.run("attn0", after=[("attn0", 7)]), "no part 7", "part")


def test_in_flight_tells_what_nobody_has_read():
    seen = []

    def author(s: Scheduler) -> None:
        s.split(2)
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part)
                seen.append([f"{one.name}[{at}]" for one, at in s.in_flight()])
        s.merge()

    write(author, transformer(1), Context(batch=16))
    assert seen[:3] == [[], [], ["reduce_attn0[0]"]]
    assert ["reduce_attn0[0]", "reduce_attn0[1]"] in seen
    assert seen[seen.index(["reduce_attn0[0]", "reduce_attn0[1]"]) + 1] == ["reduce_attn0[1]"]
    assert write(author, lonely(), CONTEXT), "a graph where nobody reads it"
    assert seen[-1] == ["talk[0]", "talk[1]"]


def test_an_edge_lands_what_it_comes_after():
    def author(s: Scheduler) -> None:
        s.run("talk")
        assert [op.name for op, _ in s.in_flight()] == ["talk"]
        s.run("a", after=[("talk", None)])
        assert s.in_flight() == []
        s.run("b")

    write(author, lonely(), CONTEXT)


FORMAT = """weft plan {0}
graph lonely {1}
parts 1
lane compute on cpu uses compute,memory,network
lane network on cpu uses network via compute
steps
  compute  b
  compute  {2}
  compute  issue talk on network after b a
  compute  complete talk
end
"""


def test_edges_are_of_format_2():
    digest = lonely().digest
    plan = Plan.parse(FORMAT.format(2, digest, "a after b")).bind(lonely())
    assert str(plan).startswith("weft plan 2\n")
    verify(plan)
    with pytest.raises(PlanError, match="from plan format 2 on"):
        Plan.parse(FORMAT.format(1, digest, "a after b"))


BROKEN = {
    "a complete": ("a\n  compute  complete a after b", "goes with a run or an issue"),
    "nothing": ("a after b [0]", "no op, or op and range"),
    "an odd range": ("a after b[3:2]", "range"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_edges_of_a_text_are_refused(name):
    step, says = BROKEN[name]
    with pytest.raises(PlanError, match=says):
        Plan.parse(FORMAT.format(2, lonely().digest, step))


UNSAFE = {
    "a b in disorder": ("a after talk", "order"),
    "an unknown op": ("a after c", "legality"),
    "a part that is not there": ("a after b[4]", "legality"),
    "itself": ("a after a", "order"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_the_verifier_and_the_oracle_refuse_an_edge_that_does_not_hold(name):
    step, rule = UNSAFE[name]
    plan = Plan.parse(FORMAT.format(2, lonely().digest, step)).bind(lonely())
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert caught.value.rule == rule
    assert not is_safe([plan])[0]
    assert not by_closure([plan])
