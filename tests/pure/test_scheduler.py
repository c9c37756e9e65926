"""The scheduler against strategies that make mistakes: each gets a clear error at its own line."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

import pytest

from torchweft.errors import StrategyError
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Lane, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.sizes import Size
from torchweft.plan.verify import verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import write
from torchweft_tools.demo.blueprint import transformer

GRAPH = transformer(1)
CONTEXT = Context(batch=16)
Body = Callable[[Scheduler], object]


def refused(body: Body, rule: str, says: str, *, limit_s: float = 10.0) -> StrategyError:
    def author(s: Scheduler) -> None:
        body(s)

    with pytest.raises(StrategyError, match=says) as caught:
        write(author, GRAPH, CONTEXT, cpu(2), limit_s=limit_s)
    assert caught.value.rule == rule
    return caught.value


def run_all(s: Scheduler) -> None:
    while ready := s.ready():
        for op, part in ready:
            s.run(op, part)


def split_then(*calls: Body) -> Body:
    def body(s: Scheduler) -> None:
        s.split(2)
        for call in calls:
            call(s)

    return body


FORGETS: dict[str, Body] = {
    "whole batch": lambda s: s.run("attn0"),
    "nothing at all": lambda s: None,
    "one part": split_then(lambda s: s.run("attn0", 0), lambda s: s.merge()),
}


@pytest.mark.parametrize("name", FORGETS)
def test_forgotten_op_is_named(name: str) -> None:
    refused(FORGETS[name], "forgotten", r"(attn0|attn0\[1\]|reduce_attn0) was never run")


def test_op_run_twice_is_refused_at_the_second_call() -> None:
    refused(lambda s: (s.run("attn0"), s.run("attn0")), "run", "attn0 has been run already")
    body = split_then(lambda s: s.run("attn0", 0, 1), lambda s: s.run("attn0", 1))
    refused(body, "run", r"attn0\[1\] has been run already")


def test_split_without_merge_is_refused() -> None:
    refused(split_then(run_all), "merge", r"never merged: call s.merge\(\)")


def test_op_before_its_inputs_is_refused_and_says_what_it_needs() -> None:
    refused(lambda s: s.run("mlp0"), "run", "mlp0 needs reduce_attn0 first")
    refused(split_then(lambda s: s.run("reduce_attn0", 1)), "run", r"needs attn0\[1\] first")


def test_asking_ready_for_ever_is_stopped() -> None:
    def body(s: Scheduler) -> None:
        while s.ready():
            pass

    refused(body, "loop", r"ready\(\) was asked 10000 times")


def test_looping_for_ever_without_a_call_is_stopped_in_time() -> None:
    def body(s: Scheduler) -> None:
        while True:
            pass

    error = refused(body, "loop", "had not finished after 0.5 s", limit_s=0.5)
    assert error.source is not None


def test_what_a_strategy_raises_is_wrapped_with_its_line() -> None:
    def clumsy(s: Scheduler) -> None:
        s.run("attn0")
        {}["missing"]  # type: ignore[index]

    with pytest.raises(StrategyError, match="'clumsy' raised KeyError: 'missing'") as caught:
        write(clumsy, GRAPH, CONTEXT)
    assert caught.value.rule == "raised"
    assert '{}["missing"]' in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_our_own_errors_carry_the_strategy_line() -> None:
    def clumsy(s: Scheduler) -> None:
        s.run("atn0")

    with pytest.raises(StrategyError) as caught:
        write(clumsy, GRAPH, CONTEXT)
    assert 's.run("atn0")' in (caught.value.source or "")


NAMES: dict[str, tuple[Body, str, str]] = {
    "op": (lambda s: s.run("atn0"), "op", "Did you mean 'attn0'"),
    "hostile op": (lambda s: s.run("x\n__import__('os')"), "op", re.escape("x\\n__import__")),
    "lane": (lambda s: s.run("attn0", lane="gpu"), "lane", "Known: compute, compute1, io, network"),
    "foreign lane": (lambda s: s.run("attn0", lane="network"), "lane", "does not take ops"),
    "lane of no name": (lambda s: s.run("attn0", lane=5), "lane", "unknown lane '5'"),
    "part": (split_then(lambda s: s.run("attn0", 7)), "part", "no part 7; parts are 0 to 1"),
    "negative part": (split_then(lambda s: s.run("attn0", -1)), "part", "no part -1"),
    "parts in a tuple": (
        split_then(lambda s: s.run("attn0", (0, 1))),
        "part",
        r"s.run\(op, 0, 1\)",
    ),
    "ops one by one": (
        lambda s: s.run("attn0", "reduce_attn0", replace=print),
        "part",
        r"s.run\(\(op, 'reduce_attn0'\), part, replace=kernel\)",
    ),
    "part of no number": (split_then(lambda s: s.run("attn0", "x")), "part", "no part 'x'"),
    "ready part": (split_then(lambda s: s.ready(9)), "part", "no part 9"),
    "cost of an op": (lambda s: s.cost("mpl0"), "op", "Did you mean 'mlp0'"),
    "rule": (lambda s: s.split(2, at="tokens"), "split", "Known: phases, requests"),
    "kernel": (lambda s: s.run("attn0", replace="a\nb"), "kernel", "is not a name"),
    "kernel of no name": (lambda s: s.run("attn0", replace=5), "kernel", "5"),
}


@pytest.mark.parametrize("name", NAMES)
def test_unknown_name_lists_the_choices(name: str) -> None:
    refused(*NAMES[name])


SPLITS: dict[str, tuple[Body, str]] = {
    "no part": (lambda s: s.split(0), "parts"),
    "too many": (lambda s: s.split(10**6), "1 to 1024"),
    "more parts than rows": (lambda s: s.split(17), "16 rows cannot make 17 parts"),
    "twice": (lambda s: (s.split(2), s.split(2)), "first, and once"),
    "late": (lambda s: (s.run("attn0"), s.split(2)), "first, and once"),
    "wrong sum": (lambda s: s.split([8, 9]), r"fit one batch only.*s.split\(\[8/17, 9/17\]\)"),
    "shares of more": (lambda s: s.split([0.5, 0.75]), "add up to 1"),
    "empty": (lambda s: s.split([]), "sizes"),
    "words": (lambda s: s.split(["a", "b"]), "sizes"),
    "requests that are not there": (lambda s: s.split(2, at="requests"), "requests of 0 rows"),
    "half a part": (lambda s: s.split(2.5), "2.5"),
    "nothing": (lambda s: s.split(None), "None"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_impossible_split_is_refused(name: str) -> None:
    body, says = SPLITS[name]
    refused(body, "split", says)


def test_parts_that_are_not_adjacent_are_refused() -> None:
    def body(s: Scheduler) -> None:
        s.split(4)
        s.run("attn0", 0, 2)

    refused(body, "part", "not adjacent")


def test_closed_plan_takes_no_more_calls() -> None:
    refused(lambda s: (s.sequential(), s.run("attn0")), "run", r"sequential\(\) was called before")
    refused(lambda s: (s.sequential(), s.split(2)), "split", r"sequential\(\) was called before")


def test_several_ops_need_a_kernel() -> None:
    refused(lambda s: s.run(("attn0", "reduce_attn0")), "run", "replace=kernel")


def test_graph_without_a_batch_cannot_be_split() -> None:
    graph = Graph(
        "free",
        (Value("y", (Size.of(4),)),),
        (Op("make", (), ("y",), rows="batch-free"),),
        (),
        ("y",),
    )
    with pytest.raises(StrategyError, match="no batch to split"):
        write(lambda s: s.split(2), graph, CONTEXT)


def test_merged_run_over_several_parts_is_one_step() -> None:
    def author(s: Scheduler) -> None:
        s.split(4)
        s.run("attn0", 0, 1)
        s.run("attn0", 2, 3)
        run_all(s)
        s.merge()

    plan = verify(lower(write(author, GRAPH, CONTEXT)))
    labels = [step.label for step in plan.steps]
    assert "attn0[0:2]" in labels and "attn0[2:4]" in labels and "attn0[0]" not in labels


def test_kernel_takes_the_place_of_ops() -> None:
    def fused() -> None: ...

    def author(s: Scheduler) -> None:
        s.run(("mlp_a", "mlp_b"), replace=fused)

    names = ("x", "h", "y")
    values = tuple(Value(name, (Size.of("s0"),), batch=Batch(0)) for name in names)
    ops = (Op("mlp_a", ("x",), ("h",)), Op("mlp_b", ("h",), ("y",)))
    plan = write(author, Graph("pair", values, ops, ("x",), ("y",), "s0"), CONTEXT)
    assert "(mlp_a mlp_b) by fused" in str(plan)
    assert plan.kernels == {"fused": Kernel("fused", fused)}
    verify(lower(plan))


def test_uneven_parts_are_normal() -> None:
    def author(s: Scheduler) -> None:
        s.split([4, 12])
        run_all(s)
        s.merge()

    plan = verify(lower(write(author, GRAPH, CONTEXT)))
    assert str(plan.cut) == "1/4 3/4"
    assert plan.cut.bounds(16) == (0, 4, 16)


def test_cut_and_lane_may_be_given_as_values() -> None:
    def author(s: Scheduler) -> None:
        s.split(Cut.even(2))
        s.run("attn0", 0, lane=Lane("compute1"))
        run_all(s)
        s.merge()

    plan = verify(lower(write(author, GRAPH, CONTEXT, cpu(2))))
    assert plan.steps[1].lane == "compute1"


@pytest.mark.parametrize("reason", ["plain", "two\nlines", "\x1b[31m", "  ", "steps", "a\u2028b"])
def test_whatever_reason_is_given_the_plan_reads_back(reason: str) -> None:
    plan = write(lambda s: s.sequential(reason), GRAPH, CONTEXT)
    assert Plan.parse(str(plan)) == plan


CONTEXTS = {
    "batch": {"batch": "16"},
    "half a row": {"batch": 1.5},
    "negative": {"batch": -1},
    "tokens": {"tokens_per_request": (4, -1)},
    "token words": {"tokens_per_request": ("a",)},
    "negative tokens": {"num_tokens": -1},
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_impossible_context_is_refused(name: str) -> None:
    with pytest.raises(StrategyError, match="context"):
        Context(**CONTEXTS[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", [[3 / 8, 5 / 8], [1 / 3, 1 / 3, 1 / 3], [Fraction(1, 7), 6 / 7]])
def test_shares_fit_any_batch(shares: list[float]) -> None:
    def author(s: Scheduler) -> None:
        s.split(shares)
        run_all(s)
        s.merge()

    for batch in (16, 21, 999):
        plan = write(author, GRAPH, Context(batch=batch))
        assert [float(share) for share in plan.cut.fractions] == pytest.approx(shares)
