"""Placement: laws of all planners on random problems; what problems, drafts and plans say."""

from __future__ import annotations

import math
import random
import statistics
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import PlacementError
from torchweft.placement import (
    Draft,
    Edge,
    Hold,
    Placement,
    Problem,
    as_plan,
    bound_s,
    check,
    faults,
    finished,
    graph_problem,
    placed,
    plan,
    planner_names,
)
from torchweft.placement.placement import period_s, run
from torchweft.placement.planners import annealing, lists
from torchweft.placement.planners.annealing import Loads
from torchweft.placement.planners.lists import heft
from torchweft.placement.planners.tree_dp import fits
from torchweft.placement.problem import heads, tails
from torchweft.plan.context import Context
from torchweft.plan.machine import Device, Lane, Link, Machine
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.verify import verify
from torchweft_tools import cp_sat
from torchweft_tools.bench.oracle.exhaustive import exhaustive
from torchweft_tools.cli.explain import critical_path, trace_of, utilisation, with_twin
from torchweft_tools.cp_sat import in_ticks
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.stand_in import stand_in, with_graph
from torchweft_tools.formats.weft_files import (
    load_placement,
    placement_data,
    read_placement,
    save_placement,
)
from torchweft_tools.train.cases import MACHINES, case, random_dag, random_tree

INF = math.inf
EXACT = (exhaustive, "cp-sat", "tree-dp")
QUICK = [name for name in planner_names() if name not in (*EXACT, "portfolio", "annealing")]
SETTINGS = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=25, deadline=None)


def drawn(rng: random.Random, *, num_ops: int, tree: bool = False, plain: bool = False) -> Problem:
    """A random problem in whole seconds; unless plain: ops that some devices cannot run, groups,
    memory limits that leave room for everything on the first device, inputs that come late."""
    num_devices = rng.randint(1, 3)
    ops, devices = range(num_ops), range(num_devices)
    seconds = [[float(rng.randint(0, 9)) for _ in devices] for _ in ops]
    edges = []
    for op in ops[1:]:
        if tree:
            edges.append((op - 1 if rng.random() < 0.4 else rng.randrange(op), op))
        else:
            edges += [(source, op) for source in range(op) if rng.random() < 0.3]
    if tree:  # every op is read once: turn the picture round, from the root to the leaves
        edges = [(num_ops - 1 - b, num_ops - 1 - a) for a, b in edges]
    sizes = [rng.randint(0, 6) for _ in ops]
    more = {}
    if not plain:
        for row in seconds:
            for device in devices[1:]:
                row[device] = INF if rng.random() < 0.15 else row[device]
        holds = [Hold(rng.randint(1, 9), (op,)) for op in ops]
        holds.append(Hold(5, tuple(sorted(rng.sample(ops, min(num_ops, 3))))))
        need = sum(hold.num_bytes for hold in holds)
        rooms = [float(rng.randint(5, need + 5)) for _ in devices]
        more = {
            "holds": tuple(holds),
            "room_bytes": (float(need), *rooms[1:]),
            "together": (tuple(rng.sample(ops, 2)),) if num_ops > 2 else (),
            "ready_s": tuple(tuple(float(rng.randint(0, 2)) for _ in devices) for _ in ops),
        }
    far = [[0.0 if a == b else float(rng.randint(0, 3)) for b in devices] for a in devices]
    return Problem(
        "drawn",
        tuple(f"op{op}" for op in ops),
        tuple(f"device{device}" for device in devices),
        tuple(map(tuple, seconds)),
        tuple(Edge(a, b, sizes[a], f"v{a}") for a, b in sorted(edges)),
        tuple(map(tuple, far)),
        tuple(tuple(float(a != b) for b in devices) for a in devices),
        **more,
    )


randoms = st.integers(0, 2**40).map(random.Random)


@SETTINGS
@given(randoms, st.sampled_from(QUICK), st.booleans())
def test_law_placements_are_legal_whatever_the_planner(rng, name, plain):
    problem = drawn(rng, num_ops=rng.randint(1, 25), plain=plain)
    found = plan(problem, name, seed=rng.randrange(100))
    assert list(faults(problem, found)) == []
    assert found.bound_s is not None
    assert found.bound_s <= found.score_s
    assert found.planner == name


@FEW
@given(randoms, st.booleans(), st.sampled_from(("latency", "throughput")))
def test_law_search_keeps_limits_and_is_never_worse_than_what_it_starts_from(rng, plain, objective):
    problem = drawn(rng, num_ops=rng.randint(2, 12), plain=plain)
    problem = replace(problem, objective=objective)
    least_s = min(plan(problem, name).score_s for name in ("single", "heft", "peft"))
    for name in ("annealing", "portfolio"):
        found = plan(problem, name, deadline_s=0.01)
        assert found.score_s <= least_s
        assert list(faults(problem, found)) == []


@FEW
@given(randoms)
def test_law_exact_planners_agree_on_trees(rng):
    pytest.importorskip("ortools")
    problem = drawn(rng, num_ops=rng.randint(2, 7), tree=True, plain=True)
    assert fits(problem)
    found = [plan(problem, name, deadline_s=60) for name in EXACT]
    assert all(item.optimal for item in found)
    assert len({round(item.score_s, 6) for item in found}) == 1
    assert all(item.bound_s == pytest.approx(found[0].score_s) for item in found)


@FEW
@given(randoms, st.sampled_from(("latency", "throughput")))
def test_law_exact_planners_agree_under_limits(rng, objective):
    pytest.importorskip("ortools")
    problem = replace(drawn(rng, num_ops=rng.randint(1, 6)), objective=objective)
    all_tried = plan(problem, "exhaustive")
    solved = plan(problem, "cp-sat", deadline_s=60)
    assert all_tried.optimal
    assert solved.optimal
    assert solved.score_s == pytest.approx(all_tried.score_s)
    assert bound_s(problem) <= all_tried.score_s * (1 + 1e-9)


@FEW
@given(randoms)
def test_law_nothing_beats_what_exhaustive_finds(rng):
    problem = drawn(rng, num_ops=rng.randint(1, 7))
    best = plan(problem, exhaustive)
    for name in (*QUICK, "annealing"):
        assert plan(problem, name).score_s >= best.score_s * (1 - 1e-9)


def test_law_every_planner_is_at_least_as_good_as_random_on_average():
    problems = [case(random_dag(25, n), MACHINES[n % 3], (0.05, 1.0)[n % 2]) for n in range(12)]
    by_chance = statistics.mean(
        plan(problem, "random", seed=seed).score_s for problem in problems for seed in range(5)
    )
    for name in (*QUICK, "annealing"):
        scores = [plan(problem, name, seed=5).score_s for problem in problems]
        slack = 1.1 if name == "random" else 1.0  # another seed of the same
        assert statistics.mean(scores) <= by_chance * slack, name


def assert_simulated(problem: Problem, found: Placement) -> None:
    """The simulator, which gives a plan its meaning, has the starts and ends of the placement."""
    safe = verify(as_plan(with_graph(problem), found))
    _, machine, costs = stand_in(problem)
    trace = simulate(safe, Context(), machine, costs, contention=False)
    starts = {span.op: span.start_s for span in trace.spans if span.kind == "run"}
    ends = {span.op: span.end_s for span in trace.spans if span.kind == "run"}
    for op, device, start_s, end_s in zip(
        found.ops, found.device, found.start_s, found.end_s, strict=True
    ):
        # A step that takes no time leaves a span without a start of its own.
        if problem.seconds[problem.ops.index(op)][device]:
            assert starts[op] == pytest.approx(start_s)
            assert ends[op] == pytest.approx(end_s)
    assert trace.makespan_s == pytest.approx(found.makespan_s)
    assert Plan.parse(str(safe)) == safe


@SETTINGS
@given(randoms, st.sampled_from(QUICK))
def test_law_the_simulator_gives_the_times_of_the_placement(rng, name):
    problem = drawn(rng, num_ops=rng.randint(1, 15), plain=True)
    assert_simulated(problem, plan(problem, name))


def any_order(rng: random.Random, problem: Problem) -> list[int]:
    """All ops, none before what it reads, else by chance."""
    order: list[int] = []
    while left := [op for op in range(problem.num_ops) if op not in order]:
        ready = [op for op in left if all(source in order for source, _ in problem.preds[op])]
        order.append(rng.choice(ready))
    return order


@SETTINGS
@given(randoms)
def test_law_run_and_draft_keep_the_simulators_time(rng):
    """Whatever the devices and the order: behind all that a device has, and in its gaps."""
    problem = drawn(rng, num_ops=rng.randint(1, 12), plain=True)
    order = any_order(rng, problem)
    devices = [rng.choice(allowed) for allowed in problem.allowed]
    assert_simulated(problem, placed(problem, devices, order))
    draft = Draft(problem)
    for op in order:
        draft.put(op, devices[op])
    assert_simulated(problem, finished(draft))


@SETTINGS
@given(randoms)
def test_law_a_clock_with_a_limit_stops_where_no_placement_could_be_in_time(rng):
    problem = drawn(rng, num_ops=rng.randint(1, 12))
    order = any_order(rng, problem)
    devices = [rng.choice(allowed) for allowed in problem.allowed]
    whole_s = max(run(problem, devices, order)[1])
    limit_s = whole_s * rng.choice((0.5, 0.9, 1.0, 1.1))
    ends_s = max(run(problem, devices, order, limit_s, tails(problem))[1])
    assert ends_s == (whole_s if whole_s <= limit_s else INF)


@SETTINGS
@given(randoms)
def test_law_a_placement_reads_back_and_replays(rng):
    problem = drawn(rng, num_ops=rng.randint(1, 15))
    found = plan(problem, "heft")
    assert read_placement(placement_data(found)) == found
    assert placed(problem, found.device, found.order).makespan_s <= found.makespan_s * (1 + 1e-9)


@SETTINGS
@given(randoms)
def test_law_loads_are_kept_up_to_date(rng):
    problem = replace(drawn(rng, num_ops=rng.randint(1, 10)), objective="throughput")
    devices = list(plan(problem, "random", seed=rng.randrange(99)).device)
    loads = Loads(problem, devices)
    for _ in range(10):
        group = rng.choice(problem.groups)
        loads.move(group, rng.choice(problem.allowed[group[0]]))
        assert loads.period_s() == pytest.approx(period_s(problem, devices))
        broken = {
            rule for rule, _ in faults(problem, placed(problem, devices, range(len(devices))))
        }
        assert loads.fits() == ("memory" not in broken)


@SETTINGS
@given(randoms)
def test_law_heads_and_tails_are_bounds(rng):
    problem = drawn(rng, num_ops=rng.randint(1, 12), plain=True)
    early, late = heads(problem), tails(problem)
    found = plan(problem, "random", seed=rng.randrange(99))
    for op, device in enumerate(found.device):
        assert early[op][device] <= found.end_s[op] + 1e-9
        assert found.end_s[op] + late[op][device] <= found.makespan_s + 1e-9


@SETTINGS
@given(randoms)
def test_law_ticks_never_make_a_time_longer(rng):
    problem = drawn(rng, num_ops=rng.randint(1, 10), plain=True)
    odd = replace(problem, seconds=tuple(tuple(s / 7 for s in row) for row in problem.seconds))
    small, tick_s = in_ticks(odd, plan(odd, "single").score_s)
    for row, whole in zip(odd.seconds, small.seconds, strict=True):
        assert all(w == int(w) and w * tick_s <= s + 1e-12 for s, w in zip(row, whole, strict=True))
    assert in_ticks(problem, 100.0)[1] == 1.0


def two(seconds: list[list[float]], edges: list[tuple[int, int, int]], **more: object) -> Problem:
    """A problem of two devices with a second of latency and one for each byte."""
    return Problem(
        "two",
        tuple(f"op{op}" for op in range(len(seconds))),
        ("fast", "slow"),
        tuple(map(tuple, seconds)),
        tuple(Edge(a, b, size, f"v{a}") for a, b, size in edges),
        ((0.0, 1.0), (1.0, 0.0)),
        ((0.0, 1.0), (1.0, 0.0)),
        **more,
    )


def test_an_op_goes_into_a_gap():
    problem = two([[2, 9], [3, 9], [9, 9], [1, 9]], [(0, 1, 0)])
    draft = Draft(problem)
    draft.put(0, 0)
    draft.put(1, 0, 5.0)
    assert draft.begin_s(3, 0) == 2.0
    assert draft.begin_s(2, 0) == 8.0
    draft.put(3, 0)
    draft.put(2, 0)
    assert finished(draft).makespan_s == 17.0


def test_a_value_takes_latency_and_bytes_and_goes_once_to_a_device():
    problem = two([[1, 9], [9, 1], [9, 1]], [(0, 1, 4), (0, 2, 4)])
    found = placed(problem, [0, 1, 1], [0, 1, 2])
    assert found.start_s == (0.0, 6.0, 7.0)
    assert found.period_s == 5.0  # the link: one second and four, once
    copies = [step for step in as_plan(with_graph(problem), found).steps if step.kind == "copy"]
    assert [step.label for step in copies] == ["copy v0 to slow"]


def test_what_several_ops_hold_counts_once():
    problem = two([[1, 1], [1, 1]], [], holds=(Hold(10, (0, 1)),), room_bytes=(10.0, 10.0))
    assert plan(problem, "single").makespan_s == 2.0
    assert plan(problem, "heft").makespan_s == 1.0
    less = replace(problem, holds=(Hold(10, (0,)), Hold(10, (1,))))
    assert set(plan(less, "single").device) == {0, 1}


def test_no_room_is_an_error_that_says_what_is_needed():
    problem = two([[1, 1]], [], holds=(Hold(11, (0,)),), room_bytes=(10.0, 10.0))
    for name in ("heft", "single", "portfolio", exhaustive):
        with pytest.raises(PlacementError, match="memory"):
            plan(problem, name, deadline_s=0.01)


def test_ops_that_nothing_can_run_are_refused():
    with pytest.raises(PlacementError, match="no device can run op 'op0'"):
        two([[INF, INF]], [])
    with pytest.raises(PlacementError, match="all that must be with it"):
        two([[INF, 1], [1, INF]], [], together=((0, 1),))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"device": (1, 0)}, "time"),
        ({"start_s": (0.0, 0.5), "end_s": (1.0, 2.5)}, "order"),
        ({"start_s": (5.0, 1.0), "end_s": (5.5, 3.0)}, "time"),
        ({"ops": ("a", "b")}, "ops"),
    ],
)
def test_check_finds_a_damaged_placement(change, rule):
    problem = two([[1, 9], [2, 9]], [(0, 1, 4)])
    found = plan(problem, "heft")
    with pytest.raises(PlacementError) as caught:
        check(problem, replace(found, **change))
    assert caught.value.rule == rule


def test_check_finds_overlaps_broken_groups_and_limits():
    problem = two([[1, 1], [1, 1]], [], together=((0, 1),), room_bytes=(1.0, 1.0))
    problem = replace(problem, holds=(Hold(2, (0,)),), room_bytes=(2.0, 1.0))
    good = placed(problem, [0, 0], [0, 1])
    assert list(faults(problem, good)) == []
    both = replace(good, start_s=(0.0, 0.5), end_s=(1.0, 1.5))
    assert [rule for rule, _ in faults(problem, both)] == ["overlap"]
    apart = placed(problem, [1, 0], [0, 1])
    assert {rule for rule, _ in faults(problem, apart)} == {"together", "memory"}


def test_unknown_planner_lists_the_choices():
    with pytest.raises(PlacementError, match=r"Did you mean 'heft'"):
        plan(two([[1, 1]], []), "hefd")


def test_any_function_is_a_planner_and_is_not_trusted():
    problem = two([[1, 9], [2, 9]], [(0, 1, 4)])

    def mine(problem: Problem, *, deadline_s: float | None, seed: int) -> Placement:
        return placed(problem, [0, 1], [0, 1])

    def liar(problem: Problem, *, deadline_s: float | None, seed: int) -> Placement:
        return replace(placed(problem, [0, 1], [0, 1]), start_s=(0.0, 0.0), end_s=(1.0, 9.0))

    assert plan(problem, mine).planner == "mine"
    with pytest.raises(PlacementError, match="order"):
        plan(problem, liar)


def test_exhaustive_refuses_what_is_not_tiny():
    with pytest.raises(PlacementError, match="at most 10 ops"):
        plan(case(random_tree(30, 0), MACHINES[0], 1.0), exhaustive)


def test_a_bound_is_never_above_its_score():
    problem = two([[0.1, 0.2], [0.2, 0.1], [0.3, 0.3]], [(0, 1, 0), (1, 2, 0)])

    def boasts(problem, *, deadline_s, seed):
        return replace(heft(problem), bound_s=9.0)

    for name in QUICK:
        found = plan(problem, name)
        assert found.bound_s <= found.score_s
    with pytest.raises(PlacementError, match="found by boasts, is below 9 s"):
        plan(problem, boasts)


def test_exhaustive_does_not_try_every_order_of_a_device_that_is_busy_anyway():
    problem = two([[1.0 + op, 1.0 + op] for op in range(10)], [])
    assert plan(replace(problem, together=(tuple(range(10)),)), exhaustive).makespan_s == 55


def test_exhaustive_stops_at_its_deadline_with_what_it_has():
    problem = case(random_tree(10, 0), MACHINES[1], 1.0)
    found = plan(problem, exhaustive, deadline_s=0)
    assert list(faults(problem, found)) == []
    assert not found.optimal


def test_a_search_without_time_starts_nothing_slow(monkeypatch):
    """No stages, no solver (importing it would fail): single, heft and peft are all there is."""
    monkeypatch.setattr(lists, "stages", None)
    monkeypatch.setattr(cp_sat, "is_loaded", lambda: False)
    monkeypatch.setattr(cp_sat, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    problem = replace(case(random_dag(40, 0), MACHINES[1], 1.0), objective="throughput")
    least_s = min(plan(problem, name).score_s for name in ("single", "heft", "peft"))
    for name in ("annealing", "cp-sat"):
        assert plan(problem, name, deadline_s=0).score_s == least_s


def test_annealing_of_a_large_problem_ends_without_a_deadline(monkeypatch):
    steps = []
    monkeypatch.setattr(
        annealing._AnnealingState, "step", lambda self, heat_s: steps.append(heat_s)
    )
    problem = case(random_tree(101, 0), MACHINES[1], 1.0)
    plan(problem, "annealing")
    assert len(steps) == 200 * problem.num_ops
    monkeypatch.setattr(annealing, "MOST_TIMED", 100 * problem.num_ops)
    steps.clear()
    plan(problem, "annealing")
    assert len(steps) == 100


def test_tree_dp_refuses_what_is_no_tree():
    with pytest.raises(PlacementError, match="tree"):
        plan(two([[1, 1], [1, 1], [1, 1]], [(0, 1, 1), (0, 2, 1)]), "tree-dp")


def test_without_ortools_cp_sat_names_the_cure(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ortools.sat.python", None)
    with pytest.raises(PlacementError, match="pip install ortools"):
        plan(two([[1, 1]], []), "cp-sat")


def test_equal_seeds_give_equal_placements():
    problem = case(random_tree(20, 1), MACHINES[1], 1.0)
    for name in ("random", "annealing"):
        same = [plan(problem, name, seed=3).device for _ in range(2)]
        assert same[0] == same[1]


def test_annealing_improves_on_the_list_planners():
    problems = [case(random_tree(31, seed), MACHINES[1], 1.0) for seed in range(4)]
    before = [min(plan(p, n).score_s for n in ("heft", "peft", "single")) for p in problems]
    after = [plan(p, "annealing").score_s for p in problems]
    assert statistics.mean(a / b for a, b in zip(after, before, strict=True)) < 0.99


MACHINE = Machine(
    "pair",
    (Device("a", memory_bytes=10**9), Device("b", flops_per_s=2e10)),
    (Lane("a", "a", ("compute", "memory", "network")), Lane("b", "b", ("compute", "memory"))),
    (Link("a", "b"), Link("b", "a", 5e9, 2e-5)),
)


def test_a_graph_of_ours_is_placed_verified_and_simulated():
    graph = transformer(2, 64, kv_cache=True)
    problem = graph_problem(graph, MACHINE, context=Context(128))
    for op in graph.ops:  # a changed input stays at home, and only `a` has a network
        if op.mutates or op.uses == "network":
            assert problem.allowed[problem.ops.index(op.name)] == (0,)
    for name in QUICK:
        found = plan(problem, name)
        safe = verify(as_plan(problem, found))
        trace = simulate(safe, Context(128), MACHINE, contention=False)
        assert trace.makespan_s == pytest.approx(found.makespan_s), name


def test_resident_weights_cost_no_transfer_but_room():
    graph = transformer(1, 64, tensor_parallel=False)
    weights = [name for name in graph.inputs if name.startswith("w_")]
    there = graph_problem(graph, MACHINE, context=Context(8), resident=weights)
    sent = graph_problem(graph, MACHINE, context=Context(8))
    assert there.ready_s[0][1] < sent.ready_s[0][1]
    assert there.ready_s[1] == (0.0, 0.0)
    assert there.holds == sent.holds
    with pytest.raises(PlacementError, match="unknown input 'nothing'"):
        graph_problem(graph, MACHINE, resident=["nothing"])


def test_devices_without_a_link_are_refused():
    lonely = replace(MACHINE, links=MACHINE.links[:1])
    with pytest.raises(PlacementError, match="in both directions"):
        graph_problem(transformer(1, 64, tensor_parallel=False), lonely)


def test_an_explanation_follows_the_chain_that_ends_last():
    problem = two([[2, 9], [9, 1], [3, 9], [1, 9]], [(0, 1, 4), (1, 3, 0)])
    found = placed(problem, [0, 1, 0, 0], [0, 2, 1, 3])
    path = critical_path(problem, found)
    assert [(item.op, item.why, item.behind) for item in path] == [
        (0, "start", -1),
        (1, "value", 0),
        (3, "value", 1),
    ]
    assert utilisation(problem, found) == pytest.approx([6 / 10, 1 / 10])
    trace = trace_of(problem, found)
    assert trace.makespan_s == found.makespan_s
    assert trace.critical_path_s == pytest.approx(found.makespan_s)


def test_a_twin_is_one_device_more():
    problem = two([[4, 8], [4, 8]], [])
    more = with_twin(problem, 0)
    assert more.devices == ("fast", "slow", "fast.twin")
    assert plan(problem, "heft").makespan_s == 8.0
    assert plan(more, "heft").makespan_s == 4.0


def test_a_damaged_placement_file_is_refused(tmp_path):
    found = plan(two([[1, 1]], []), "heft")
    data = placement_data(found)
    for wrong in (
        {**data, "weft_placement": 2},
        {**data, "placement": []},
        {**data, "objective": "speed"},
        {**data, "placement": [{"op": "op0", "device": "moon", "start_s": 0.0, "end_s": 1.0}]},
        {**data, "placement": [{"op": "op0", "device": "fast", "start_s": 2.0, "end_s": 1.0}]},
        {**data, "period_s": math.nan},
        [],
    ):
        with pytest.raises(PlacementError):
            read_placement(wrong)
    save_placement(found, tmp_path / "p.json")
    assert load_placement(tmp_path / "p.json") == found
