"""The search: plans that get no slower, are safe, and are the same for equal seeds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import StrategyError, WeftError
from torchweft.plan.context import Context, Cut, watch
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.improve import from_genes, genes_of, improve, replay, searched
from torchweft.plan.improve.bound import bound
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Device, Lane, Link, Machine, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import branches, overlap, sequential, strategy_names
from torchweft.plan.verify import verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import write
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.demo.blueprint import transformer

STARTS = [sequential, overlap(parts=2), overlap(parts=3), branches]
SLOW = cpu(network_bytes_per_s=3e7)
randoms = st.integers(0, 2**40).map(random.Random)


def makespan_s(plan: Plan, context: Context, machine: Machine) -> float:
    return simulate(lower(plan), context, machine).makespan_s


def drawn(rng: random.Random) -> tuple[Graph, Context, Machine]:
    rates = {"network_bytes_per_s": 10.0 ** rng.randint(2, 6), "network_share": 0.2}
    machine = cpu(rng.randint(1, 3), capacity=rng.choice((1.0, 2.0)), bytes_per_s=1e5, **rates)
    graph = random_graph(rng, num_ops=rng.randint(1, 8))
    return graph, Context(batch=rng.choice((3, 12)), sizes={"s1": 4}), machine


@settings(max_examples=40)
@given(randoms, st.sampled_from(STARTS))
def test_law_a_plan_gets_no_slower_and_is_safe(rng, start):
    graph, context, machine = drawn(rng)
    plan = write(start, graph, context, machine)
    better = improve(plan, context, machine, budget=25, seed=rng.randint(0, 9))
    assert makespan_s(better, context, machine) <= makespan_s(plan, context, machine)
    lowered = verify(lower(better))
    assert Plan.parse(str(lowered)) == lowered
    assert Plan.parse(str(better)).bind(graph) == better


@settings(max_examples=40)
@given(randoms, st.sampled_from(STARTS))
def test_law_genes_write_their_plan_again(rng, start):
    graph, context, machine = drawn(rng)
    plan = write(start, graph, context, machine)
    scheduler = Scheduler(graph, context, machine)
    from_genes(scheduler, genes_of(plan))
    assert scheduler.finish("again").steps == plan.steps


@pytest.mark.parametrize("batch", [64, 512])
def test_a_slow_network_is_hidden_better_than_by_two_even_parts(batch):
    graph, context = transformer(2), Context(batch=batch)
    plain = write(overlap(parts=2), graph, context, SLOW)
    better = improve(plain, context, SLOW, budget=80)
    plain_s, better_s = (makespan_s(plan, context, SLOW) for plan in (plain, better))
    assert better_s < 0.9 * plain_s
    assert bound(graph, context, SLOW).gap(better_s) < 0.05
    assert better.history[0] == plain.history[0]
    assert better.history[-1].startswith("improve: ")


def test_equal_seeds_give_equal_plans():
    graph, context = transformer(1), Context(batch=64)
    plain = write(overlap(parts=2), graph, context, SLOW)
    plans = [improve(plain, context, SLOW, budget=60, seed=seed) for seed in (1, 1, 2)]
    assert str(plans[0]) == str(plans[1])
    assert plans[0].steps != plans[2].steps or plans[0].cut != plans[2].cut


def test_ops_whose_parts_cost_more_than_they_bring_run_merged():
    """Eight rows: an op in parts reads its weights again, which only the smaller op can afford."""
    graph, context = transformer(4), Context(batch=8)
    better = improve(write(sequential, graph, context, SLOW), context, SLOW, budget=60)
    kinds = {(step.names[0][:3], step.parts is None) for step in better.steps if step.names}
    assert {("mlp", True), ("att", False)} <= kinds


def test_a_plan_that_meets_the_bound_stays_as_it_is():
    graph, context, machine = transformer(2), Context(batch=512), cpu()
    plan = write(overlap(parts=2), graph, context, machine)
    assert improve(plan, context, machine) is plan


def test_a_lowered_plan_is_refused():
    graph, context = transformer(1), Context(batch=8)
    with pytest.raises(StrategyError, match="give the plan as it was written"):
        improve(lower(write(overlap, graph, context)), context, cpu())


def test_kernels_and_their_parts_stay():
    graph, context = transformer(2), Context(batch=64)

    def fused(*args: object) -> None: ...

    def with_kernel(s: Scheduler) -> None:
        s.split(2)
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part, replace=fused if op.name.startswith("mlp") else None)
        s.merge()

    plan = write(with_kernel, graph, context, SLOW)
    better = improve(plan, context, SLOW, budget=40)
    assert better.cut == plan.cut
    kernels = [(step.names, step.parts) for step in better.steps if step.by == "fused"]
    assert sorted(kernels) == [((f"mlp{i}",), (p, p + 1)) for i in (0, 1) for p in (0, 1)]
    assert better.kernels in ({"fused": fused}, plan.kernels)


def test_borders_stay_between_requests():
    graph, context = transformer(1), Context(batch=64, tokens_per_request=(10, 30, 20, 4))
    plan = write(overlap(parts=2, at="requests"), graph, context, SLOW)
    better = improve(plan, context, SLOW, budget=40)
    assert better.cut.rule == "requests"
    inner = better.cut.bounds(64, context.tokens_per_request)
    assert set(inner) <= {0, 10, 40, 60, 64}


def test_searched_is_a_strategy_like_others():
    graph, context = transformer(1), Context(batch=64)
    watched, seen = watch(context)
    plan = write(searched(budget=30, parts=4), graph, watched, SLOW)
    assert "searched" in strategy_names()
    assert plan.history[0] == "write searched(budget=30, seed=0, parts=4)"
    assert "plans simulated" in plan.history[1]
    assert 1 < plan.num_parts <= 4
    assert all(cut <= context.batch for cut in seen)  # the bucket is not cut short
    overlapped = write(overlap(parts=2), graph, context, SLOW)
    assert makespan_s(plan, context, SLOW) < makespan_s(overlapped, context, SLOW)
    verify(lower(plan))


@pytest.mark.parametrize("batch", [0, 1])
def test_what_cannot_be_cut_is_searched_in_one_part(batch):
    graph, context = transformer(1), Context(batch=batch)
    plan = write(searched(budget=10), graph, context, SLOW)
    assert plan.cut == Cut()
    verify(lower(plan))


def test_a_graph_without_a_batch_is_searched_too():
    names = "xabc"
    values = tuple(Value(name, (Size.of(1000),)) for name in names)
    ops = tuple(Op(f"to_{n}", ("x",), (n,), rows="batch-free", flops=Size.of(10**6)) for n in "abc")
    graph = Graph("free", values, ops, ("x",), ("a",))
    machine = cpu(3, capacity=3.0)
    plain = write(sequential, graph, Context(), machine)
    better = improve(plain, Context(), machine, budget=60)
    assert makespan_s(better, Context(), machine) < makespan_s(plain, Context(), machine)


def test_what_lower_cannot_bring_together_is_not_kept():
    """A merged run cannot read what came from another device in two pieces."""
    machine = Machine(
        "pair",
        (Device("cpu", bytes_per_s=1e4), Device("gpu0", bytes_per_s=1e5)),
        (Lane("compute"), Lane("stream", "gpu0")),
        (Link("cpu", "gpu0", 1e5, 0.0), Link("gpu0", "cpu", 1e5, 0.0)),
    )
    context = Context(batch=12, sizes={"s1": 4})
    for seed in range(8):
        graph = transformer(1, 8, tensor_parallel=False)
        plan = write(sequential, graph, context, machine)
        verify(lower(improve(plan, context, machine, budget=60, seed=seed)))


def test_replay_writes_a_plan_again_from_its_text():
    graph, context = transformer(2), Context(batch=64)
    better = improve(write(overlap(parts=2), graph, context, SLOW), context, SLOW, budget=60)
    again = write(replay(plan=str(better)), graph, context, SLOW)
    assert again.steps == better.steps and again.cut == better.cut
    assert lower(again).steps == lower(better).steps
    other = write(replay(plan=str(better)), graph, Context(batch=48), SLOW)
    assert other.steps == better.steps
    assert len(str(replay(plan=str(better)))) < 40  # a name, not the text


def test_replay_takes_the_plan_of_its_graph_out_of_several():
    graphs = [transformer(layers) for layers in (1, 2)]
    plans = [write(overlap(parts=2), graph, Context(batch=8)) for graph in graphs]
    text = "".join(map(str, plans))
    for graph, plan in zip(graphs, plans, strict=True):
        assert write(replay(plan=text), graph, Context(batch=8)).steps == plan.steps
    with pytest.raises(StrategyError, match="none of these plans was made for graph") as raised:
        write(replay(plan=text), transformer(3), Context(batch=8))
    assert raised.value.rule == "graph"


def test_replay_without_a_plan_is_sequential_and_what_its_text_cannot_hold_is_refused():
    graph, context = transformer(1), Context(batch=8)
    plain = write(sequential, graph, context)
    assert write(replay, graph, context).steps == plain.steps
    with pytest.raises(StrategyError, match="two of these plans are for one graph"):
        write(replay(plan=str(plain) * 2), graph, context)
    with pytest.raises(WeftError):
        write(replay(plan="no plan"), graph, context)


@settings(max_examples=30)
@given(randoms, st.sampled_from(STARTS))
def test_law_a_lowered_plan_is_replayed_as_it_stands(rng, start):
    graph, context, machine = drawn(rng)
    lowered = lower(write(start, graph, context, machine))
    again = lower(write(replay(plan=str(lowered)), graph, context, machine))
    assert (again.steps, again.places) == (lowered.steps, lowered.places)
    assert lower(lowered).steps == lowered.steps
    verify(again)


@settings(max_examples=30)
@given(randoms, st.sampled_from(STARTS))
def test_law_replay_of_any_written_plan_is_that_plan(rng, start):
    graph, context, machine = drawn(rng)
    plan = write(start, graph, context, machine)
    assert write(replay(plan=str(plan)), graph, context, machine).steps == plan.steps
