"""Built-in strategies: the golden plans in tests/plans, and what the registry says.

`make plans` writes the golden plans anew. Read the difference before committing it: it is what
users' plans will do from now on.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from torchweft.errors import StrategyError
from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Machine, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import (
    branches,
    dual_batch,
    get_strategy,
    multiplex,
    nanoflow,
    overlap,
    prefetch,
    sequential,
    single_batch,
    strategy_names,
    tokenweave,
    ulysses,
)
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import Strategy, strategy, write
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.buffers import lower_into_buffers
from torchweft_tools.cli.picture import picture
from torchweft_tools.demo.blueprint import experts, on_disk, sequence, transformer

PLANS = Path(__file__).parents[1] / "plans"
CONTEXT = Context(batch=512)
MIXED = Context(batch=512, tokens_per_request=(1,) * 32 + (200, 280))
DECODE = Context(batch=512, phase="decode")


def diamond() -> Graph:
    """Two branches of unequal length between one op and another: q, k and v, then a join."""
    batch, wide = Size.of("s0"), Size.of(1024)
    names = ["x", "n", "q", "k", "v", "g", "y"]
    values = tuple(Value(name, (batch, wide), batch=Batch(0), placeable=True) for name in names)
    flops = batch * (2 * 1024 * 1024)
    ops = (
        Op("norm", ("x",), ("n",)),
        Op("query", ("n",), ("q",), flops=flops * 2),
        Op("key", ("n",), ("k",), flops=flops),
        Op("value", ("n",), ("v",), flops=flops),
        Op("gate", ("k", "v"), ("g",)),
        Op("join", ("q", "g"), ("y",)),
    )
    return Graph("diamond", values, ops, ("x",), ("y",), "s0")


LANES = cpu(2, capacity=2.0)
GOLDEN: dict[str, tuple[Strategy, Graph, Machine, bool, Context]] = {
    "sequential": (sequential, transformer(2), cpu(), False, CONTEXT),
    "overlap2": (overlap(parts=2), transformer(2), cpu(), False, CONTEXT),
    "overlap4": (overlap(parts=4), transformer(2), cpu(), False, CONTEXT),
    "overlap2_buffers": (overlap(parts=2), transformer(2), cpu(), True, CONTEXT),
    "overlap2_kv_cache": (overlap(parts=2), transformer(2, kv_cache=True), cpu(), False, CONTEXT),
    "branches": (branches, transformer(2), cpu(2, capacity=2.0), False, CONTEXT),
    "branches_diamond": (branches, diamond(), LANES, False, CONTEXT),
    "nanoflow": (nanoflow(shares=(3, 3, 5, 5)), experts(2), LANES, False, CONTEXT),
    "single_batch": (single_batch, experts(2), cpu(), False, CONTEXT),
    "dual_batch": (dual_batch, experts(2), LANES, False, CONTEXT),
    "dual_batch_decode": (dual_batch, experts(2), LANES, False, DECODE),
    "prefetch": (prefetch, on_disk(4), cpu(), False, CONTEXT),
    "multiplex": (multiplex, experts(2), LANES, False, MIXED),
    "tokenweave": (tokenweave, transformer(2), cpu(), False, CONTEXT),
    "ulysses": (ulysses, sequence(2), cpu(), False, CONTEXT),
}


def golden_plan(name: str) -> Plan:
    chosen, graph, machine, buffers, context = GOLDEN[name]
    lowered = lower_into_buffers if buffers else lower
    return verify(lowered(write(chosen, graph, context, machine)))


@pytest.mark.parametrize("name", GOLDEN)
def test_plan_is_the_golden_plan(name: str, request: pytest.FixtureRequest) -> None:
    plan, path = golden_plan(name), PLANS / f"{name}.plan"
    if request.config.getoption("--write-plans"):
        plan.save(path)
    golden = Plan.load(path)
    assert not golden.diff(plan), f"{golden.diff(plan)}\nmeant so? Then run: make plans"
    assert str(plan) == path.read_text()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_plan_read_from_its_file_is_safe(name: str) -> None:
    verify(Plan.load(PLANS / f"{name}.plan", GOLDEN[name][1]))


PICTURES = ("dual_batch", "multiplex", "nanoflow", "prefetch", "single_batch", "ulysses")


@pytest.mark.parametrize("name", PICTURES)
def test_picture_of_the_docs_is_what_the_viewer_draws(name: str, request) -> None:
    _, _, machine, _, context = GOLDEN[name]
    drawn = picture(simulate(golden_plan(name), context, machine))
    path = PLANS.parents[1] / "docs" / f"{name}.svg"
    if request.config.getoption("--write-plans"):
        path.write_text(drawn)
    assert path.read_text() == drawn, "meant so? Then run: make plans"
    assert "(simulated)" in drawn


def test_every_golden_file_has_a_test() -> None:
    assert {path.stem for path in PLANS.glob("*.plan")} == set(GOLDEN)


def test_overlap_hides_the_network_that_sequential_exposes() -> None:
    graph, machine = transformer(2), cpu(network_bytes_per_s=5e7)
    plain = simulate(lower(write(sequential, graph, CONTEXT, machine)), CONTEXT, machine)
    split = simulate(lower(write(overlap, graph, CONTEXT, machine)), CONTEXT, machine)
    assert plain.exposed_network_s == pytest.approx(plain.network_s)
    assert split.overlap_share > 0.9
    assert split.makespan_s < plain.makespan_s


def test_ulysses_goes_on_over_the_borders_of_layers() -> None:
    graph, machine = sequence(4), cpu(network_bytes_per_s=5e7)
    times = {
        how: simulate(lower(write(how, graph, CONTEXT, machine)), CONTEXT, machine).makespan_s
        for how in (sequential, overlap, ulysses)
    }
    assert times[ulysses] < 0.95 * times[overlap] < 0.9 * times[sequential]


@pytest.mark.parametrize("parts", [2, 3])
def test_ulysses_on_random_graphs_with_exchanges(parts: int) -> None:
    split = 0
    for seed in range(80):
        graph = random_graph(random.Random(seed), num_ops=8, talks=0.4, messages=0.0)
        kind = "all_to_all_single"
        talks = [op.collective and replace(op.collective, kind=kind) for op in graph.ops]
        pairs = zip(graph.ops, talks, strict=True)
        ops = [replace(op, collective=talk) for op, talk in pairs]
        context = Context(batch=12, sizes={"s1": 4})
        plan = verify(lower(write(ulysses(parts=parts), replace(graph, ops=tuple(ops)), context)))
        split += plan.num_parts == parts
    assert split > 20


def test_ulysses_of_one_row_needs_the_calls_of_a_model() -> None:
    plan = write(ulysses, sequence(1), Context(batch=1))
    assert plan.num_parts == 1 and "no calls behind graph 'sequence1'" in str(plan)
    assert "it has no all_to_all" in str(write(ulysses, transformer(1), CONTEXT))
    assert "fewer than 999" in str(write(ulysses(min_tokens=999), sequence(1), CONTEXT))


def test_overlap_runs_small_calls_in_one_piece_and_says_why() -> None:
    plan = write(overlap(parts=2, min_tokens=512), transformer(1), CONTEXT)
    assert plan.num_parts == 1
    assert "sequential: 512 tokens are fewer than 2 x 512" in plan.history


def test_overlap_without_a_batch_says_that_there_is_nothing_to_split() -> None:
    value = Value("y", (Size.of(4),))
    graph = Graph("free", (value,), (Op("make", (), ("y",), rows="batch-free"),), (), ("y",))
    with pytest.raises(StrategyError, match="'free' has no batch to split"):
        write(overlap, graph, Context())
    assert write(overlap(min_tokens=1), graph, Context()).num_parts == 1


def test_branches_use_both_lanes_and_gain_by_it() -> None:
    graph, machine = diamond(), cpu(2, capacity=2.0)
    both = lower(write(branches, graph, CONTEXT, machine))
    one = lower(write(sequential, graph, CONTEXT, machine))
    assert {step.lane for step in both.steps} == {"compute", "compute1"}
    gained = (
        simulate(one, CONTEXT, machine).makespan_s / simulate(both, CONTEXT, machine).makespan_s
    )
    assert gained > 1.5


def test_built_in_strategies_are_registered() -> None:
    assert {"branches", "overlap", "sequential", "tokenweave"} <= set(strategy_names())
    assert get_strategy("overlap") is overlap


def test_misspelt_strategy_lists_the_choices() -> None:
    with pytest.raises(
        StrategyError, match=r"Did you mean 'overlap'\? Known: (auto, )?branches, (.*, )?overlap"
    ):
        write("overlop", transformer(1), CONTEXT)


def test_misspelt_option_lists_the_choices() -> None:
    with pytest.raises(StrategyError, match="Did you mean 'parts'\\? Known: at, min_tokens, parts"):
        overlap(prts=2)


def test_options_by_call_leave_the_strategy_as_it_was() -> None:
    four = overlap(parts=4)
    assert str(four) == "overlap(parts=4, min_tokens=0, at=None)"
    assert str(overlap) == "overlap(parts=2, min_tokens=0, at=None)"
    assert write(four, transformer(1), CONTEXT).num_parts == 4


def test_two_strategies_of_one_name_are_refused() -> None:
    def overlap(s: object) -> None: ...

    with pytest.raises(StrategyError, match="already one named 'overlap'"):
        strategy(overlap)


def test_option_without_a_default_is_refused() -> None:
    def needy(s: object, *, parts: int) -> None: ...

    with pytest.raises(StrategyError, match="every option needs a default"):
        write(needy, transformer(1), CONTEXT)


@pytest.mark.parametrize("what", [5, None, ["overlap"]])
def test_what_is_neither_name_nor_function_is_refused(what: object) -> None:
    with pytest.raises(StrategyError, match="neither a name nor a function"):
        write(what, transformer(1), CONTEXT)  # type: ignore[arg-type]


def test_requests_stay_whole_when_cut_at_requests() -> None:
    context = Context(batch=10, tokens_per_request=(6, 1, 3))
    plan = write(overlap(parts=2, at="requests"), transformer(1), context)
    assert str(plan.cut) == "1/2 1/2 at requests"
    assert plan.cut.bounds(10, context.tokens_per_request) == (0, 6, 10)
