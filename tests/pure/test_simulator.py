"""The simulator: times computed by hand, laws on random plans, deadlocks, live bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import MachineError, PlanError, StrategyError
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.improve.bound import bound
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
from torchweft.plan.plan import Buffer, Place, Plan, Step
from torchweft.plan.simulator import simulate
from torchweft.plan.sizes import Size
from torchweft.plan.strategies.overlap import overlap
from torchweft.plan.strategies.sequential import sequential
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import write
from torchweft_tools.demo.blueprint import transformer

S0, ROWS = Size.of("s0"), Batch(0)
MiB = 2**20


def flat_graph(*names: str) -> Graph:
    """Ops that all read x and make 1 MiB a row: r... uses network, m... memory, else compute."""
    uses = {"r": "network", "m": "memory"}
    values, ops = [Value("x", (S0,), "uint8", ROWS)], []
    for name in names:
        kind = uses.get(name[0], "compute")
        values.append(Value(f"{name}_out", (S0, Size.of(MiB)), "uint8", ROWS))
        ops.append(Op(name, ("x",), (f"{name}_out",), uses=kind, two_phase=kind == "network"))
    return Graph("flat", tuple(values), tuple(ops), ("x",), (), "s0")


def quick(num_lanes: int = 1, **rates: float) -> Machine:
    """A CPU whose hosts and links cost nothing but what the table says."""
    return cpu(num_lanes, **{"overhead_s": 0.0, "network_latency_s": 0.0, **rates})


def fixed(machine: Machine, seconds: Mapping[str, float]) -> Costs:
    """Costs that do not depend on rows."""
    points = {(op, "cpu"): {0: s, 10**9: s} for op, s in seconds.items()}
    return Costs(machine, CostTable.of(points))


def plan_of(graph: Graph, machine: Machine, text: str, *, num_parts: int = 1, **more: Any) -> Plan:
    """A plan of lines such as `compute issue r on network`."""
    head = Plan(graph.name, graph.digest, Cut.even(num_parts), machine.lanes, (), **more)
    steps = "".join(f"  {line.strip()}\n" for line in text.strip().splitlines())
    return Plan.parse(str(head).replace("steps\n", f"steps\n{steps}")).bind(graph)


def played(
    text: str,
    seconds: dict[str, float],
    *,
    num_parts: int = 1,
    contention: bool = True,
    **rates: float,
) -> Trace:
    """The trace of a plan over ops with fixed seconds, on two compute lanes."""
    machine = quick(2, **rates)
    plan = plan_of(flat_graph(*seconds), machine, text, num_parts=num_parts)
    context = Context(batch=4)
    return simulate(plan, context, machine, fixed(machine, seconds), contention=contention)


TWO_LANES = "compute a\ncompute1 b"


@pytest.mark.parametrize(
    ("seconds", "capacity", "makespan_s"),
    [
        ({"a": 1.0, "b": 1.0}, 1.0, 2.0),
        ({"a": 1.0, "b": 1.0}, 1.5, 4 / 3),
        ({"a": 1.0, "b": 1.0}, 2.0, 1.0),
        ({"a": 1.0, "b": 3.0}, 1.0, 4.0),
        ({"a": 2.0, "m": 1.0}, 1.0, 2.0),
    ],
)
def test_lanes_share_the_capacity(
    seconds: dict[str, float], capacity: float, makespan_s: float
) -> None:
    text = TWO_LANES.replace("b", next(reversed(seconds)))
    trace = played(text, seconds, capacity=capacity)
    assert trace.makespan_s == pytest.approx(makespan_s)
    free = played(text, seconds, capacity=capacity, contention=False)
    assert free.makespan_s == max(seconds.values())
    assert free.busy_s("compute1") == trace.busy_s("compute1") == list(seconds.values())[1]


def test_a_transfer_in_flight_eats_its_share_of_compute() -> None:
    text = "compute issue r on network\ncompute a\ncompute complete r"
    trace = played(text, {"a": 5.0, "r": 1.0}, network_share=0.25)
    ends = {span.label: span.end_s for span in trace.spans}
    assert ends["r"] == pytest.approx(1.25)  # both at 1 / 1.25 of their rate
    assert ends["a"] == pytest.approx(1.25 + 4.0)
    assert played(text, {"a": 5.0, "r": 1.0}, network_share=0.25, capacity=2.0).makespan_s == 5.0
    assert played(text, {"a": 5.0, "r": 1.0}).makespan_s == 5.0


def test_work_takes_as_much_longer_beside_other_work_as_was_measured() -> None:
    text = "compute issue r on network\ncompute a\ncompute complete r"
    slow = (Slowdown("compute", "network", 2.0), Slowdown("network", "compute", 1.5))
    machine = quick(2)
    machine = replace(machine, devices=(replace(machine.devices[0], slowdowns=slow),))
    plan = plan_of(flat_graph("a", "r"), machine, text)
    costs = fixed(machine, {"a": 5.0, "r": 1.0})
    trace = simulate(plan, Context(batch=4), machine, costs)
    ends = {span.label: span.end_s for span in trace.spans}
    assert ends["r"] == pytest.approx(1.5)
    assert ends["a"] == pytest.approx(1.5 + 5.0 - 0.75)
    late = simulate(plan, Context(batch=4), machine, replace(costs, call_s=0.25))
    assert late.makespan_s == pytest.approx(trace.makespan_s + 0.25)


def test_an_op_with_a_factor_of_its_own_is_slowed_down_by_that() -> None:
    """Only beside the other kind, and only where the device has a slowdown at all."""
    text = "compute issue r on network\ncompute a\ncompute complete r\ncompute b"
    slow, graph = (Slowdown("compute", "network", 2.0),), flat_graph("a", "b", "r")
    machine = quick(2)
    slowed = replace(machine, devices=(replace(machine.devices[0], slowdowns=slow),))
    context = Context(batch=4)
    own = CostTable.of(
        {(cost_key(graph, graph.op[name], context.env(graph.batch)), "cpu"): {2: 3.0, 6: 5.0}
         for name in ("a", "b")}
    )  # fmt: skip
    for where, a_s in ((slowed, 8.0), (machine, 2.0)):
        costs = replace(fixed(where, {"a": 2.0, "b": 1.0, "r": 20.0}), factors=own)
        plan = plan_of(graph, where, text)
        spans = {s.label: s for s in simulate(plan, context, where, costs).spans}
        assert spans["a"].end_s - spans["a"].start_s == pytest.approx(a_s)
        assert spans["b"].end_s - spans["b"].start_s == pytest.approx(1.0)  # nothing is in flight
    assert bound(graph, context, slowed, costs).seconds <= 20.0


@pytest.mark.parametrize(
    ("text", "makespan_s", "exposed_s"),
    [
        ("compute issue r on network\ncompute complete r\ncompute a", 5.0, 2.0),
        ("compute issue r on network\ncompute a\ncompute complete r", 3.0, 0.0),
        ("compute issue r on network\ncompute b\ncompute complete r\ncompute a", 5.0, 1.0),
    ],
)
def test_hidden_and_exposed_network_time(text: str, makespan_s: float, exposed_s: float) -> None:
    trace = played(text, {"a": 3.0, "b": 1.0, "r": 2.0})
    assert trace.makespan_s == makespan_s
    assert (trace.network_s, trace.exposed_network_s) == (2.0, exposed_s)
    assert trace.overlap_share == 1 - exposed_s / 2


def test_flights_at_once_share_the_network() -> None:
    """Two of three at once: they share by their length and land together, then the third goes."""
    text = """
        compute issue r on network\n compute issue r1 on network\n compute issue r2 on network
        compute complete r\n compute complete r1\n compute complete r2
    """
    machine, graph = quick(), flat_graph("r", "r1", "r2")
    two = replace(machine, devices=(replace(machine.devices[0], num_flights=2),))
    ends = []
    for where in (machine, two):
        costs = fixed(where, {"r": 4.0, "r1": 1.0, "r2": 2.0})
        spans = simulate(plan_of(graph, where, text), Context(batch=4), where, costs).spans
        flights = {s.label: s.end_s for s in spans if s.kind == "transfer"}
        ends.append([flights[name] for name in ("r", "r1", "r2")])
    assert ends == [[4.0, 5.0, 7.0], [pytest.approx(5.0), pytest.approx(5.0), pytest.approx(7.0)]]


def test_flights_of_one_lane_follow_each_other() -> None:
    text = """
        compute issue r[0] on network\n compute issue r[1] on network
        compute complete r[1]\n compute complete r[0]\n compute a
    """
    trace = played(text, {"r": 2.0, "a": 1.0}, num_parts=2)
    flights = [(s.label, s.start_s, s.end_s) for s in trace.spans if s.kind == "transfer"]
    assert flights == [("r[0]", 0.0, 2.0), ("r[1]", 2.0, 4.0)]
    assert trace.makespan_s == 5.0
    assert [s.label for s in trace.critical_path if s.busy_s] == ["r[0]", "r[1]", "a"]


def test_a_network_lane_with_a_thread_runs_network_ops_itself() -> None:
    lanes = (Lane("compute"), Lane("wire", uses=("network",)))
    machine = Machine("pc", (Device("cpu"),), lanes)
    plan = plan_of(flat_graph("a", "r"), machine, "wire r\ncompute a\ncompute wait r")
    trace = simulate(plan, Context(1), machine, fixed(machine, {"a": 1.0, "r": 3.0}))
    assert (trace.makespan_s, trace.exposed_network_s, trace.busy_s("wire")) == (3.0, 2.0, 3.0)


def test_waits_hold_a_lane_until_the_step_has_ended() -> None:
    text = "compute a\ncompute c\ncompute1 wait a\ncompute1 b\ncompute1 wait c"
    trace = played(text, {"a": 1.0, "b": 4.0, "c": 1.0}, contention=False)
    spans = [(s.kind, s.label, s.start_s, s.end_s) for s in trace.spans if s.lane == "compute1"]
    assert spans == [("wait", "wait a", 0.0, 1.0), ("run", "b", 1.0, 5.0)]
    assert [span.label for span in trace.critical_path] == ["a", "wait a", "b"]
    assert trace.critical_path_s == trace.makespan_s == 5.0


def test_issue_and_complete_take_host_time() -> None:
    machine = cpu(overhead_s=0.5, network_latency_s=0.0)
    plan = plan_of(flat_graph("r"), machine, "compute issue r on network\ncompute complete r")
    trace = simulate(plan, Context(1), machine, fixed(machine, {"r": 2.0}))
    found = [(s.kind, s.start_s, s.end_s, s.busy_s) for s in trace.spans]
    assert found[:2] == [("issue", 0.0, 0.5, 0.5), ("transfer", 0.5, 2.5, 2.0)]
    assert found[2:] == [("complete", 0.5, 3.0, 0.5)]


def test_a_kernel_takes_the_place_of_its_ops() -> None:
    seconds = {"a": 1.0, "b": 2.0, "r": 2.5}
    machine = quick()
    plan = plan_of(flat_graph(*seconds), machine, "compute (a b r) by fused")
    assert simulate(plan, Context(1), machine, fixed(machine, seconds)).makespan_s == 3.0
    measured = fixed(machine, {**seconds, "fused": 0.25})
    assert simulate(plan, Context(1), machine, measured).makespan_s == 0.25


def test_copies_cost_their_bytes_and_contend_for_memory() -> None:
    graph = flat_graph("a", "m")
    machine = quick(2, bytes_per_s=2 * MiB)
    costs = fixed(machine, {"a": 1.0, "m": 1.0})
    text = "compute a[0]\ncompute copy a_out[0]\ncompute1 m"
    plan = plan_of(graph, machine, text, num_parts=2, places=(Place("a_out"),))
    trace = simulate(plan, Context(4), machine, costs, contention=False)
    copy = next(span for span in trace.spans if span.kind == "copy")
    assert (copy.uses, copy.op, copy.busy_s) == ("memory", "", 2.0)
    assert simulate(plan, Context(4), machine, costs).makespan_s == 3.0  # m had ended by then
    late = plan_of(
        graph, machine, text.replace("compute1 m", "compute1 wait a[0]\ncompute1 m"), num_parts=2
    )
    assert simulate(late, Context(4), machine, costs).makespan_s == pytest.approx(1 + 3)


def test_copies_to_a_device_cross_the_link() -> None:
    devices = (Device("cpu", overhead_s=0.0), Device("gpu0", overhead_s=0.0))
    lanes = (Lane("compute"), Lane("stream", "gpu0"))
    link = Link("cpu", "gpu0", bytes_per_s=MiB, latency_s=0.5)
    machine = Machine("pair", devices, lanes, (link,))
    text = "compute a\ncompute copy a_out to gpu0\nstream wait copy a_out to gpu0\nstream b"
    graph = flat_graph("a", "b")
    table = CostTable.of({("a", "cpu"): {2: 1.0}, ("b", "gpu0"): {2: 1.0}})
    trace = simulate(plan_of(graph, machine, text), Context(2), machine, Costs(machine, table))
    assert trace.makespan_s == pytest.approx(1 + 2.5 + 1)
    assert trace.peak_bytes == 6 * MiB  # a_out twice, b_out
    alone = Machine("pair", devices, lanes)
    with pytest.raises(MachineError, match="nothing joins"):
        simulate(plan_of(graph, alone, text), Context(2), alone, Costs(alone, table))


def test_parts_cost_by_their_rows() -> None:
    values = (Value("x", (S0,), "uint8", ROWS), Value("y", (S0,), "uint8", ROWS))
    op = Op("a", ("x",), ("y",), flops=S0)
    graph = Graph("rows", values, (op,), ("x",), (), "s0")
    machine = quick(flops_per_s=1.0)
    cut = Cut.sizes((1, 1, 2))
    steps = (
        Step("split", "compute", ("x",)),
        Step("run", "compute", ("a",), (0, 2)),
        Step("run", "compute", ("a",), (2, 3)),
    )
    plan = Plan("rows", graph.digest, cut, machine.lanes, steps, bound=graph)
    trace = simulate(plan, Context(12), machine)
    found = [(s.label, s.parts, s.busy_s) for s in trace.spans]
    assert found == [("a[0:2]", (0, 2), 6.0), ("a[2]", (2, 3), 6.0)]
    requests = Plan(
        "rows", graph.digest, Cut.even(2, "requests"), machine.lanes, steps[:2], bound=graph
    )
    assert simulate(requests, Context(12, tokens_per_request=(9, 3)), machine).makespan_s == 12.0
    with pytest.raises(StrategyError, match="2 rows cannot make 3 parts"):
        simulate(plan, Context(2), machine)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("compute wait b\ncompute a\ncompute1 wait a\ncompute1 b", ["wait b", "wait a"]),
        ("compute wait a\ncompute a", ["compute stands at step 0"]),
        ("compute a\ncompute wait b", ["wait b, which is missing"]),
        ("compute complete r\ncompute issue r on network", ["complete r, which cannot end first"]),
        ("compute complete r", ["complete r, which is missing"]),
        ("compute a\ncompute1 b\ncompute1 wait r", ["compute1 stands at step 2: wait r"]),
    ],
)
def test_deadlocks_name_where_each_lane_stands(text: str, names: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        played(text, {"a": 1.0, "b": 1.0, "r": 1.0})
    assert caught.value.rule == "deadlock"
    assert caught.value.step is not None
    assert all(name in str(caught.value) for name in names)
    assert "<-- here" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    ["compute zzz", "mystery a", "compute issue r on nowhere", "compute free zzz", "compute a[7]"],
)
def test_names_that_mean_nothing_are_refused(line: str) -> None:
    with pytest.raises(PlanError) as caught:
        played(f"compute a\n{line}", {"a": 1.0, "r": 1.0})
    assert (caught.value.rule, caught.value.step) == ("name", 1)


def test_a_device_that_the_machine_lacks_is_refused() -> None:
    machine = Machine("pair", (Device("gpu0"),), (Lane("compute", "gpu0"),))
    with pytest.raises(MachineError, match="unknown device 'gpu0'"):
        simulate(plan_of(flat_graph("a"), machine, "compute a"), Context(1), cpu())


def test_live_bytes_of_loose_pieces_places_and_buffers() -> None:
    """Four rows in two parts, so a part of a value is 2 MiB."""
    graph, machine = flat_graph("a", "b", "c"), quick()
    text = """
        compute a[0]\n compute b[0]\n compute copy b_out[0]\n compute free a_out[0]
        compute c
        compute b[1]\n compute copy b_out[1]\n compute free b_out[0]\n compute free b_out[1]
    """
    places = (Place("b_out"), Place("c_out", "pool", 4))
    buffers = (Buffer("pool", "cpu", S0),)
    plan = plan_of(graph, machine, text, num_parts=2, places=places, buffers=buffers)
    trace = simulate(plan, Context(4), machine, fixed(machine, {"a": 1.0, "b": 1.0, "c": 1.0}))
    pool = 4 * 4 + 4 * MiB
    live = [num_bytes - pool for _, num_bytes in trace.memory]
    loose_c = 4  # c_out is not placeable: a loose piece, never copied
    # a[0], loose b[0], all of the place of b_out, b[0] is in it, a[0] is freed
    begin = [0, 2, 4, 8, 6, 4]
    # c, loose b[1], b[1] is in its place, both parts of b_out are freed
    assert [found / MiB for found in live] == begin + [more + loose_c for more in (4, 6, 4, 0)]


def test_what_an_additive_op_makes_counts_once() -> None:
    values = (Value("x", (S0,), "uint8", ROWS), Value("g", (Size.of(100),), "uint8"))
    op = Op("grad", ("x",), ("g",), rows="additive")
    graph = Graph("sum", values, (op,), ("x",), ("g",), "s0")
    plan = plan_of(graph, quick(), "compute grad[0]\ncompute grad[1]", num_parts=2)
    assert [live for _, live in simulate(plan, Context(4), quick()).memory] == [0, 100]


@st.composite
def random_plans(draw: st.DrawFn) -> tuple[Plan, Costs]:
    """Two compute lanes and a hosted network lane; waits only for steps that stand before them."""
    names = [*(f"a{i}" for i in range(6)), *(f"r{i}" for i in range(3)), "m0"]
    graph = flat_graph(*names)
    share, capacity = draw(st.sampled_from([0.0, 0.3, 1.0])), draw(st.sampled_from([1.0, 1.5, 3.0]))
    machine = quick(2, network_share=share, capacity=capacity, overhead_s=draw(st.floats(0, 0.1)))
    seconds = {name: draw(st.floats(0, 5, allow_subnormal=False)) for name in names}
    steps: list[Step] = []
    flying: list[str] = []
    for name in draw(st.permutations(names)):
        lane = draw(st.sampled_from(["compute", "compute1"]))
        if len(steps) > 0 and draw(st.booleans()):
            steps.append(Step("wait", lane, target=draw(st.sampled_from(steps)).label))
        if name.startswith("r"):
            steps.append(Step("issue", "compute", (name,), on="network"))
            flying.append(name)
        else:
            steps.append(Step("run", lane, (name,)))
        if len(flying) > 0 and draw(st.booleans()):
            lane = draw(st.sampled_from(["compute", "compute1"]))
            steps.append(Step("complete", lane, (flying.pop(),)))
    plan = Plan("flat", graph.digest, Cut(), machine.lanes, tuple(steps), bound=graph)
    return plan, fixed(machine, seconds)


@given(random_plans())
def test_makespan_lies_between_critical_path_and_sum_every_time(made: tuple[Plan, Costs]) -> None:
    plan, costs = made
    context, machine = Context(1), costs.machine
    free = simulate(plan, context, machine, costs, contention=False)
    full = simulate(plan, context, machine, costs)
    assert full == simulate(plan, context, machine, costs)  # nothing is left to chance
    total_s = sum(span.busy_s for span in free.spans)
    assert free.makespan_s == pytest.approx(free.critical_path_s)
    assert free.makespan_s <= total_s * (1 + 1e-9)
    assert full.critical_path_s == pytest.approx(free.critical_path_s)
    assert full.makespan_s >= full.critical_path_s * (1 - 1e-9)
    assert all(s.end_s - s.start_s >= s.busy_s * (1 - 1e-9) - 1e-12 for s in full.spans)
    assert 0 <= full.exposed_network_s <= full.network_s <= full.makespan_s * (1 + 1e-9)


@given(random_plans())
def test_no_lane_does_two_things_at_once_and_waits_hold(made: tuple[Plan, Costs]) -> None:
    plan, costs = made
    trace = simulate(plan, Context(1), costs.machine, costs)
    for lane in plan.lane:
        spans = [span for span in trace.spans if span.lane == lane]
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
    ends = {span.label: span.end_s for span in trace.spans if span.kind != "transfer"}
    flights = {span.label: span for span in trace.spans if span.kind == "transfer"}
    for span in trace.spans:
        if span.kind == "wait" and not span.label.startswith("wait wait"):
            assert span.end_s == ends[span.label.removeprefix("wait ")]
        if span.kind == "complete":
            assert flights[span.op].end_s <= span.end_s
    assert all(flight.start_s >= ends[f"issue {label}"] for label, flight in flights.items())


@pytest.mark.parametrize("num_parts", [2, 4])
def test_overlap_of_a_transformer_hides_its_network(num_parts: int) -> None:
    graph, context = transformer(4), Context(batch=512)
    machine = cpu(network_bytes_per_s=3e7)
    traces = {}
    for strategy in (sequential(), overlap(parts=num_parts)):
        plan = lower(write(strategy, graph, context, machine))
        traces[strategy.name] = simulate(plan, context, machine)
    assert traces["overlap"].makespan_s < 0.8 * traces["sequential"].makespan_s
    assert traces["overlap"].overlap_share > 0.5
    assert traces["sequential"].overlap_share < 0.05


def test_timeline_of_a_small_plan_reads_as_written() -> None:
    text = """
        compute split x
        compute a[0]\n compute issue r[0] on network\n compute a[1]
        compute issue r[1] on network\n compute complete r[0]\n compute b[0]
        compute complete r[1]\n compute b[1]
    """
    trace = played(text, {"a": 2.0, "b": 2.0, "r": 3.0}, num_parts=2)
    assert trace.to_text(width=70) == (
        "flat (simulated): makespan 10 s, critical path 10 s\n"
        "          |0 s                       |5\n"
        "compute   ▐███a[0]███▐███a[1]███·····▐███b[0]███·····▐███b[1]███   80%\n"
        "compute1                                                            0%\n"
        "network              ╞═════r[0]══════╞═════r[1]══════              60%\n"
        "io                                                                  0%\n"
        "network 6 s in flight, 2 s exposed, 67% hidden\n"
        "memory peak 12 MiB\n"
        "█ compute  ═ network  ▒ issue  · waiting\n"
    )


def test_ten_thousand_steps_come_to_an_end() -> None:
    names = [f"a{i}" for i in range(2500)]
    machine = quick(2)
    steps = []
    for i, name in enumerate(names):
        lane, other = ("compute", "compute1") if i % 2 else ("compute1", "compute")
        steps += [Step("run", lane, (name,)), Step("wait", other, target=name)]
        steps += [
            Step("free", lane, (f"{name}_out",)),
            Step("wait", other, target=f"free {name}_out"),
        ]
    graph = flat_graph(*names)
    plan = Plan("flat", graph.digest, Cut(), machine.lanes, tuple(steps), bound=graph)
    trace = simulate(plan, Context(1), machine, fixed(machine, dict.fromkeys(names, 0.5)))
    assert (len(plan.steps), trace.makespan_s, trace.peak_bytes) == (10_000, 1250.0, MiB)
