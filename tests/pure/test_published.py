"""The published strategies: what each puts beside what, when it leaves a call whole, its length."""

from __future__ import annotations

import ast
import inspect
import random
import statistics
from importlib import import_module

import pytest

from torchweft.errors import PlanError, StrategyError
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.plan import Plan, Step
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import (
    dual_batch,
    multiplex,
    nanoflow,
    overlap,
    prefetch,
    sequential,
    single_batch,
)
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import Strategy, get_strategy, strategy_names, write
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.demo.blueprint import experts, on_disk, transformer

MIXED = (1, 1, 1, 1, 40, 20)
CONTEXT = Context(batch=64)
TWO_LANES = cpu(2, capacity=2.0)
PUBLISHED = [nanoflow, single_batch, dual_batch, multiplex, prefetch]


def runs(plan: Plan) -> list[str]:
    return [step.label for step in plan.steps if step.kind in ("run", "issue")]


def lane_of(plan: Plan, label: str) -> str:
    return next(s.on or s.lane for s in plan.steps if label in (s.label, s.label.partition(" ")[2]))


def makespan_s(strategy: Strategy, graph: Graph, context: Context, lanes: int = 1) -> float:
    machine = cpu(lanes, capacity=float(lanes))
    return simulate(
        verify(lower(write(strategy, graph, context, machine))), context, machine
    ).makespan_s


# How long they are.


def body_lines(strategy: Strategy) -> int:
    """Lines of code of a strategy: its function without its signature, docstring and comments, and
    whatever else its file has to say in code, but for imports."""
    module = inspect.getmodule(strategy.function)
    assert module is not None
    source = inspect.getsource(module)
    count, skipped = set(), set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.FunctionDef) and node.name == strategy.name:
            skipped.update(range(node.lineno - 1, node.body[0].lineno))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.update(range(node.lineno, (node.end_lineno or 0) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() and not line.strip().startswith(("#", '"""')):
            count.add(number)
    return len(count - skipped)


def published() -> list[Strategy]:
    """All built-in strategies of the room, but for those that this house calls its own."""
    found = [get_strategy(name) for name in strategy_names()]
    room = "torchweft.plan.strategies."
    return [each for each in found if each.function.__module__.startswith(room)]


def test_a_strategy_is_one_short_page() -> None:
    counted = {each.name: body_lines(each) for each in published()}
    assert max(counted.values()) <= 45, counted
    assert statistics.median(counted.values()) <= 31, counted


def test_each_strategy_says_what_it_is_and_whose_idea() -> None:
    for each in published():
        doc = import_module(each.function.__module__).__doc__ or ""
        assert doc.startswith(f"`{each.name}`"), each.name
        assert "# 1." in inspect.getsource(each.function) or body_lines(each) < 5, each.name


# When they leave a call whole.


def no_batch() -> Graph:
    values = (Value("w", (Size.of(4),)), Value("y", (Size.of(4),)))
    return Graph("free", values, (Op("make", ("w",), ("y",), rows="batch-free"),), ("w",), ("y",))


def only_mixing() -> Graph:
    rows = (Size.of("s0"), Size.of(4))
    values = (Value("x", rows, batch=Batch(0)), Value("y", rows, batch=Batch(0)))
    return Graph("mix", values, (Op("mix", ("x",), ("y",), rows="mixing"),), ("x",), ("y",), "s0")


SMALL = [
    (no_batch(), Context()),
    (experts(2), Context(batch=1)),
    (experts(2), Context(batch=1, phase="decode", tokens_per_request=(1,))),
    (transformer(1), Context(batch=2)),
    (transformer(1), Context(batch=3, tokens_per_request=(1, 1, 1))),
    (transformer(1), Context(batch=3, tokens_per_request=(3,))),
    (transformer(1), Context(batch=3, tokens_per_request=(0, 3))),
    (transformer(1), Context(batch=4, tokens_per_request=(1, 2, 1))),
    (only_mixing(), Context(batch=8, tokens_per_request=(1, 7))),
]


@pytest.mark.parametrize("number", range(len(SMALL)))
@pytest.mark.parametrize("strategy", PUBLISHED, ids=lambda each: each.name)
def test_small_calls_and_calls_without_a_batch_are_no_errors(strategy, number):
    graph, context = SMALL[number]
    plan = verify(lower(write(strategy, graph, context, TWO_LANES)))
    if plan.num_parts == 1 and strategy not in (single_batch, prefetch):
        assert any(note.startswith("sequential: ") for note in plan.history), plan.history


@pytest.mark.parametrize("strategy", PUBLISHED, ids=lambda each: each.name)
def test_any_batch_and_any_requests_on_random_graphs_are_no_errors(strategy):
    rng = random.Random(1)
    for _ in range(150):
        requests = tuple(rng.choice((0, 1, 1, 1, 2, 9)) for _ in range(rng.randint(0, 5)))
        batch = sum(requests) or rng.randint(1, 20)
        phase = rng.choice((None, "decode", "prefill", "mixed"))
        told = requests if sum(requests) else ()
        context = Context(batch=batch, tokens_per_request=told, phase=phase, sizes={"s1": 4})
        graph = random_graph(rng, num_ops=rng.randint(1, 12))
        verify(lower(write(strategy, graph, context, cpu(rng.randint(1, 3)))))


# What each puts beside what.


def test_nanoflow_cuts_each_kind_of_op_in_its_own_number_of_runs() -> None:
    plan = write(nanoflow, experts(1), CONTEXT, TWO_LANES)
    labels = runs(plan)
    assert [label for label in labels if label.startswith("qkv0")] == ["qkv0[0:2]", "qkv0[2:4]"]
    assert [label for label in labels if "attn0" in label] == [f"attn0[{n}]" for n in range(4)]
    whole = runs(write(nanoflow(compute=1, network=4), experts(1), CONTEXT, TWO_LANES))
    assert "experts0" in whole
    assert sum("dispatch0" in label for label in whole) == 4


def test_nanoflow_has_attention_on_a_lane_of_its_own() -> None:
    plan = write(nanoflow, experts(1), CONTEXT, TWO_LANES)
    assert {s.lane for s in plan.steps if s.names == ("attn0",)} == {"compute1"}
    assert {s.lane for s in plan.steps if s.names == ("qkv0",)} == {"compute"}
    assert makespan_s(nanoflow, experts(4), CONTEXT, 2) < makespan_s(
        overlap, experts(4), CONTEXT, 2
    )


def test_nanoflow_has_parts_of_unequal_size() -> None:
    plan = write(nanoflow(shares=(3, 3, 5, 5)), experts(1), CONTEXT)
    assert plan.cut.bounds(64) == (0, 12, 24, 44, 64)
    with pytest.raises(StrategyError, match="sizes must be whole numbers"):
        write(nanoflow(shares=(0, 1)), experts(1), CONTEXT)


def test_single_batch_puts_the_shared_expert_beside_the_dispatch() -> None:
    machine, graph = cpu(), experts(1)
    plan = verify(lower(write(single_batch, graph, CONTEXT, machine)))
    labels = [step.label for step in plan.steps]
    assert labels.index("issue dispatch0") < labels.index("shared0")
    assert labels.index("shared0") < labels.index("complete dispatch0")
    hidden = simulate(plan, CONTEXT, machine).overlap_share
    assert (
        hidden > simulate(lower(write(sequential, graph, CONTEXT)), CONTEXT, machine).overlap_share
    )
    one = Context(batch=1)
    assert makespan_s(single_batch, experts(4), one) < makespan_s(sequential, experts(4), one)


def test_single_batch_does_not_hold_up_the_chain_for_what_nobody_waits_for() -> None:
    """The op that the rest needs comes before one that is needed at the very end."""
    rows, wide = Size.of("s0"), Size.of(64)
    names = ("x", "side_out", "a_out", "sent_out", "y")
    values = tuple(Value(name, (rows, wide), batch=Batch(0)) for name in names)
    ops = (
        Op("side", ("x",), ("side_out",), flops=rows * 10**7),
        Op("a", ("x",), ("a_out",), flops=rows * 10**6),
        Op("sent", ("a_out",), ("sent_out",), uses="network", two_phase=True),
        Op("y", ("sent_out", "side_out"), ("y",)),
    )
    graph = Graph("late", values, ops, ("x",), ("y",), "s0")
    assert runs(write(single_batch, graph, CONTEXT)) == ["a", "sent", "side", "y"]


def test_dual_batch_takes_turns_and_one_half_gets_ahead_in_decode() -> None:
    labels = [each for each in runs(write(dual_batch, experts(1), CONTEXT)) if "[" in each]
    assert labels[:8] == [
        *("qkv0[0]", "attn0[0]", "route0[0]", "dispatch0[0]"),
        *("qkv0[1]", "attn0[1]", "route0[1]", "dispatch0[1]"),
    ]
    decode = Context(batch=64, phase="decode")
    ahead = runs(write(dual_batch, experts(1), decode))
    assert ahead.index("combine0[0]") < ahead.index("qkv0[1]")
    assert runs(write(dual_batch(decode_offset=0), experts(1), decode)) == labels


def test_dual_batch_has_a_threshold_for_each_phase() -> None:
    strategy = dual_batch(min_tokens=64, decode_min_tokens=32)
    assert write(strategy, experts(1), CONTEXT).num_parts == 1
    assert write(strategy, experts(1), Context(batch=64, phase="decode")).num_parts == 2


def test_dual_batch_has_the_shared_expert_on_a_side_lane() -> None:
    plan = write(dual_batch, experts(1), CONTEXT, TWO_LANES)
    assert lane_of(plan, "shared0[1]") == "compute1"
    assert lane_of(plan, "experts0[1]") == "compute"
    moved = write(dual_batch(shared=r"attn\d"), experts(1), CONTEXT, TWO_LANES)
    assert lane_of(moved, "attn0[0]") == "compute1"
    assert makespan_s(dual_batch, experts(4), CONTEXT, 2) < makespan_s(
        overlap, experts(4), CONTEXT, 2
    )


def test_dual_batch_keeps_requests_whole() -> None:
    context = Context(batch=10, tokens_per_request=(6, 1, 3))
    assert write(dual_batch, experts(1), context).cut.bounds(10, (6, 1, 3)) == (0, 6, 10)


def test_multiplex_cuts_between_decode_and_prefill() -> None:
    context = Context(batch=64, tokens_per_request=MIXED)
    plan = write(multiplex, experts(1), context, TWO_LANES)
    assert plan.cut.bounds(64, MIXED) == (0, 4, 64)
    assert lane_of(plan, "experts0[0]") == "compute1"
    assert lane_of(plan, "experts0[1]") == "compute"
    other = Context(batch=64, tokens_per_request=MIXED[::-1])
    plan = write(multiplex(uses=("memory",)), experts(1), other, TWO_LANES)
    assert plan.cut.bounds(64, MIXED[::-1]) == (0, 60, 64)
    assert [lane_of(plan, f"attn0[{n}]") for n in (0, 1)] == ["compute", "compute1"]
    assert lane_of(plan, "qkv0[1]") == "compute"
    assert makespan_s(multiplex, experts(2), context, 2) < makespan_s(
        sequential, experts(2), context, 2
    )


def test_multiplex_says_why_a_batch_is_not_cut() -> None:
    context = Context(batch=4, tokens_per_request=(1, 2, 1))
    plan = write(multiplex, transformer(1), context)
    assert any("one kind behind the other" in note for note in plan.history)


# Weights that come in ahead.

WEIGHT = 4 * 1024 * 1024 * 4


def gates(plan: Plan) -> list[str]:
    """What each load comes after, if anything."""
    loads = [step for step in plan.steps if step.kind == "run" and step.lane == "io"]
    return [step.after[0][0] if step.after else "" for step in loads]


def most_alive(plan: Plan) -> int:
    """The most loads whose weights are there at once, those that may be freed at that time too."""
    last = {name: n for n, s in enumerate(plan.steps) for name in s.names if s.kind == "run"}
    alive = []
    for number, gate in enumerate(gates(plan)):
        gone = int(gate.removeprefix("layer")) if gate else -1
        assert not gate or last[gate] < last[f"load{number}"]
        alive.append(number - max(gone, 0) + 1)
    return max(alive)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, ["", "", "layer0", "layer1", "layer2"]),
        ({"window": 0}, ["", "layer0", "layer1", "layer2", "layer3"]),
        ({"window": 2}, ["", "", "", "layer0", "layer1"]),
        ({"window": 9}, ["", "", "", "", ""]),
        ({"window": 9, "memory_bytes": 3 * WEIGHT}, ["", "", "", "layer1", "layer2"]),
        ({"window": 9, "memory_bytes": 2 * WEIGHT}, ["", "", "layer1", "layer2", "layer3"]),
    ],
)
def test_prefetch_stays_ahead_by_its_window_and_within_its_memory(options, wanted):
    plan = verify(lower(write(prefetch(**options), on_disk(5), CONTEXT)))
    assert gates(plan) == wanted
    if "memory_bytes" in options:
        assert most_alive(plan) * WEIGHT <= options["memory_bytes"]


def test_prefetch_gains_over_loading_on_demand_and_holds_less_than_all() -> None:
    context, machine = Context(batch=256), cpu(io_bytes_per_s=5e8)
    traces = [
        simulate(verify(lower(write(each, on_disk(8), context, machine))), context, machine)
        for each in (sequential, prefetch, prefetch(window=8))
    ]
    assert traces[1].makespan_s < 0.8 * traces[0].makespan_s
    assert traces[1].peak_bytes < traces[2].peak_bytes


def test_prefetch_says_what_memory_it_needs_at_least() -> None:
    with pytest.raises(StrategyError, match=f"take {2 * WEIGHT} bytes; memory_bytes is 5"):
        write(prefetch(memory_bytes=5), on_disk(3), CONTEXT)
    assert write(prefetch(memory_bytes=WEIGHT), on_disk(1), CONTEXT).steps


# The cut at phases.


@pytest.mark.parametrize(
    ("requests", "bounds"),
    [((1, 1, 5), (0, 2, 7)), ((5, 2, 1), (0, 7, 8)), ((1, 9), (0, 1, 10)), ((4, 1, 1), (0, 4, 6))],
)
def test_a_cut_at_phases_is_where_the_requests_change(requests, bounds):
    assert Cut.even(2, "phases").bounds(sum(requests), requests) == bounds


@pytest.mark.parametrize("requests", [(1, 1), (5, 5), (1, 5, 1), (5, 1, 5), (3,), (1,)])
def test_a_batch_of_one_phase_or_of_mixed_order_is_not_cut_at_phases(requests):
    with pytest.raises(StrategyError, match="one kind behind the other"):
        Cut.even(2, "phases").bounds(sum(requests), requests)


def test_a_cut_at_phases_needs_to_know_the_requests_and_makes_two_parts() -> None:
    with pytest.raises(StrategyError, match="requests of 0 rows in a batch of 8"):
        Cut.even(2, "phases").bounds(8)
    with pytest.raises(StrategyError, match="two phases; got 3 parts"):
        Cut.even(3, "phases")


def test_a_plan_cut_at_phases_has_the_format_that_can_say_so() -> None:
    context = Context(batch=64, tokens_per_request=MIXED)
    plan = lower(write(multiplex, transformer(1), context))
    text = str(plan)
    assert text.startswith("weft plan 2\n")
    assert "parts 1/2 1/2 at phases" in text
    assert Plan.parse(text) == plan
    with pytest.raises(PlanError, match="cuts at phases start with plan format 2"):
        Plan.parse(text.replace("weft plan 2", "weft plan 1"))


def test_every_run_of_a_golden_graph_is_there_once() -> None:
    for strategy in PUBLISHED:
        plan = write(strategy, experts(2), Context(batch=64, tokens_per_request=MIXED), TWO_LANES)
        seen: list[tuple[str, int]] = []
        for step in plan.steps:
            if isinstance(step, Step) and step.kind == "run":
                seen += [
                    (n, p) for n in step.names for p in range(*(step.parts or (0, plan.num_parts)))
                ]
        assert len(seen) == len(set(seen)) == len(plan.graph.ops) * plan.num_parts
