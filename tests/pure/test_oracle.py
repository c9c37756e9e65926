"""The oracle judges by docs/plans.md: plans written by hand, and its methods against each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.kernels.declaration import Declaration
from torchweft.plan.plan import Plan
from torchweft.plan.sizes import Size
from torchweft.plan.verify import findings_ranks
from torchweft_tools.bench import verify as bench
from torchweft_tools.bench.cases.mutations import MUTATIONS
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.bench.cases.random_plans import random_pair, random_plan
from torchweft_tools.bench.oracle import by_closure, by_interleavings, is_safe
from torchweft_tools.bench.oracle.overlap import OracleSpan, overlap, overlap_at

ROWS = Batch(0)
LANES = "lane A on cpu uses compute,network\nlane B on cpu uses compute,network"
HOSTED = "lane A on cpu uses compute\nlane net on cpu uses network via A"
DEVICES = "lane A on cpu uses compute\nlane G on gpu uses compute"
SHARED = "buffer shared on cpu unit 4*s0"


def value(
    name: str, *, batched: bool = True, placeable: bool = True, alias: str | None = None
) -> Value:
    shape = (Size.of("s0"), Size.of(1)) if batched else (Size.of(1),)
    return Value(name, shape, batch=ROWS if batched else None, alias_of=alias, placeable=placeable)


def talk(name: str, reads: str, makes: str, kind: str = "all_reduce") -> Op:
    return Op(
        name, (reads,), (makes,), uses="network", two_phase=True, collective=Collective(kind, "tp")
    )


X, A, Y, Z = value("x"), value("a"), value("y"), value("z")
FIRST, SECOND = Op("first", ("x",), ("a",)), Op("second", ("a",), ("y",))
CHAIN = Graph("chain", (X, A, Y), (FIRST, SECOND), ("x",), ("y",), "s0")
THREE = Graph(
    "three", (X, A, Y, Z), (FIRST, SECOND, Op("third", ("y",), ("z",))), ("x",), ("z",), "s0"
)
BOTH = Graph("both", THREE.values, THREE.ops, ("x",), ("a", "z"), "s0")
LOOSE = Graph("loose", (X, A, value("y", placeable=False)), (FIRST, SECOND), ("x",), ("y",), "s0")
CACHE = Graph("cache", (X, value("c"), A, Y),
              (Op("write", ("x",), mutates=("c",)), Op("first", ("x", "c"), ("a",)), SECOND),
              ("x", "c"), ("y",), "s0")  # fmt: skip
SUM = Graph("sum", (X, value("g", batched=False)), (Op("add", ("x",), ("g",), rows="additive"),),
            ("x",), ("g",), "s0")  # fmt: skip
TALK = Graph(
    "talk", (X, A, Y), (talk("first", "x", "a"), talk("second", "x", "y")), ("x",), ("y",), "s0"
)
ASYNC = Graph("async", (X, A, Y, Z), (talk("first", "x", "a"), SECOND, Op("other", ("x",), ("z",))),
              ("x",), ("y",), "s0")  # fmt: skip
LOOK, USE = Op("look", ("x",), ("v",)), Op("second", ("v",), ("y",))
VIEW = Graph("view", (X, value("v", alias="x"), Y), (LOOK, USE), ("x",), ("y",), "s0")


def plan(
    graph: Graph, steps: str, *, lanes: str = LANES, parts: str = "1", places: str = ""
) -> Plan:
    lines = [line for text in (lanes, places) for line in text.split("\n") if line]
    body = [f"  {step.strip()}" for step in steps.split(";") if step.strip()]
    head = ["weft plan 2", f"graph {graph.name} {graph.digest}", f"parts {parts}"]
    return Plan.parse("\n".join([*head, *lines, "steps", *body, "end"])).bind(graph)


TWO = "1/2 1/2"
Y_ALONE = "place y alone"
SPLIT = "A split x; A first[0]; A first[1];"
SAFE = {
    "one lane": plan(CHAIN, "A first; A second"),
    "a wait between two lanes": plan(CHAIN, "A first; B wait first; B second"),
    "the listing of lanes is free": plan(CHAIN, "B wait first; B second; A first"),
    "two parts, merged in a place": plan(
        CHAIN, f"{SPLIT} A second[0]; B wait first[1]; B second[1]; B wait second[0]; B merge y",
        parts=TWO, places=Y_ALONE),
    "a whole run needs no split": plan(CHAIN, "A first; A second; A merge y", parts=TWO),
    "a copy into the place": plan(
        LOOSE, f"{SPLIT} A second[0]; A copy y[0]; A second[1]; A copy y[1]; A merge y",
        parts=TWO, places=Y_ALONE),
    "a kernel reads what it made": plan(CHAIN, "A (first second) by fused"),
    "an op in flight beside another": plan(
        ASYNC, "A issue first on net; A other; A complete first; A second", lanes=HOSTED),
    "another lane completes": plan(
        ASYNC, "A issue first on net; A other; B complete first; B second",
        lanes=HOSTED + "\nlane B on cpu uses compute"),
    "a copy to another device": plan(
        CHAIN, "A first; A copy a to gpu; G wait copy a to gpu; G second", lanes=DEVICES),
    "places that take turns": plan(
        THREE, "A first; A second; A free a; A third",
        places=f"{SHARED}\nplace a in shared at 0\nplace y in shared at 1\nplace z in shared at 0"),
    "a cache in order": plan(CACHE, "A write; A first; B wait first; B second"),
    "sums in part order": plan(
        SUM, "A split x; A add[0]; B wait add[0]; B add[1]", parts=TWO),
    "a view and its user": plan(VIEW, "A look; B wait look; B second"),
    "a free behind the last use": plan(CHAIN, "A first; A second; A free a"),
}  # fmt: skip
UNSAFE = {
    "race": plan(CHAIN, "A first; B second"),
    "race with a merge": plan(
        CHAIN, f"{SPLIT} A second[0]; B wait first[1]; B second[1]; A merge y",
        parts=TWO, places=Y_ALONE),
    "race for a view": plan(VIEW, "A look; B second"),
    "race with a split": plan(
        CHAIN, "B split x; A first[0]; A first[1]; A second[0]; A second[1]; A merge y",
        parts=TWO, places=Y_ALONE),
    "race with an op in flight": plan(
        ASYNC, "A issue first on net; A other; A second; A complete first", lanes=HOSTED),
    "race of a free": plan(CHAIN, "A first; A second; B wait first; B free a"),
    "a wait behind itself": plan(CHAIN, "A first; A wait second; A second"),
    "a circle of waits": plan(CHAIN, "A wait second; A first; B wait first; B second"),
    "a wait for nothing": plan(CHAIN, "A first; A wait third; A second"),
    "a complete before its issue": plan(
        ASYNC, "A complete first; A issue first on net; A other; A second", lanes=HOSTED),
    "a missing complete": plan(
        ASYNC, "A issue first on net; A other; A second", lanes=HOSTED),
    "use after free": plan(CHAIN, "A first; A free a; A second"),
    "free of an input": plan(CHAIN, "A first; A free x; A second"),
    "free of an output": plan(CHAIN, "A first; A second; A free y"),
    "overlapping live places": plan(
        THREE, "A first; A second; A third",
        places=f"{SHARED}\nplace a in shared at 0\nplace y in shared at 0"),
    "an output overwritten": plan(
        BOTH, "A first; A second; A third",
        places=f"{SHARED}\nplace a in shared at 0\nplace z in shared at 0"),
    "a stale copy": plan(
        CACHE, "A copy c to gpu; A copy x to gpu; A write; G wait write; G first; G second",
        lanes=DEVICES),
    "the caller's cache not written": plan(
        CACHE, "A copy c to gpu; A copy x to gpu; G wait copy x to gpu; G write; G first; G second",
        lanes=DEVICES),
    "another device": plan(CHAIN, "A first; G wait first; G second", lanes=DEVICES),
    "a copy made twice": plan(
        CHAIN, "A first; A copy a to gpu; A copy a to gpu; G wait copy a to gpu; G second",
        lanes=DEVICES),
    "a cache out of order": plan(CACHE, "A first; A write; A second"),
    "sums out of order": plan(SUM, "A split x; A add[1]; A add[0]", parts=TWO),
    "a missing split": plan(
        CHAIN, "A first[0]; A first[1]; A second[0]; A second[1]; A merge y",
        parts=TWO, places=Y_ALONE),
    "a missing merge": plan(CHAIN, f"{SPLIT} A second[0]; A second[1]", parts=TWO, places=Y_ALONE),
    "a merge of loose pieces": plan(
        CHAIN, f"{SPLIT} A second[0]; A second[1]; A merge y", parts=TWO),
    "a missing copy": plan(
        LOOSE, f"{SPLIT} A second[0]; A copy y[0]; A second[1]; A merge y",
        parts=TWO, places=Y_ALONE),
    "a merged run over loose pieces": plan(CHAIN, f"{SPLIT} A second; A merge y", parts=TWO),
    "a missing op": plan(CHAIN, "A first"),
    "a doubled op": plan(CHAIN, "A first; A first; A second"),
    "a range that means all": plan(CHAIN, "A first[0:2]; A second; A merge y", parts=TWO),
    "a merge with one part": plan(CHAIN, "A first; A second; A merge y"),
    "a lane that does not take it": plan(CHAIN, "A first; A second", lanes="lane A on cpu uses io"),
    "a run on a link's lane": plan(
        CHAIN, "A first; A second",
        lanes="lane A on cpu uses compute to gpu\nlane G on gpu uses io"),
    "a step on a hosted lane": plan(CHAIN, "A first; net second", lanes=HOSTED),
    "an issue of a one-phase op": plan(
        CHAIN, "A first; A issue second on net; A complete second", lanes=HOSTED),
    "unordered collectives": plan(TALK, "A first; B second"),
    "a kernel in the wrong order": plan(CHAIN, "A (second first) by fused"),
}  # fmt: skip
IN_ORDER, SWAPPED = plan(TALK, "A first; A second"), plan(TALK, "A second; A first")
APART = plan(TALK, "A first; B wait first; B second")


def verdicts(plans: list[Plan]) -> set[bool | None]:
    return {is_safe(plans)[0], by_closure(plans), by_interleavings(plans)}


@pytest.mark.parametrize("name", SAFE)
def test_a_safe_plan_is_judged_safe(name: str) -> None:
    assert verdicts([SAFE[name]]) == {True}, is_safe([SAFE[name]])


@pytest.mark.parametrize("name", UNSAFE)
def test_an_unsafe_plan_is_judged_unsafe(name: str) -> None:
    assert verdicts([UNSAFE[name]]) == {False}
    assert is_safe([UNSAFE[name]])[1], "an unsafe plan has a reason"


def test_an_op_must_not_write_over_what_it_reads() -> None:
    places = f"{SHARED}\nplace a in shared at 0\nplace y in shared at 0"
    assert verdicts([plan(CHAIN, "A first; A second", places=places)]) == {False}


def test_ranks_must_have_one_order_of_collectives() -> None:
    assert verdicts([IN_ORDER]) == verdicts([SWAPPED]) == {True}, "alone, each is safe"
    assert verdicts([IN_ORDER, IN_ORDER]) == verdicts([IN_ORDER, APART]) == {True}
    assert verdicts([SWAPPED, SWAPPED]) == {True}
    assert verdicts([IN_ORDER, SWAPPED]) == {False}


def test_a_send_meets_its_receive() -> None:
    def graph(kind: str, peer: int) -> Graph:
        op = Op("pass", ("x",), ("a",), uses="network", collective=Collective(kind, "tp", peer))
        return Graph("mail", (X, A), (op,), ("x",), ("a",), "s0")

    send, receive = (plan(graph(kind, peer), "A pass") for kind, peer in (("send", 1), ("recv", 0)))
    assert verdicts([send, receive]) == {True}
    assert verdicts([send, plan(graph("send", 0), "A pass")]) == {False}


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_spans_overlap_if_they_do_for_some_rows(num_parts: int) -> None:
    parts = [None, *range(num_parts)]
    spans = [OracleSpan(*found) for found in product(range(3), (1, 2), parts)]
    rows = list(product(range(1, 8 if num_parts > 2 else 15), repeat=num_parts))
    for one, two in product(spans, spans):
        tried = any(overlap_at(one, two, counts) for counts in rows)
        assert overlap(one, two, num_parts) == tried, (one, two)


def test_both_methods_agree_on_two_thousand_small_cases() -> None:
    decided, index, safe = 0, 0, 0
    while decided < 2000:
        plans = bench.case(1, index)
        verdict = by_interleavings(plans, max_states=800)
        if verdict is not None:
            assert verdict == by_closure(plans), f"case(1, {index})"
            decided, safe = decided + 1, safe + verdict
        index += 1
    assert 0.4 < safe / decided < 0.6


def talking_late(rng: Random, plans: list[Plan]) -> list[Plan] | None:
    """The same plans, some collectives by kernels that talk at their complete, if there are any."""
    graph, placed = plans[0].graph, {place.value for each in plans for place in each.places}
    issued = {s.names[0] for each in plans for s in each.steps if s.kind == "issue" and not s.by}
    kinds = {
        name: talk.kind
        for name in sorted(issued)
        if (talk := graph.op[name].collective) is not None and talk.peer is None
        if not placed.intersection(graph.op[name].makes) and rng.random() < 0.7
    }
    told = []
    for found in plans if kinds else ():
        steps = [
            s._replace(by=f"late_{kinds[s.names[0]]}")
            if s.kind in ("issue", "complete", "run") and s.names[0] in kinds and not s.by
            else s
            for s in found.steps
        ]
        label = {s.label: new.label for s, new in zip(found.steps, steps, strict=True)}
        steps = [s._replace(target=label.get(s.target)) if s.target else s for s in steps]
        declared = [
            Declaration(f"late_{kind}", 2, talks=((kind, "complete"),) * rng.choice((1, 2)))
            if rng.random() < 0.7
            else Declaration(f"late_{kind}", 2, talks=((kind, "issue"), (kind, "complete")))
            for kind in sorted({*kinds.values()})
        ]
        told.append(replace(found, steps=tuple(steps), declared=(*found.declared, *declared)))
    return told or None


def test_kernels_that_talk_at_their_complete_are_judged_as_the_verifier_does() -> None:
    judged, safe, index = 0, 0, 0
    while judged < 120:
        plans = talking_late(Random(index), bench.case(11, index))
        index += 1
        if plans is None:
            continue
        verdict, tried = by_closure(plans), by_interleavings(plans, max_states=300)
        assert verdict == (not findings_ranks(plans)), f"case(11, {index - 1})"
        assert tried in (None, verdict), f"case(11, {index - 1})"
        judged, safe = judged + 1, safe + verdict
    assert 20 < safe < 100


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_random_plans_are_safe_and_read_back(rng: Random) -> None:
    found = random_plan(rng, random_graph(rng))
    assert by_closure([found]), str(found)
    assert Plan.parse(str(found)) == found


def test_a_seed_names_a_case() -> None:
    for index in range(60):
        again = bench.case(7, index)
        assert again == bench.case(7, index)
        assert [found.graph for found in again] == [found.graph for found in bench.case(7, index)]
    assert random_pair(Random(3)) == random_pair(Random(3))


def test_half_of_the_cases_are_safe_and_every_mutation_occurs() -> None:
    cases = [bench.draw(2, index) for index in range(600)]
    safe = sum(by_closure(found.plans) for found in cases)
    assert 0.45 < safe / len(cases) < 0.55
    assert {found.mutation for found in cases} == {None, *MUTATIONS}
    assert {len(found.plans) for found in cases} == {1, 2}
    small = [sum(s.kind != "wait" for p in found.plans for s in p.steps) <= 14 for found in cases]
    assert sum(small) > len(cases) / 2


def test_rows_do_not_depend_on_the_number_of_workers() -> None:
    pytest.importorskip("torchweft.plan.verify")
    assert list(bench._judged(200, 5, 1)) == list(bench._judged(200, 5, 2))
