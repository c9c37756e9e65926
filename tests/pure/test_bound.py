"""The bound: no plan beats it, by laws and by exhaustive search; and where it is met."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import MachineError, MemoryPlanError, PlacementError, StrategyError
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.improve import bound as bound_module
from torchweft.plan.improve.bound import Bound, bound
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import (
    Costs,
    CostTable,
    Device,
    Lane,
    Link,
    Machine,
    Slowdown,
    cost_key,
    cpu,
)
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import get_strategy, strategy_names, write
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.order_search import bound_by_search

ROWS, S0 = Batch(0), Size.of("s0")
OPTIONS = {"overlap": [{"parts": 2}, {"parts": 3}, {"parts": 5}], "searched": [{"budget": 12}]}
CANDIDATES = [
    get_strategy(name)(**options)
    for name in strategy_names()
    for options in OPTIONS.get(name, [{}])
]
randoms = st.integers(0, 2**40).map(random.Random)


class LateCosts(Costs):
    """Devices that begin late."""

    def begin_s(self, device: str) -> float:
        return 0.3 if device == "gpu0" else 0.1


def random_machine(rng: random.Random) -> Machine:
    names = ("network_bytes_per_s", "flops_per_s", "bytes_per_s", "io_bytes_per_s")
    machine = cpu(
        rng.randint(1, 3),
        capacity=rng.choice((0.5, 1.0, 1.5, 4.0)),
        network_share=rng.choice((0.0, 0.3, 1.0, 2.0)),
        overhead_s=rng.choice((0.0, 1e-6, 0.1)),
        network_latency_s=rng.choice((0.0, 1e-6, 0.1)),
        num_flights=rng.choice((1, 1, 2)),
        **{name: 10.0 ** rng.randint(1, 9) for name in names},
    )
    if rng.random() < 0.5:
        pairs = (("compute", "network"), ("network", "compute"), ("memory", "compute"))
        slow = tuple(Slowdown(*pair, rng.choice((1.0, 1.2, 3.0))) for pair in pairs)
        machine = replace(machine, devices=(replace(machine.devices[0], slowdowns=slow),))
    if rng.random() < 0.7:
        return machine
    uses = rng.choice((("compute", "memory"), ("network", "compute"), ("io",)))
    devices = (*machine.devices, replace(machine.devices[0], name="gpu0"))
    links = [
        Link(a, b, 10.0 ** rng.randint(1, 6), rng.choice((0.0, 0.1)))
        for a, b in (("cpu", "gpu0"), ("gpu0", "cpu"))
    ]
    return Machine("pair", devices, (*machine.lanes, Lane("stream", "gpu0", uses)), tuple(links))


def random_costs(rng: random.Random, graph: Graph, machine: Machine, batch: int) -> Costs:
    """Tables in which anything may happen: parts may take less than the whole, or nothing."""
    table = {}
    for key in [(op.name, device) for op in graph.ops for device in machine.device]:
        if rng.random() < 0.6:
            rows = rng.sample(range(2 * batch + 2), rng.randint(1, min(5, 2 * batch + 1)))
            table[key] = {r: rng.choice((0.0, rng.random(), r * rng.random())) for r in rows}
    env = Context(batch=batch, sizes={"s1": 4}).env(graph.batch, batch)
    factors = {  # flights may take less beside compute than alone
        (cost_key(graph, op, env), device): {batch: rng.choice((0.5, 0.9, 2.0))}
        for op in graph.ops
        for device in machine.device
        if op.uses == "network" and rng.random() < 0.5
    }
    every = CostTable.of(table), rng.choice((0.0, 0.1)), CostTable.of(factors)
    return rng.choice((Costs, LateCosts))(machine, *every)


def anyhow(rng: random.Random):
    """Any cut, order, lanes and merged runs."""

    def anyhow(s: Scheduler) -> None:
        batch = int(s.context.batch)
        number = rng.randint(1, max(1, min(5, batch)))
        if number > 1:
            borders = [0, *sorted(rng.sample(range(1, batch), number - 1)), batch]
            s.split(Cut.sizes([end - start for start, end in pairwise(borders)]))
        while ready := s.ready():
            op, part = rng.choice(ready)
            parts = [] if part is None else [part]
            while parts and (op, parts[-1] + 1) in ready and rng.random() < 0.5:
                parts.append(parts[-1] + 1)
            s.run(op, *parts, lane=rng.choice(s.lanes(op)))
        if number > 1:
            s.merge()

    return anyhow


def test_flights_that_gain_beside_compute_lower_the_bound() -> None:
    """Small flights, one behind another, take less than each by itself: half of it here."""
    slowdowns = (Slowdown("network", "compute", 1.0),)
    device = replace(cpu().devices[0], overhead_s=0.0, slowdowns=slowdowns)
    graph, machine, context = row(*"cncn"), replace(cpu(), devices=(device,)), Context(batch=8)
    env = context.env(graph.batch, 8)
    keys = {op.name: (cost_key(graph, op, env), "cpu") for op in graph.ops}
    seconds = {keys[name]: {8: 10.0 if name[0] == "n" else 8.0} for name in keys}
    halves = {keys[name]: {8: 0.5} for name in keys if name[0] == "n"}
    costs = Costs(machine, CostTable.of(seconds), factors=CostTable.of(halves))
    plan = lower(write(get_strategy("overlap")(parts=8), graph, context, machine))
    least, whole = (
        bound(graph, context, machine, each).seconds
        for each in (costs, replace(costs, factors=CostTable()))
    )
    assert least <= simulate(plan, context, machine, costs).makespan_s < whole


@settings(max_examples=150)
@given(randoms)
def test_law_no_plan_of_any_strategy_beats_the_bound(rng):
    graph = random_graph(rng, num_ops=rng.randint(1, 8))
    batch, machine = rng.choice((0, 1, 2, 3, 4, 7, 12)), random_machine(rng)
    context = Context(batch=batch, sizes={"s1": 4})
    costs = random_costs(rng, graph, machine, batch)
    least = bound(graph, context, machine, costs)
    assert sum(seconds for _, seconds in least.parts) == pytest.approx(least.seconds)
    assert all(seconds <= least.seconds * (1 + 1e-9) for _, seconds in least.loads)
    for chosen in [*CANDIDATES, *(anyhow(rng) for _ in range(5))]:
        try:
            plan = lower(write(chosen, graph, context, machine, costs=costs))
        except (StrategyError, MemoryPlanError):  # too few rows; a value that two devices hold
            continue
        trace = simulate(plan, context, machine, costs)
        assert least.seconds <= trace.makespan_s * (1 + 1e-9), f"{chosen}\n{least}\n{plan}"


def row(*kinds: str, width: int = 1000) -> Graph:
    """Ops in a row, each reading what the one before has made: c... compute, n... network."""
    values, ops = [Value("v0", (S0, Size.of(width)), batch=ROWS)], []
    for number, kind in enumerate(kinds):
        made = Value(f"v{number + 1}", (S0, Size.of(width)), batch=ROWS, placeable=True)
        uses = {"c": "compute", "n": "network", "m": "memory"}[kind]
        op = Op(f"{kind}{number}", (values[-1].name,), (made.name,), uses=uses)
        ops.append(replace(op, two_phase=uses == "network", flops=S0 * 10**6))
        values.append(made)
    return Graph("row", tuple(values), tuple(ops), ("v0",), (values[-1].name,), "s0")


def all_plans(graph: Graph, context: Context, machine: Machine, cut: Cut, costs: Costs) -> Iterator:
    """Every plan of a cut: orders, lanes and merged runs."""

    def replay(runs) -> Scheduler:
        s = Scheduler(graph, context, machine, costs)
        if cut.num_parts > 1:
            s.split(cut)
        for op, parts, lane in runs:
            s.run(op, *parts, lane=lane)
        return s

    todo = [()]
    while todo:
        runs = todo.pop()
        s = replay(runs)
        ready = s.ready()
        if not ready:
            if cut.num_parts > 1:
                s.merge()
            yield lower(s.finish("all"))
        for op, part in ready:
            ranges = [()] if part is None else [(part,)]
            while ranges[-1] and (op, ranges[-1][-1] + 1) in ready:
                ranges.append((*ranges[-1], ranges[-1][-1] + 1))
            todo += [(*runs, (op, parts, lane)) for parts in ranges for lane in s.lanes(op)]


SHAPES = [
    ("c", 3), ("n", 3), ("cn", 3), ("nc", 3), ("cc", 3), ("cnc", 2), ("ncn", 2), ("cmc", 2)
]  # fmt: skip


@pytest.mark.parametrize(("kinds", "max_parts"), SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_no_plan_of_an_exhaustive_search_beats_the_bound(kinds, max_parts, seed):
    rng, graph, context = random.Random(seed), row(*kinds), Context(batch=4)
    lanes = (Lane("compute"), Lane("network", uses=("network",), via="compute"))
    device = Device("cpu", flops_per_s=1e7, network_bytes_per_s=2e4, network_latency_s=0.02)
    machine = Machine("one", (replace(device, network_share=0.25 * seed),), lanes)
    costs = random_costs(rng, graph, machine, 4) if seed else Costs(machine)
    least, best_s = bound(graph, context, machine, costs), float("inf")
    for sizes in [(4,), (1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]:
        if len(sizes) <= max_parts:
            for plan in all_plans(graph, context, machine, Cut.sizes(sizes), costs):
                best_s = min(best_s, simulate(plan, context, machine, costs).makespan_s)
    assert least.seconds <= best_s * (1 + 1e-9)
    if seed == 0:
        assert best_s <= 1.35 * least.seconds  # and it is not far


def makespan_s(name: str, graph: Graph, context: Context, machine: Machine, **options) -> float:
    plan = lower(write(get_strategy(name)(**options), graph, context, machine))
    return simulate(plan, context, machine).makespan_s


def test_a_row_of_compute_meets_its_bound():
    graph, context, machine = row("c", "c", "m"), Context(batch=64), cpu()
    least = bound(graph, context, machine)
    assert least.seconds == pytest.approx(makespan_s("sequential", graph, context, machine))
    assert least.name == "compute"


def test_compute_that_hides_the_network_meets_its_bound():
    graph, context = transformer(2), Context(batch=512)
    machine = cpu(network_bytes_per_s=1.25e8)
    reached_s = makespan_s("overlap", graph, context, machine, parts=2)
    least = bound(graph, context, machine)
    assert least.seconds == pytest.approx(reached_s, rel=1e-9)
    assert least.name == "compute"
    assert least.share == pytest.approx(1.0)


def test_what_cannot_be_split_is_waited_for_in_full():
    """One row: compute and network in turn, though each of them alone takes half as long."""
    lanes = (Lane("compute"), Lane("network", uses=("network",), via="compute"))
    machine = Machine("one", (Device("cpu", network_bytes_per_s=4e6),), lanes)
    graph, context = transformer(2), Context(batch=1)
    least = bound(graph, context, machine)
    assert least.seconds == pytest.approx(makespan_s("sequential", graph, context, machine))
    assert dict(least.parts).keys() == {"compute", "network"}
    assert max(dict(least.loads)["compute"], dict(least.loads)["network"]) < 0.8 * least.seconds


def test_splitting_that_reads_all_weights_again_is_counted():
    """Eight rows: an op in two parts takes twice as long, so the network stays exposed."""
    graph, context, machine = transformer(8), Context(batch=8), cpu(network_bytes_per_s=1.25e8)
    least = bound(graph, context, machine)
    plain_s = makespan_s("sequential", graph, context, machine)
    assert least.gap(plain_s) < 0.01
    assert least.gap(makespan_s("overlap", graph, context, machine)) > 0.5
    assert least.sentence(plain_s, plain_s) == (
        "no strategy can win more than 1 % here: 78 % is compute"
    )


def test_parts_that_take_less_than_the_whole_are_believed():
    graph, context, machine = row("c"), Context(batch=4), cpu()
    table = CostTable.of({("c0", "cpu"): {1: 0.1, 2: 0.2, 4: 4.0}})
    least = bound(graph, context, machine, Costs(machine, table))
    assert least.seconds == pytest.approx(0.4)


def test_a_large_batch_is_looked_at_in_steps(monkeypatch):
    graph, context, machine = transformer(1), Context(batch=3000), cpu()
    steps = bound(graph, context, machine).seconds
    monkeypatch.setattr(bound_module, "EXACT_ROWS", 3000)
    exact = bound(graph, context, machine).seconds
    assert exact * 0.994 < steps <= exact * (1 + 1e-9)


def test_a_transfer_that_cannot_be_avoided_counts():
    lanes = (Lane("compute", uses=("compute",)), Lane("stream", "gpu0", ("memory",)))
    links = (Link("cpu", "gpu0", bytes_per_s=4e3, latency_s=0.5),)
    machine = Machine("pair", (Device("cpu"), Device("gpu0")), lanes, links)
    graph, context = row("c", "m"), Context(batch=1)
    least = bound(graph, context, machine)
    assert least.seconds == pytest.approx(makespan_s("sequential", graph, context, machine))
    assert least.seconds > 1.5


def test_a_slow_link_alone_is_a_bound():
    """Weights that an op on another device reads go over the link, whatever else happens."""
    lanes = (Lane("compute", uses=("compute",)), Lane("stream", "gpu0", ("memory",)))
    links = (Link("cpu", "gpu0", bytes_per_s=1e3, latency_s=0.0),)
    machine = Machine("pair", (Device("cpu"), Device("gpu0")), lanes, links)
    base = row("c", "m")
    values = (*base.values, Value("w", (Size.of(1000),)))
    ops = (base.ops[0], replace(base.ops[1], reads=(*base.ops[1].reads, "w")))
    graph = replace(base, values=values, ops=ops, inputs=("v0", "w"))
    least = bound(graph, Context(batch=1), machine)
    assert least.name == "cpu to gpu0"
    assert least.seconds == pytest.approx(8.0)


def test_host_time_of_two_phases_is_on_the_lane_that_issues():
    lanes = (Lane("compute"), Lane("network", uses=("network",), via="compute"))
    machine = Machine("one", (Device("cpu", overhead_s=0.5, network_latency_s=0.0),), lanes)
    graph = Graph(
        "talks",
        tuple(Value(name, (Size.of(1),)) for name in "xabc"),
        tuple(
            Op(f"n{name}", ("x",), (name,), uses="network", rows="batch-free", two_phase=True)
            for name in "abc"
        ),
        ("x",),
        ("a",),
    )
    assert bound(graph, Context(), machine).loads[0] == ("lane compute", pytest.approx(3.0))


def test_sentences():
    least = Bound(2.0, (("network", 1.5), ("compute", 0.5)))
    assert least.sentence(2.08) == "within 4 % of what any schedule can reach"
    assert least.sentence(2.0, 3.0) == "within 0 % of what any schedule can reach"
    assert least.sentence(2.0, 2.0) == "no strategy can win here: 75 % is network"
    assert (least.name, least.share, least.gap(1.0)) == ("network", 0.75, 0.0)


def test_a_graph_without_ops_takes_no_time():
    value = Value("x", (Size.of(1),))
    assert bound(Graph("none", (value,), (), ("x",), ("x",)), Context(), cpu()) == Bound(0.0)


def test_an_op_that_no_lane_takes_is_refused():
    machine = Machine("one", (Device("cpu"),), (Lane("compute"),))
    with pytest.raises(MachineError, match="takes op 'n0'"):
        bound(row("n"), Context(batch=2), machine)


@pytest.mark.parametrize("kinds", ["cn", "nc", "cnc", "ncn"])
def test_a_search_over_orders_finds_the_best_plan_of_a_cut_and_proves_it(kinds):
    pytest.importorskip("ortools")
    lanes = (Lane("compute"), Lane("network", uses=("network",), via="compute"))
    device = Device("cpu", flops_per_s=1e7, network_bytes_per_s=2e4, network_latency_s=0.02)
    machine = Machine("one", (device,), lanes)
    graph, context, costs = row(*kinds), Context(batch=4), Costs(machine)
    for cut in (Cut(), Cut.even(2), Cut.sizes((1, 3))):
        every = all_plans(graph, context, machine, cut, costs)
        best_s = min(simulate(plan, context, machine, costs).makespan_s for plan in every)
        found = bound_by_search(graph, cut, context, machine, costs, limit_s=5.0)
        assert found.seconds <= best_s * (1 + 1e-9)
        assert found.plan_s == pytest.approx(best_s)
        assert found.optimal
        assert bound(graph, context, machine, costs).seconds <= found.seconds * (1 + 1e-9)


@settings(max_examples=15)
@given(randoms)
def test_law_no_plan_of_a_cut_beats_the_search_over_its_orders(rng):
    pytest.importorskip("ortools")
    graph, machine = random_graph(rng, num_ops=rng.randint(1, 4)), random_machine(rng)
    context, costs = Context(batch=4, sizes={"s1": 4}), random_costs(rng, graph, machine, 4)
    try:
        found = bound_by_search(graph, Cut.even(2), context, machine, costs, limit_s=1.0)
    except MemoryPlanError:  # a value that two devices hold
        return
    assert found.plan.cut == Cut.even(2)
    for _ in range(20):
        try:
            plan = lower(write(anyhow(rng), graph, context, machine, costs=costs))
        except MemoryPlanError:
            continue
        if plan.cut == Cut.even(2):
            reached_s = simulate(plan, context, machine, costs).makespan_s
            assert found.seconds <= reached_s * (1 + 1e-6)


def test_without_ortools_the_search_over_orders_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(PlacementError, match="pip install ortools"):
        bound_by_search(row("c"), Cut(), Context(batch=1), cpu())
