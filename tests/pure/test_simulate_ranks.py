"""Plans of all ranks on one clock: times computed by hand, laws on random pairs, deadlocks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import PlanError
from torchweft.plan.context import Context
from torchweft.plan.graph import Collective, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, CostTable, Device, Link, Machine, cpu
from torchweft.plan.plan import Plan, Step
from torchweft.plan.simulator import simulate, simulate_ranks
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.trace import Span, Trace
from torchweft.plan.verify import findings_ranks, verify_ranks
from torchweft.plan.write.strategy import write
from torchweft_tools.bench.cases.mutations import swap_steps
from torchweft_tools.bench.cases.random_graphs import mirror, random_graph
from torchweft_tools.bench.cases.random_plans import random_pair

CONTEXT = Context(batch=12, sizes={"s1": 4})
MACHINE = cpu(overhead_s=0.0, network_latency_s=0.0)
randoms = st.integers(0, 2**40).map(random.Random)


def rank_graph(*ops: str) -> Graph:
    """Ops with nothing between them: `a`, `send>1`, `recv<1`, `reduce`, `reduce@dp`, each once."""
    values, made = [], []
    for number, text in enumerate(ops):
        kind = "send" if ">" in text else "recv" if "<" in text else "all_reduce"
        name, _, peer = text.replace("<", ">").partition(">")
        name, _, group = name.partition("@")
        talks = kind != "all_reduce" or name.startswith("reduce")
        talk = Collective(kind, group or "tp", int(peer) if peer else None, "t")
        uses = "network" if talks else "compute"
        values.append(Value(f"v{number}", dtype="opaque"))
        op = Op(name, (), (f"v{number}",), uses=uses, rows="batch-free", two_phase=talks)
        made.append(replace(op, collective=talk if talks else None))
    return Graph("rank", tuple(values), tuple(made), (), ())


def rank_plan(graph: Graph, text: str) -> Plan:
    """A plan of steps such as `a; issue send; complete send`, all on the compute lane."""
    steps = []
    for line in text.split(";"):
        *kind, name = line.split()
        step = Step(kind[0] if kind else "run", "compute", (name,))
        steps.append(step._replace(on="network") if kind == ["issue"] else step)
    fresh = Plan(graph.name, graph.digest, write(sequential, graph, CONTEXT, MACHINE).cut, (), ())
    return replace(fresh, lanes=MACHINE.lanes, steps=tuple(steps), bound=graph)


def fixed(seconds: Mapping[str, float]) -> Costs:
    return Costs(MACHINE, CostTable.of({(op, "cpu"): {0: s} for op, s in seconds.items()}))


def at(trace: Trace, label: str) -> Span:
    return next(s for s in trace.spans if s.label == label and s.kind in ("run", "transfer"))


def test_a_receive_does_not_start_before_its_send() -> None:
    left, right = rank_graph("a", "send>1"), rank_graph("b", "recv<0")
    plans = [
        rank_plan(left, "a; issue send; complete send"),
        rank_plan(right, "issue recv; b; complete recv"),
    ]
    costs = fixed({"a": 3.0, "b": 1.0, "send": 2.0, "recv": 2.5})
    one, other = simulate_ranks(plans, CONTEXT, MACHINE, costs)
    assert (at(one, "send").start_s, at(other, "recv").start_s) == (3.0, 3.0)
    assert (one.makespan_s, other.makespan_s) == (5.0, 5.5)
    assert simulate(plans[1], CONTEXT, MACHINE, costs).makespan_s == 2.5  # alone: at once
    # The longest chain passes over both ranks; each has its own part of it.
    assert [s.label for s in one.critical_path if s.busy_s] == ["a"]
    assert [s.label for s in other.critical_path if s.busy_s] == ["recv"]


def test_messages_that_cross_go_beside_each_other() -> None:
    """Each sends before it receives; both messages are on their way at once, at half the rate."""
    graphs = [rank_graph("send>1", "recv<1"), rank_graph("send>0", "recv<0")]
    text = "issue send; issue recv; complete send; complete recv"
    plans = verify_ranks([rank_plan(graph, text) for graph in graphs])
    costs = fixed({"send": 2.0, "recv": 2.0})
    assert [t.makespan_s for t in simulate_ranks(plans, CONTEXT, MACHINE, costs)] == [4.0, 4.0]
    free = simulate_ranks(plans, CONTEXT, MACHINE, costs, contention=False)
    assert [trace.makespan_s for trace in free] == [2.0, 2.0]


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_a_collective_starts_when_the_last_rank_has_arrived(num_ranks: int) -> None:
    graph = rank_graph("a", "reduce")
    plans = [rank_plan(graph, "a; issue reduce; complete reduce")] * num_ranks
    costs = [fixed({"a": 1.0 + rank, "reduce": 0.5}) for rank in range(num_ranks)]
    for trace in simulate_ranks(plans, CONTEXT, MACHINE, costs):
        assert at(trace, "reduce").start_s == num_ranks
        assert trace.makespan_s == num_ranks + 0.5


def test_only_members_of_a_group_wait_for_each_other() -> None:
    graph = replace(rank_graph("a", "reduce@half"), communicators=(("half", (0, 2)),))
    other = rank_graph("a")
    plans = [rank_plan(graph, "a; reduce"), rank_plan(other, "a"), rank_plan(graph, "a; reduce")]
    costs = [fixed({"a": seconds, "reduce": 1.0}) for seconds in (1.0, 9.0, 4.0)]
    traces = simulate_ranks(plans, CONTEXT, MACHINE, costs)
    assert [trace.makespan_s for trace in traces] == [5.0, 9.0, 5.0]
    reduce = at(traces[0], "reduce")
    assert (reduce.start_s, reduce.end_s) == (4.0, 5.0)


def test_a_deadlock_is_told_with_the_steps_of_each_rank() -> None:
    graphs = [rank_graph("send>1", "recv<1"), rank_graph("send>0", "recv<0")]
    plans = [rank_plan(graph, "recv; send") for graph in graphs]
    with pytest.raises(PlanError, match="no lane can go on") as caught:
        simulate_ranks(plans, CONTEXT, MACHINE)
    text = str(caught.value)
    assert caught.value.rule == "deadlock"
    for rank in (0, 1):
        assert f"rank {rank} compute stands at step 0: recv, which rank {1 - rank} does not" in text
        assert f"rank {rank}:\n" in text
    assert "one order" in text


def test_ranks_that_have_no_plan_are_missed() -> None:
    plans = [rank_plan(rank_graph("send>3"), "send"), rank_plan(rank_graph("a"), "a")]
    with pytest.raises(PlanError, match="rank 0: send talks to rank 3, which has no plan"):
        simulate_ranks(plans, CONTEXT, MACHINE)
    with pytest.raises(PlanError, match="no plan to simulate"):
        simulate_ranks([], CONTEXT, MACHINE)
    with pytest.raises(PlanError, match="3 are given for 2 ranks"):
        simulate_ranks(plans, [CONTEXT] * 3, MACHINE)


def written(rng: random.Random, num_parts: int) -> list[Plan]:
    graph = random_graph(rng, num_ops=rng.randint(1, 10), talks=0.5)
    strategy = overlap(parts=num_parts) if num_parts > 1 else sequential
    pair = [lower(write(strategy, side, CONTEXT, MACHINE)) for side in (graph, mirror(graph))]
    return verify_ranks(pair)


def drawn_costs(rng: random.Random, plans: Sequence[Plan]) -> list[Costs]:
    names = [[op.body or op.name for op in plan.graph.ops] for plan in plans]
    return [fixed({name: rng.choice((0.0, 0.5, 1.0, 3.0)) for name in own}) for own in names]


@settings(max_examples=150, deadline=None)
@given(randoms, st.integers(1, 3), st.booleans())
def test_law_ranks_together_are_never_earlier_than_alone(rng, num_parts, contention) -> None:
    plans = written(rng, num_parts)
    costs = drawn_costs(rng, plans)
    together = simulate_ranks(plans, CONTEXT, MACHINE, costs, contention=False)
    for plan, own, trace in zip(plans, costs, together, strict=True):
        alone = simulate(plan, CONTEXT, MACHINE, own, contention=False)
        assert trace.makespan_s >= alone.makespan_s
        assert simulate_ranks([plan], CONTEXT, MACHINE, own, contention=contention) == [
            simulate(plan, CONTEXT, MACHINE, own, contention=contention)
        ]
    path_s = sum(trace.critical_path_s for trace in together)
    assert max(trace.makespan_s for trace in together) == pytest.approx(path_s)
    both = simulate_ranks(plans, CONTEXT, MACHINE, costs, contention=contention)
    assert both == simulate_ranks(plans, CONTEXT, MACHINE, costs, contention=contention)
    assert max(trace.makespan_s for trace in both) >= path_s * (1 - 1e-9)


@settings(max_examples=150, deadline=None)
@given(randoms, st.integers(1, 3))
def test_law_nothing_is_received_before_it_is_sent(rng, num_parts) -> None:
    plans = written(rng, num_parts)
    traces = simulate_ranks(plans, CONTEXT, MACHINE, drawn_costs(rng, plans))
    for mine, theirs, plan in ((*traces, plans[0]), (*traces[::-1], plans[1])):
        for op in plan.graph.ops:
            if op.collective is None:
                continue
            spans = [s for s in mine.spans if s.op == op.name and s.kind in ("run", "transfer")]
            for span in spans:
                partner = at(theirs, span.label)
                if op.collective.kind == "recv":
                    assert span.end_s >= partner.start_s
                if op.two_phase and op.collective.kind in ("send", "recv"):
                    assert span.start_s == partner.start_s


def machine_of(plans: Sequence[Plan]) -> Machine:
    lanes = {lane.name: lane for plan in plans for lane in plan.lanes if lane.to is None}
    names = dict.fromkeys(lane.device for plan in plans for lane in plan.lanes)
    links = tuple(Link(a, b) for a in names for b in names if a != b)
    return Machine("any", tuple(map(Device, names)), tuple(lanes.values()), links)


@settings(max_examples=400, deadline=None)
@given(randoms)
def test_law_what_deadlocks_is_what_the_verifier_says(rng) -> None:
    plans = random_pair(rng)
    if rng.random() < 0.7:  # swapped steps are found to be stuck much more often
        plans[1] = swap_steps(rng, plans[1]) or plans[1]
    rules = {item.rule for item in findings_ranks(plans)}
    if rules - {"deadlock", "race", "order"}:
        return  # what breaks static rules may not be simulated
    machines = [machine_of([plan]) for plan in plans]
    try:
        simulate_ranks(plans, CONTEXT, machines)
        stuck = False
    except PlanError as error:
        assert error.rule == "deadlock"
        stuck = True
    assert stuck == ("deadlock" in rules)
