"""Strategies within parts of a graph, called on a scheduler, and composed; borders with slack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchweft.errors import StrategyError
from torchweft.plan.context import Context, bucket_of, watch
from torchweft.plan.graph import Graph
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.plan import Plan
from torchweft.plan.strategies import branches, compose, get_strategy, overlap, sequential
from torchweft.plan.verify import verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import write
from torchweft_tools.bench.oracle import is_safe
from torchweft_tools.demo.blueprint import transformer

CONTEXT = Context(batch=16)


def layered(num_layers: int = 4) -> Graph:
    """A transformer whose ops know where they are, as those of a captured one do."""
    graph = transformer(num_layers)
    ops = []
    for op in graph.ops:
        name, number = op.name.rstrip("0123456789"), "".join(filter(str.isdigit, op.name))
        where = (f"layers.{number}.{name}", int(number), "Layer") if number else (name, None, None)
        ops.append(replace(op, **dict(zip(("path", "layer", "block"), where, strict=True))))
    return replace(graph, ops=tuple(ops))


GRAPH = layered()


def planned(strategy, graph: Graph = GRAPH, machine=None, context: Context = CONTEXT) -> Plan:
    plan = write(strategy, graph, context, machine)
    assert is_safe([verify(lower(plan))])[0]
    return plan


def parted(plan: Plan) -> set[int]:
    """The layers whose ops run on parts."""
    return {plan.graph.op[s.names[0]].layer for s in plan.steps if s.kind == "run" and s.parts}


def refused(body, rule: str, says: str, graph: Graph = GRAPH) -> None:
    with pytest.raises(StrategyError, match=says) as caught:
        write(lambda s: body(s), graph, CONTEXT, cpu(2))
    assert caught.value.rule == rule


def layer(s: Scheduler, *numbers: int):
    return s.within([op for op in s.graph.ops if op.layer in numbers])


def test_a_strategy_called_on_a_scheduler_writes_what_it_writes_alone():
    for strategy in (overlap(parts=4), sequential, branches):
        alone = write(strategy, GRAPH, CONTEXT, cpu(2))
        called = write(lambda s, way=strategy: way(s), GRAPH, CONTEXT, cpu(2))
        assert called.steps == alone.steps
    assert write(lambda s: overlap(s, parts=4), GRAPH, CONTEXT).num_parts == 4
    refused(lambda s: (overlap(s), overlap(s)), "split", r"merge\(\) was called before")


def test_options_are_named_and_a_compiler_is_for_the_whole_plan():
    with pytest.raises(StrategyError, match=r"'4' is no scheduler.*overlap\(parts=...\)"):
        overlap(4)
    refused(replace(overlap, inner="inductor"), "inner", "for a whole plan")


def test_layers_by_strategies_of_their_own():
    def author(s: Scheduler) -> None:
        with layer(s, 0):
            s.sequential()
        with layer(s, 1, 2):
            overlap(s)
        with layer(s, 3):
            sequential(s)
        s.run("head")
        s.merge()

    plan = planned(author)
    assert plan.num_parts == 2 and parted(plan) == {1, 2}


def test_ready_and_run_are_narrowed():
    def author(s: Scheduler) -> None:
        seen = []
        with layer(s, 0):
            assert {op.layer for op in s.ops} == {0}
            while ready := s.ready():
                seen += [op.layer for op, _ in ready]
                s.run(*ready[0])
        assert set(seen) == {0}
        assert {op.layer for op, _ in s.ready()} == {1}
        for op in s.graph.ops[len(seen) :]:
            s.run(op)

    write(author, GRAPH, CONTEXT)

    def outside(s: Scheduler) -> None:
        with layer(s, 0):
            s.run("attn1")

    refused(outside, "within", "'attn1' is not one of the ops of this block")

    def early(s: Scheduler) -> None:
        with layer(s, 1):
            s.run("attn1")

    refused(early, "run", r"attn1 needs reduce_mlp0 first \(outside of this block")

    def stuck(s: Scheduler) -> None:
        with layer(s, 1):
            overlap(s)

    refused(stuck, "forgotten", "needs reduce_mlp0.*outside of this block")

    def wider(s: Scheduler) -> None:
        with layer(s, 0), layer(s, 1):
            pass

    refused(wider, "within", "'attn1' is outside of the block around this one")


def test_one_cut_for_all():
    def author(s: Scheduler) -> None:
        with layer(s, 0):
            overlap(s, parts=2)
        with layer(s, 1):
            overlap(s, parts=4)

    refused(author, "split", "cut 1/2 1/2 already, and a plan has one cut.*got 1/4 1/4 1/4 1/4")

    def late(s: Scheduler) -> None:
        s.run("attn0")
        s.split(2)

    refused(late, "split", "first, and once")


def test_an_edge_and_a_flight_live_through_a_late_split():
    def author(s: Scheduler) -> None:
        s.run("attn0")
        s.run("reduce_attn0", after=[("attn0", None)])
        with s.within(s.graph.ops[2:]):
            s.split(2)
            assert [(op.name, part) for op, part in s.in_flight()] == [
                ("reduce_attn0", 0), ("reduce_attn0", 1),
            ]  # fmt: skip
            s.run("mlp0", 1)
            assert s.in_flight() == []
            overlap(s)
        s.merge()

    planned(author)


@pytest.mark.parametrize("key", ["1:3", "layers.[12].*", "1", "Layer", "layers.*.reduce*"])
def test_compose_takes_numbers_ranges_classes_and_paths(key):
    plan = planned(compose(layers={key: overlap(parts=4)}, otherwise="sequential"))
    wanted = {"1:3": {1, 2}, "layers.[12].*": {1, 2}, "1": {1}}.get(key, {0, 1, 2, 3})
    assert parted(plan) == wanted


def test_compose_takes_the_first_that_fits_and_tells_what_fits_nothing():
    plan = planned(compose(layers={"0": "sequential", ":2": "branches", "9": "overlap"}))
    assert parted(plan) == {2, 3, None}
    assert "compose: no op is in 9" in plan.history
    refused(compose(layers={"9:": "overlap"}), "layers", "no op is in 9:.*Layers: .0, 1, 2, 3.")
    refused(compose(layers={"1": "overlop"}), "name", "Did you mean 'overlap'")


def test_compose_by_phase_and_tokens():
    ways = compose(phases={"decode": "sequential"}, otherwise=overlap(parts=4), min_tokens=8)
    for context, parts in (
        (Context(16, phase="prefill"), 4),
        (Context(16, phase="decode"), 1),
        (Context(6, phase="prefill"), 1),
        (Context(16), 4),
    ):
        assert write(ways, GRAPH, context).num_parts == parts
    assert get_strategy("compose") is compose
    assert "0x" not in str(ways), "no addresses: ranks tell each other what they run by"


def bucket(num_tokens: int, slack: float = 0.1, *more: int):
    context, seen = watch(Context(batch=num_tokens))
    s = Scheduler(GRAPH, context, cpu())
    many = s.has_tokens(1000, slack=slack)
    for border in more:
        assert isinstance(context.num_tokens < border, bool)
    return many, bucket_of(context, seen)


def test_a_border_with_slack_is_a_band_that_both_plans_serve():
    high, above = bucket(1010)
    low, below = bucket(990)
    assert high and not low
    assert (above.first, above.end) == (900, 1024) and (below.first, below.end) == (512, 1000)
    assert all(each.wavers(950) for each in (above, below))
    assert not any(each.wavers(number) for each in (above, below) for number in (899, 1000, 600))


def test_without_slack_and_beyond_the_next_power_of_two_there_is_no_band():
    assert bucket(1010, 0)[1].first == 1000 and not bucket(1010, 0)[1].wavers(999)
    assert bucket(3000)[1].first == 2048
    assert bucket(1030)[1].first == 1024, "between 1000 and 1024 other calls have a plan"


def test_a_hard_border_cuts_a_band():
    assert bucket(1010, 0.3, 950)[1].first == 950


def test_a_wrong_border_is_refused():
    refused(lambda s: s.has_tokens(-1), "tokens", "whole number, and a slack from 0 to 0.5")
    refused(lambda s: s.has_tokens(8, slack=0.9), "tokens", "whole number, and a slack")
