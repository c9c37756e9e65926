"""Declared kernels: what they say stands in the plan, and is held against graph and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import torchweft as weft
from torchweft.errors import PlanError, StrategyError
from torchweft.plan.context import Context
from torchweft.plan.improve import replay
from torchweft.plan.kernels.declaration import Declaration
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.lower.lower import lower
from torchweft.plan.plan import Plan, Step
from torchweft.plan.verify import findings, findings_ranks, verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import write
from torchweft_tools.bench.races.known_race import read_graph

CONTEXT = Context(8)
OPS = """product x,w -> y
sum y -> r all_reduce@tp two-phase
norm r,x,scale -> h,n
after h,n -> z"""
GRAPH = read_graph("block", OPS, batched=True)


def start(*reads: Any, group: object = None) -> Any: ...


def finish(flight: Any, group: object = None) -> Any: ...


TALKS = [("reduce_scatter", "issue"), ("all_gather", "complete")]
FUSED = weft.kernel(issue=start, complete=finish, talks=TALKS, name="fused")


def author(kernel: Any, *, parts: int = 2, names: tuple[str, ...] = ("sum", "norm")) -> Any:
    """Everything in order, but for these ops, which the kernel stands for."""

    def by_kernel(s: Scheduler) -> None:
        if parts > 1:
            s.split(parts)
        while ready := s.ready():
            for op, part in ready:
                if op.name == names[0]:
                    s.run(names, part, replace=kernel)
                else:
                    s.run(op, part)
        if parts > 1:
            s.merge()

    return by_kernel


def refused(kernel: Any, why: str, **options: Any) -> None:
    with pytest.raises(StrategyError, match=why) as told:
        write(author(kernel, **options), GRAPH, CONTEXT)
    assert told.value.rule == "kernel"
    assert "s.run(names, part, replace=kernel)" in (told.value.source or "")


def test_a_kernel_in_two_phases_is_issued_early_and_completed_late() -> None:
    plan = verify(lower(write(author(FUSED), GRAPH, CONTEXT)))
    steps = [str(step) for step in plan.steps if step.by]
    assert steps == [
        "compute  issue (sum norm)[0] by fused on network",
        "compute  issue (sum norm)[1] by fused on network",
        "compute  complete (sum norm)[0] by fused",
        "compute  complete (sum norm)[1] by fused",
    ]
    between = [step.label for step in plan.steps]
    assert between.index("issue (sum norm)[0]") < between.index("product[1]")


DECLARED = [
    Declaration("fused"),
    Declaration("fused", 2),
    Declaration("fused", 2, ("y", "*.scale", "a$b?"), ("y",), tuple(TALKS)),  # type: ignore[arg-type]
    Declaration("fused", 1, ("y",), (), (("custom", "issue"), ("barrier", "issue"))),
]


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_what_a_kernel_declares_reads_back(declared: Declaration) -> None:
    plan = replace(write(author(FUSED), GRAPH, CONTEXT), declared=(declared,))
    assert Plan.parse(str(plan)) == plan
    assert str(plan).startswith("weft plan 2\n") and f"\nkernel {declared}\n" in str(plan)
    with pytest.raises(PlanError, match="'kernel' lines start with plan format 2"):
        Plan.parse(str(plan).replace("weft plan 2", "weft plan 1"))


BROKEN = [
    "kernel fused talks all_reduce", "kernel fused talks shout@issue", "kernel fused phases 3",
    "kernel fused talks all_reduce@middle", "kernel fused reads a b", "kernel fused reads [x]",
]  # fmt: skip


@pytest.mark.parametrize("line", BROKEN)
def test_a_line_that_declares_nothing_known_is_refused(line: str) -> None:
    text = str(write(author(FUSED), GRAPH, CONTEXT)).replace(f"kernel {FUSED.declaration}", line)
    with pytest.raises(PlanError, match="cannot read this 'kernel' line"):
        Plan.parse(text)


def test_a_plain_function_declares_nothing_and_keeps_format_1() -> None:
    plan = write(author(start, names=("norm",)), GRAPH, CONTEXT)
    assert str(plan).startswith("weft plan 1\n") and "\nkernel " not in str(plan)
    verify(lower(plan))


def test_a_plain_function_may_not_stand_for_a_collective() -> None:
    refused(start, "'sum' talks to other ranks, and the kernel does not declare")
    plan = lower(write(author(FUSED), GRAPH, CONTEXT))
    assert {each.rule for each in findings(replace(plan, declared=()))} == {"legality"}
    silent = weft.kernel(start)  # it is declared: it says nothing
    assert write(author(silent), GRAPH, CONTEXT).declared == (Declaration("start"),)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "nobody to talk to": ({"talks": ["all_reduce"], "names": ("norm",)}, "so on none"),
    "a read that is not there": ({"reads": ["y", "nothing*"]}, "reads='nothing\\*' fits nothing"),
    "a read of many": ({"reads": ["?"]}, "fits y, x"),
    "a value that is neither read nor a weight": ({"reads": ["n"]}, "reads='n' fits nothing"),
    "a write of what it is not given": ({"reads": ["y"], "writes": ["x"]}, "writes='x' fits none"),
    "a write of the caller's": ({"writes": ["x"]}, "its bytes are the caller's"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_declaration_that_does_not_fit_the_ops_is_refused_at_the_authors_line(name: str) -> None:
    given, why = dict(WRONG[name][0]), WRONG[name][1]
    names = given.pop("names", ("sum", "norm"))
    refused(weft.kernel(start, **given), why, names=names)


def test_a_kernel_may_use_up_only_what_nobody_else_wants() -> None:
    ops = "one x -> a,b\ntwo a,b -> c\nthree b -> d"
    graph = read_graph("used", ops, batched=True)
    for name, why in (("a", ""), ("b", "which 'three' reads too"), ("[ab]", "must be names")):
        try:
            kernel = weft.kernel(start, writes=[name])
            plan = write(author(kernel, names=("two",)), graph, CONTEXT)
            assert not why and findings(lower(plan)) == []
        except StrategyError as error:
            assert why and why in str(error)


def test_weights_may_be_read_beside_what_the_ops_read() -> None:
    graph = read_graph("pair", "one x -> y\ntwo y,w -> z", batched=True)
    values = tuple(replace(v, batch=None) if v.name == "w" else v for v in graph.values)
    graph = replace(graph, values=values)
    kernel = weft.kernel(start, reads=["x", "w"])
    assert findings(lower(write(author(kernel, names=("one",)), graph, CONTEXT))) == []
    with pytest.raises(StrategyError, match="fits nothing"):
        write(author(weft.kernel(start, reads=["z"]), names=("one",)), graph, CONTEXT)


MISTAKES: dict[str, tuple[Any, str]] = {
    "nothing callable": (lambda: weft.kernel(5), "give one function"),
    "half of it": (lambda: weft.kernel(issue=start), "give one function"),
    "too much": (lambda: weft.kernel(start, issue=start, complete=finish), "give one function"),
    "a misspelt talk": (lambda: weft.kernel(start, talks=["all_reduse"]), "mean 'all_reduce'"),
    "a phase it has not": (lambda: weft.kernel(start, talks=[("all_reduce", "complete")]), "like"),
    "reads as a text": (lambda: weft.kernel(start, reads="x"), "must be names of values"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_kernel_that_cannot_be_is_refused_where_it_is_declared(name: str) -> None:
    make, why = MISTAKES[name]
    with pytest.raises(StrategyError, match=why):
        make()


def test_a_kernel_is_declared_by_a_decorator_too() -> None:
    @weft.kernel(talks=["all_reduce"], writes=["y"])
    def summed(y: int, group: object = None) -> int:
        return y + 1

    assert isinstance(summed, Kernel) and summed(1) == 2
    assert str(summed.declaration) == "summed writes y talks all_reduce@issue"
    with pytest.raises(TypeError, match="two phases"):
        FUSED(1)


def test_kernels_of_one_name_get_numbers_and_equal_ones_are_one() -> None:
    def two(s: Scheduler) -> None:
        one, other = weft.kernel(start, name="k"), weft.kernel(finish, name="k")
        s.run("product", replace=weft.kernel(start, name="k"))
        s.run(("sum", "norm"), replace=weft.kernel(issue=start, complete=finish, name="k"))
        s.run("after", replace=other if one is other else one)

    plan = write(two, GRAPH, CONTEXT)
    assert [step.by for step in plan.steps] == ["k", "k_1", "k"]


# Ranks.


def swapped(plan: Plan) -> Plan:
    """The same plan with its two completes in the other order."""
    at = [number for number, step in enumerate(plan.steps) if step.kind == "complete"]
    steps = list(plan.steps)
    steps[at[0]], steps[at[1]] = steps[at[1]], steps[at[0]]
    return replace(plan, steps=tuple(steps))


def level(step: Step) -> int:
    """All that comes before the completes, they, all that comes behind them."""
    return 1 if step.kind == "complete" else 2 * (step.names == ("after",) or step.kind == "merge")


@pytest.mark.parametrize("at", ["issue", "complete"])
def test_a_talk_at_a_complete_makes_completes_part_of_the_order_of_collectives(at: str) -> None:
    talks = [("reduce_scatter", "issue"), ("all_gather", at)]
    kernel = weft.kernel(issue=start, complete=finish, talks=talks)
    plan = lower(write(author(kernel), GRAPH, CONTEXT))
    steps = sorted((step for step in plan.steps if step.kind != "free"), key=level)
    plan = replace(plan, steps=tuple(steps))
    assert findings(plan) == findings(swapped(plan)) == []
    assert findings_ranks([plan, plan]) == []
    rules = {each.rule for each in findings_ranks([plan, swapped(plan)])}
    assert rules == ({"order"} if at == "complete" else set())


def test_completes_that_talk_on_two_lanes_must_be_ordered() -> None:
    def steps(*lines: Step) -> Plan:
        bare = write(author(FUSED, parts=1), graph, CONTEXT)
        lane = replace(bare.lanes[0], name="other")
        return replace(bare, lanes=(*bare.lanes, lane), steps=lines)

    ops = "one x -> a all_reduce@tp two-phase\ntwo x -> b all_reduce@tp two-phase"
    graph = read_graph("pair", ops, batched=True)

    def author(kernel: Any, parts: int) -> Any:
        return lambda s: (s.run("one", replace=kernel), s.run("two", replace=kernel))

    def step(kind: str, name: str, lane: str = "compute") -> Step:
        return Step(kind, lane, (name,), on="network" if kind == "issue" else None, by="fused")

    issues = step("issue", "one"), step("issue", "two")
    loose = steps(*issues, step("complete", "one"), step("complete", "two", "other"))
    assert {each.rule for each in findings(loose)} == {"order"}
    wait = Step("wait", "other", target="complete one")
    held = steps(*issues, step("complete", "one"), wait, step("complete", "two", "other"))
    assert findings(held) == []
    assert wait in lower(replace(loose, history=())).steps


def test_ranks_of_which_one_does_not_talk_are_refused() -> None:
    silent = lower(write(author(weft.kernel(issue=start, complete=finish)), GRAPH, CONTEXT))
    talks = lower(write(author(FUSED), GRAPH, CONTEXT))
    assert {each.rule for each in findings_ranks([talks, silent])} == {"deadlock"}


# Plans as text.


def test_a_plan_with_kernels_is_written_again_if_they_are_given_by_name() -> None:
    plan = write(author(FUSED), GRAPH, CONTEXT)
    again = write(replay(plan=str(plan)), GRAPH, CONTEXT, kernels={"fused": FUSED})
    assert again.steps == plan.steps and again.declared == plan.declared
    assert again.kernels == plan.kernels
    with pytest.raises(StrategyError, match="has a kernel 'fused', which its text does not hold"):
        write(replay(plan=str(plan)), GRAPH, CONTEXT)
    other = weft.kernel(issue=start, complete=finish, name="fused", talks=["all_reduce"])
    with pytest.raises(StrategyError, match=r"reduce_scatter@issue.*declares fused phases 2"):
        write(replay(plan=str(plan)), GRAPH, CONTEXT, kernels={"fused": other})


def test_a_strategy_may_name_a_kernel_that_is_given() -> None:
    plan = write(author("fused"), GRAPH, CONTEXT, kernels={"fused": FUSED})
    assert plan.declared == (FUSED.declaration,)
    with pytest.raises(StrategyError, match="does not declare"):
        write(author("fused"), GRAPH, CONTEXT)
