"""Explanations: known cases by hand, an owner for each moment, and laws on random timelines."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import WeftError
from torchweft.plan.context import Context
from torchweft.plan.explain.explanation import Explanation, explain
from torchweft.plan.explain.intervals import clipped, common, covers, total_s, union, without
from torchweft.plan.explain.owners import OWNERS
from torchweft.plan.explain.timeline import TimedWork, Timeline, timeline_of
from torchweft.plan.explain.what_if import WhatIf, rebuilt, seen_costs, what_ifs
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.trace import Span, Trace, side_by_side
from torchweft.plan.write.strategy import write
from torchweft_tools.demo.blueprint import transformer

MS = 1e-3
Part = tuple[int, int] | None


def span(kind: str, label: str, lane: str, start: float, end: float, parts: Part = None) -> Span:
    """A span of ours; times in milliseconds."""
    talks = lane == "network" or label.startswith("reduce")
    uses = "network" if talks else "io" if lane == "io" else "compute"
    op = label.split(" ")[-1].partition("[")[0]
    return Span(kind, label, lane, "cpu", uses, op, parts, start * MS, end * MS, (end - start) * MS)


def trace(*spans: Span) -> Trace:
    return Trace("hand-made", tuple(sorted(spans, key=lambda each: each.start_s)))


def work(label: str, uses: str, start: float, end: float, **more: Any) -> TimedWork:
    """A work on a lane of its kind; times in milliseconds."""
    lane = more.pop("lane", uses)
    if uses == "network":
        more.setdefault("communicator", "tp")
    facts = {k: v * MS if k.endswith("_s") and v is not None else v for k, v in more.items()}
    return TimedWork(label, lane, uses, start * MS, end * MS, **facts)


def step(*works: TimedWork, end: float, rank: int = 0, **more: Any) -> Timeline:
    in_order = tuple(sorted(works, key=lambda each: (each.start_s, each.end_s)))
    return Timeline("step", in_order, 0.0, end * MS, rank, **more)


def owners(explanation: Explanation, rank: int = 0) -> dict[str, float]:
    """Milliseconds by owner, exposed and idle together."""
    found = explanation.ranks[rank].owners
    return {owner: pytest.approx(sum(seconds) / MS) for owner, seconds in found.items()}


def test_intervals_are_joined_cut_and_taken_apart() -> None:
    one, other = union([(1, 3), (0, 2), (5, 6), (7, 7)]), [(2.0, 5.5)]
    assert one == [(0, 3), (5, 6)]
    assert common(one, other) == [(2, 3), (5, 5.5)]
    assert without(one, other) == [(0, 2), (5.5, 6)]
    assert clipped(one, 2, 5.5) == [(2, 3), (5, 5.5)]
    assert covers(one, 2.5) and not covers(one, 3) and not covers(one, 4)


# Known cases.


def test_an_event_recorded_after_the_hand_over_is_issued_late() -> None:
    """Part 0 is there at 10 ms; its reduce is issued only behind the compute of part 1."""
    late = trace(
        span("run", "attn[0]", "compute", 0, 10, (0, 1)),
        span("run", "attn[1]", "compute", 10, 20, (1, 2)),
        span("issue", "issue reduce[0]", "compute", 20, 20, (0, 1)),
        span("transfer", "reduce[0]", "network", 20, 28, (0, 1)),
        span("complete", "complete reduce[0]", "compute", 20, 28, (0, 1)),
        span("run", "mlp[0]", "compute", 28, 38, (0, 1)),
    )
    found = explain([timeline_of(late)], num_parts=2)
    assert owners(found) == {"issued late": 8}
    assert found.never == ("2 parts were asked for, but no network op ran beside compute, "
                           "on any rank",)  # fmt: skip


def test_a_little_late_owns_a_little() -> None:
    """Three of eight milliseconds would have been hidden, had it been issued at once."""
    timeline = step(
        work("attn", "compute", 0, 10),
        work("reduce", "network", 13, 21, ready_s=10, launched_s=13),
        work("other", "compute", 10, 13),
        work("mlp", "compute", 21, 25, needs=(2,)),
        end=25,
    )
    assert owners(explain([timeline])) == {"dependency": 5, "issued late": 3}


def test_a_collective_on_the_compute_lane_is_on_the_wrong_lane() -> None:
    wrong = trace(
        span("run", "attn[0]", "compute", 0, 10, (0, 1)),
        span("run", "reduce[0]", "compute", 10, 14, (0, 1)),
        span("run", "attn[1]", "compute", 14, 24, (1, 2)),
    )
    found = explain([timeline_of(wrong)])
    assert owners(found) == {"wrong lane": 4}
    assert "wrong lane" in str(found) and OWNERS["wrong lane"] in str(found)


def planned(strategy: Any) -> tuple[Plan, Trace, Context]:
    context, machine = Context(512), cpu()
    plan = lower(write(strategy, transformer(2), context, machine))
    return plan, simulate(plan, context, machine), context


def test_with_a_graph_it_is_a_dependency_where_nothing_else_could_run() -> None:
    plan, simulated, _ = planned(sequential)
    found = explain([timeline_of(simulated, plan)])
    assert set(found.owners) <= {"dependency", "launch-bound"}
    assert found.owners["dependency"] == pytest.approx(simulated.exposed_network_s, rel=1e-3)
    assert found.never


def test_a_plan_that_overlaps_has_no_unknown_moment() -> None:
    plan, simulated, _ = planned(overlap(parts=2))
    found = explain([timeline_of(simulated, plan)], num_parts=2)
    assert "unknown" not in found.owners and not found.never
    assert found.all.overlapped_s + found.all.exposed_s == pytest.approx(simulated.network_s)
    assert found.all.exposed_s == pytest.approx(simulated.exposed_network_s)


@pytest.mark.parametrize("what", ["rewrite async_tp", "branch of two streams"])
def test_what_never_happened_is_said_first(what: str) -> None:
    """A rewrite that matched nothing, a branch that was never chosen."""
    timeline = step(work("attn", "compute", 0, 10), end=10)
    text = str(explain([timeline], asked={what: 0, "calls in parts": 3}))
    assert text.startswith(f"NEVER ENGAGED: {what}: 0 times\n")
    assert "calls in parts" not in text


def test_a_rank_that_waits_for_another_says_so() -> None:
    """Rank 1 begins 6 ms later; its clock is 100 ms off, which the common end tells."""
    early = step(
        work("attn", "compute", 0, 10),
        work("reduce", "network", 10, 20, launched_s=10),
        work("mlp", "compute", 20, 25),
        end=25,
    )
    late = step(
        work("attn", "compute", 100, 116),
        work("reduce", "network", 116, 120, launched_s=116),
        work("mlp", "compute", 120, 125),
        end=125,
        rank=1,
    )
    found = explain([early, late])
    assert owners(found) == {"another rank late": 6, "dependency": 4}
    assert "another rank late" not in owners(found, 1)


def test_groups_of_some_ranks_wait_for_their_own() -> None:
    """Two groups of two; only the second has a straggler."""

    def rank(number: int, group: str, start: float) -> Timeline:
        reduce = work("reduce", "network", start, 20, communicator=group)
        return step(work("a", "compute", 0, start), reduce, end=20, rank=number)

    ranks = [rank(0, "tp a", 10), rank(1, "tp a", 10), rank(2, "tp b", 10), rank(3, "tp b", 17)]
    found = explain(ranks)
    assert [dict(owners(found, n)) for n in range(4)] == [
        {"last part": 10},
        {"last part": 10},
        {"another rank late": 7, "last part": 3},
        {"last part": 3},
    ]


def test_ranks_that_do_not_match_are_noted() -> None:
    one = step(work("a", "network", 0, 1), end=1)
    two = step(work("a", "network", 0, 1), work("b", "network", 1, 2), end=2, rank=1)
    assert explain([one, two]).notes == ("ranks made different numbers of flights on tp",)


def test_a_flight_behind_another_of_its_communicator_waits_for_its_turn() -> None:
    """The second is ready and issued at 10 ms, but begins to move only at 14 ms."""
    timeline = step(
        work("attn", "compute", 0, 10),
        work("grads", "network", 10, 14, ready_s=5, launched_s=5.01),
        work("reduce", "network", 14, 17, ready_s=10, launched_s=10),
        work("mlp", "compute", 17, 20),
        end=20,
    )
    assert owners(explain([timeline])) == {"order of the communicator": 4, "dependency": 3}


def test_two_in_flight_at_once_are_in_order_too() -> None:
    timeline = step(
        work("attn", "compute", 0, 10),
        work("grads", "network", 9, 14),
        work("reduce", "network", 10, 17, ready_s=10, launched_s=10),
        work("mlp", "compute", 17, 20, needs=(2,)),
        end=20,
    )
    assert owners(explain([timeline])) == {"order of the communicator": 4, "dependency": 3}


def test_the_last_part_has_nothing_to_cover_it() -> None:
    timeline = step(work("attn", "compute", 0, 10), work("reduce", "network", 8, 15), end=15)
    assert owners(explain([timeline])) == {"last part": 5}


def test_a_host_that_launches_too_late_is_launch_bound() -> None:
    """The collective has landed and the next kernel could run; nobody has launched it."""
    timeline = step(
        work("attn", "compute", 0, 10, launched_s=-1),
        work("mlp", "compute", 14, 20, launched_s=13.99),
        end=20,
        has_host=True,
        launches=((0.0, 20 * MS),),
    )
    assert owners(explain([timeline])) == {"launch-bound": 4}


def test_memory_and_io_are_owners_too() -> None:
    timeline = step(
        work("attn", "compute", 0, 10),
        work("read", "io", 9, 13),
        work("mlp", "compute", 15, 20, launched_s=1),
        end=20,
        has_host=True,
        memory=((13 * MS, 15 * MS),),
    )
    assert owners(explain([timeline])) == {"io": 3, "memory cap": 2}


def test_contention_is_what_a_flight_takes_longer_than_alone() -> None:
    """The first ran alone in 4 ms; the second took 10 ms, beside compute for half of it."""
    timeline = step(
        work("attn", "compute", 0, 10),
        work("reduce0", "network", 10, 14, key="reduce"),
        work("mlp", "compute", 14, 25),
        work("reduce1", "network", 20, 30, key="reduce"),
        work("head", "compute", 30, 31),
        end=31,
    )
    assert owners(explain([timeline])) == {"dependency": 4, "contention": 5}


# What comes out.


def test_numbers_are_unions_and_add_up() -> None:
    timeline = step(
        work("attn", "compute", 0, 10),
        work("norm", "compute", 5, 12, lane="compute1"),
        work("one", "network", 8, 20),
        work("two", "network", 10, 16, communicator="dp"),
        work("mlp", "compute", 22, 30),
        end=30,
    )
    times = explain([timeline]).all
    got = [times.compute_s, times.network_s, times.overlapped_s, times.exposed_s, times.idle_s]
    assert got == pytest.approx([20 * MS, 12 * MS, 4 * MS, 8 * MS, 2 * MS])
    assert times.communicators == {"tp": pytest.approx(8 * MS)}


def test_text_and_data_say_the_same() -> None:
    plan, simulated, _ = planned(overlap(parts=2))
    ranks = [timeline_of(simulated, plan, rank=rank) for rank in (0, 1)]
    what_if = [WhatIf("twice the link", 1.0, 2.0)]
    found = explain(ranks, num_parts=2, what_if=what_if, simulated_s=2.0, notes=["a note"])
    data = json.loads(json.dumps(found.to_data()))
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert data["all"]["step_s"] == pytest.approx(simulated.makespan_s)
    assert list(data["owners"]) == sorted(data["owners"], key=lambda o: -data["owners"][o])
    text = str(found)
    for word in ("rank 0", "rank 1", "mean", "owner", "critical path", "twice the link", "a note"):
        assert word in text
    assert all(len(line) <= 130 for line in text.splitlines())


def test_the_critical_path_is_a_chain() -> None:
    plan, simulated, _ = planned(sequential)
    path = explain([timeline_of(simulated, plan)]).path
    assert path[-1].end_s == pytest.approx(simulated.makespan_s)
    assert all(one.end_s <= other.start_s + 1e-5 for one, other in pairwise(path))
    assert {"compute", "network"} == {each.uses for each in path}


def test_planned_stands_above_actual() -> None:
    _, one, _ = planned(sequential)
    _, other, _ = planned(overlap(parts=2))
    lines = side_by_side(one, other).splitlines()
    assert lines[1].startswith("compute  planned ▐") and lines[2].startswith("         actual  ▐")
    assert lines[3].startswith("network  planned")


def test_nothing_to_explain_is_an_error() -> None:
    with pytest.raises(WeftError, match="no timeline"):
        explain([])


# What if.


def test_a_plan_at_its_own_costs_takes_as_long_as_it_did() -> None:
    plan, simulated, context = planned(overlap(parts=2))
    costs = seen_costs(simulated, cpu(), plan.cut.bounds(context.batch))
    again, items = what_ifs(plan, context, costs)
    assert again.makespan_s == pytest.approx(simulated.makespan_s, rel=1e-3)
    factors = {item.change: item.factor for item in items}
    assert factors["twice the compute"] > 1.2
    assert {"twice the link", "overlap in 4 parts", "overlap in 8 parts"} <= set(factors)


def test_a_rebuilt_graph_takes_as_long_as_it_did() -> None:
    """10 ms of compute, 5 ms of network, four times, nothing beside each other."""
    works, at = [], 0
    for _ in range(4):
        works += [work("mm", "compute", at, at + 10), work("r", "network", at + 10, at + 15)]
        at += 15
    model = rebuilt(step(*works, work("head", "compute", at, at + 1), end=at + 1, launch_s=0.0))
    assert model is not None
    simulated, items = model.what_ifs()
    factors = {item.change: item.factor for item in items}
    assert simulated.makespan_s == pytest.approx((at + 1) * MS, rel=0.01)
    assert factors["twice the link"] == pytest.approx(61 / 51, rel=0.01)
    assert factors["overlap in 2 parts"] == pytest.approx(61 / 43.5, rel=0.05)


def test_what_a_slow_host_costs_is_paid_in_every_part() -> None:
    """A step that waits for its launches gets no faster by cutting it."""
    works = [work("a", "compute", at, at + 1) for at in range(0, 20, 2)]
    timeline = step(*works, work("r", "network", 20, 21), work("b", "compute", 21, 22), end=22)
    model = rebuilt(timeline)
    assert model is not None
    factors = {item.change: item.factor for item in model.what_ifs()[1]}
    assert factors["overlap in 2 parts"] < 1
    assert rebuilt(step(work("a", "compute", 0, 1), end=1)) is None


# Laws.

MOMENT = st.integers(0, 60)
MAYBE = st.none() | MOMENT


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    works = []
    for number in range(draw(st.integers(0, 9))):
        start, length = draw(MOMENT), draw(st.integers(0, 20))
        uses = draw(st.sampled_from(("compute", "compute", "network", "network", "io")))
        facts = {
            "ready_s": draw(MAYBE),
            "launched_s": draw(MAYBE),
            "key": draw(st.sampled_from("ab")),
        }
        if uses == "network":
            facts["communicator"] = draw(st.sampled_from(("tp", "dp")))
        lane = draw(st.sampled_from(("compute", "network", "io")))
        works.append(work(f"w{number}", uses, start, start + length, lane=lane, **facts))
    flights = [n for n, each in enumerate(sorted(works, key=lambda w: (w.start_s, w.end_s)))
               if each.uses == "network"]  # fmt: skip
    if flights and draw(st.booleans()):
        works = [each._replace(needs=(draw(st.sampled_from(flights)),)) for each in works]
    host = [(start * MS, (start + 5) * MS) for start in draw(st.lists(MOMENT, max_size=3))]
    more = {"has_host": draw(st.booleans()), "launches": tuple(union(host))}
    return step(*works, end=draw(st.integers(1, 70)), rank=draw(st.integers(0, 3)), **more)


@given(st.lists(timelines(), min_size=1, max_size=3))
def test_owners_add_up_to_all_time_without_compute(ranks: list[Timeline]) -> None:
    found = explain(ranks)
    for times in (*found.ranks, found.all):
        without_s = times.exposed_s + times.idle_s
        assert sum(map(sum, times.owners.values())) == pytest.approx(without_s, abs=1e-12)
        exposed_s = sum(exposed for exposed, _ in times.owners.values())
        assert exposed_s == pytest.approx(times.exposed_s, abs=1e-12)
        assert times.overlapped_s + times.exposed_s == pytest.approx(times.network_s, abs=1e-12)
        assert times.compute_s + without_s == pytest.approx(times.step_s, abs=1e-12)
        assert max(times.compute_s, times.network_s) <= times.step_s + 1e-12
        assert sum(times.communicators.values()) == pytest.approx(times.exposed_s, abs=1e-12)
        assert set(times.owners) <= set(OWNERS)
    assert json.dumps(found.to_data()) and str(found)


@given(timelines())
def test_a_rebuilt_graph_always_runs(timeline: Timeline) -> None:
    model = rebuilt(timeline)
    if model is not None:
        simulated, items = model.what_ifs()
        assert simulated.makespan_s >= 0 and all(item.factor > 0 for item in items)


INTERVALS = st.lists(st.tuples(MOMENT, MOMENT).map(sorted).map(tuple), max_size=6)


@given(INTERVALS, INTERVALS, MOMENT, MOMENT)
def test_intervals_agree_with_counting(left: Any, right: Any, one: int, other: int) -> None:
    def cells(intervals: Any) -> set[int]:
        return {cell for start, end in intervals for cell in range(int(start), int(end))}

    a, b = union(left), union(right)
    assert cells(a) == cells(left) and total_s(a) == len(cells(left))
    assert cells(common(a, b)) == cells(left) & cells(right)
    assert cells(without(a, b)) == cells(left) - cells(right)
    low, high = sorted((one, other))
    assert cells(clipped(a, low, high)) == cells(left) & set(range(low, high))
    assert all(covers(a, cell + 0.5) == (cell in cells(left)) for cell in range(61))
