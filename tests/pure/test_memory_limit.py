"""`memory_bytes` of a device binds every plan: what holds more is refused, with the step."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchweft.errors import MemoryPlanError, StrategyError, WeftError
from torchweft.files import write_json
from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.improve import auto, improve, searched
from torchweft.plan.improve.predict import NEVER_S, candidates, predict
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, Device, Lane, Link, Machine, cpu, to_data
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate, within_memory
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import branches, overlap, prefetch, sequential, single_batch
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import Strategy, as_strategy, write
from torchweft_tools.bench.cases.random_graphs import random_graph
from torchweft_tools.buffers import lower_into_buffers
from torchweft_tools.cli import app as cli
from torchweft_tools.formats.weft_files import save_graph

SETTINGS = settings(max_examples=150, deadline=None)
CONTEXT = Context(batch=12, sizes={"s1": 4}, tokens_per_request=(1, 1, 1, 4, 5))
MiB = 2**20
randoms = st.integers(0, 2**40).map(random.Random)
ways = st.sampled_from(
    [sequential, overlap(parts=2), overlap(parts=3), branches, single_batch, prefetch]
)


def limited(machine: Machine, **most: int | None) -> Machine:
    """The machine with these limits by device."""
    devices = (replace(each, memory_bytes=most.get(each.name)) for each in machine.devices)
    return replace(machine, devices=tuple(devices))


def refused(plan: Plan, context: Context, machine: Machine) -> MemoryPlanError | None:
    try:
        within_memory(plan, context, machine)
    except MemoryPlanError as error:
        return error
    return None


@SETTINGS
@given(randoms, ways, st.booleans(), st.integers(1, 3), st.floats(0.3, 1.5))
def test_law_accepted_is_below_the_limit_and_refused_is_above(rng, way, buffers, lanes, share):
    graph = random_graph(rng, num_ops=rng.randint(1, 10))
    machine = cpu(lanes, capacity=2.0)
    bare = write(way, graph, CONTEXT, machine)
    plan = lower_into_buffers(bare) if buffers else lower(bare)
    trace = simulate(plan, CONTEXT, machine)
    peak = trace.peak_bytes
    assert within_memory(plan, CONTEXT, machine) == trace, "no limit, no difference"
    assume(peak > 1)
    for most in (peak, peak - 1, max(1, int(share * peak))):
        bound = limited(machine, cpu=most)
        error = refused(plan, CONTEXT, bound)
        assert (error is None) == (peak <= most)
        if error is None:
            continue
        assert error.rule == "memory" and "'cpu'" in str(error) and "memory_bytes" in str(error)
        if error.step is None:
            assert trace.memory[0][1] == peak, "planned buffers alone are too large"
            continue
        step = plan.steps[error.step]
        assert step.lane == error.lane and step.label in str(error) and "<-- here" in str(error)
        starts = {span.start_s for span in trace.spans if span.label == step.label}
        assert starts & {at_s for at_s, live in trace.memory if live == peak} or not starts


def two_devices() -> Machine:
    lanes = (Lane("compute", "cpu"), Lane("other", "gpu"))
    links = (Link("cpu", "gpu"), Link("gpu", "cpu"))
    return Machine("two", (Device("cpu"), Device("gpu")), lanes, links)


def test_each_device_has_its_own_limit() -> None:
    """x of 1 MiB a row; a is made on the gpu of a copy of x, b on the cpu, their sum there too."""
    rows, s0 = Batch(0), Size.of("s0")
    sizes = {"x": MiB, "a": 2 * MiB, "b": 3 * MiB, "y": MiB}
    values = [Value(n, (s0, Size.of(size)), "uint8", rows) for n, size in sizes.items()]
    ops = (Op("one", ("x",), ("a",)), Op("two", ("x",), ("b",)), Op("sum", ("a", "b"), ("y",)))
    graph = Graph("both", tuple(values), ops, ("x",), ("y",), "s0")
    machine, context = two_devices(), Context(2)

    def placed(s: Scheduler) -> None:
        for op, lane in zip(s.graph.ops, ("other", "compute", "compute"), strict=True):
            s.run(op, lane=lane)

    plan = lower(write(placed, graph, context, machine))
    # On the gpu x and a, 2 rows each; on the cpu the copy of a, b and y.
    gpu, own = 2 * (1 + 2) * MiB, 2 * (2 + 3 + 1) * MiB
    assert simulate(plan, context, machine).peak_bytes > max(gpu, own)
    for most, where in (
        ({"cpu": own, "gpu": gpu}, ""),
        ({"cpu": own}, ""),
        ({"cpu": own - 1, "gpu": gpu}, "cpu"),
        ({"gpu": gpu - 1}, "gpu"),
    ):
        error = refused(plan, context, limited(machine, **most))
        assert (error is None) == (not where)
        if error is not None:
            assert f"on device {where!r} 1 bytes more" in str(error)


BATCH = 512


def wide(num_layers: int = 2) -> Graph:
    """Layers that are eight times as wide inside as between them, each with a message behind it."""
    s0, rows = Size.of("s0"), Batch(0)
    values, ops = [Value("x0", (s0, Size.of(256)), "float32", rows)], []
    for n in range(num_layers):
        steps = (
            ("up", f"x{n}", f"a{n}", 2048, "compute"),
            ("act", f"a{n}", f"b{n}", 2048, "memory"),
            ("down", f"b{n}", f"c{n}", 256, "compute"),
            ("reduce", f"c{n}", f"x{n + 1}", 256, "network"),
        )
        for name, read, made, width, uses in steps:
            values.append(Value(made, (s0, Size.of(width)), "float32", rows))
            phases = uses == "network"
            ops.append(Op(f"{name}{n}", (read,), (made,), uses=uses, two_phase=phases))
    return Graph("wide", tuple(values), tuple(ops), ("x0",), (f"x{num_layers}",), "s0")


@pytest.fixture(scope="module")
def peaks() -> dict[Strategy, int]:
    graph, context = wide(), Context(BATCH)
    ways = (sequential, *(overlap(parts=n) for n in (2, 4, 8)))
    plans = {way: lower(write(way, graph, context, cpu())) for way in ways}
    return {way: simulate(plan, context, cpu()).peak_bytes for way, plan in plans.items()}


def test_auto_writes_a_plan_that_fits_and_says_what_did_not(peaks) -> None:
    graph, context = wide(), Context(BATCH)
    free = lower(write(auto, graph, context, cpu()))
    assert not any("memory" in line for line in free.history)
    least = min(peaks.values())
    assert peaks[sequential] > least, "else this test says nothing"
    machine = cpu(memory_bytes=least)
    plan = lower(write(auto, graph, context, machine))
    within_memory(plan, context, machine)
    assert any("need more memory than there is" in line for line in plan.history)
    costs = Costs(machine)
    for way in (sequential, *candidates(graph)):
        try:
            lowered = lower(write(way, graph, context, machine))
            fits = simulate(lowered, context, machine).peak_bytes <= least
        except StrategyError:
            fits = False
        assert (predict(way, graph, context, costs) < NEVER_S) == fits


def test_a_search_leaves_what_does_not_fit_and_finds_what_does(peaks) -> None:
    graph, context = wide(), Context(BATCH)
    machine = cpu(memory_bytes=min(peaks.values()))
    bare = write(sequential, graph, context, machine)
    assert refused(lower(bare), context, machine)
    better = improve(bare, context, machine, budget=60)
    within_memory(lower(better), context, machine)
    assert "improve: no plan that fits to" in better.history[-1]
    plan = write(searched(budget=60), graph, context, machine)
    within_memory(lower(plan), context, machine)
    hopeless = cpu(memory_bytes=1)
    assert improve(bare, context, hopeless, budget=20) == bare


def test_a_strategy_can_ask_what_fits(peaks) -> None:
    """The page on memory has this strategy."""

    def fitting(s: Scheduler) -> None:
        """As few parts as the memory allows."""
        for parts in (1, 2, 4, 8):
            way = overlap(parts=parts)
            if predict(way, s.graph, s.context, s.costs) < NEVER_S:
                break
        way(s)

    graph, context = wide(), Context(BATCH)
    for way, peak in peaks.items():
        plan = write(as_strategy(fitting), graph, context, cpu(memory_bytes=peak))
        within_memory(lower(plan), context, cpu(memory_bytes=peak))
        assert plan.num_parts <= dict(way.options).get("parts", 1)


def test_the_command_line_refuses_what_does_not_fit(tmp_path, monkeypatch, capsys, peaks) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_DEBUG", raising=False)
    small, large = peaks[sequential] - 1, peaks[sequential]
    for name, most in (("small", small), ("large", large)):
        write_json(Path(f"{name}.json"), to_data(cpu(memory_bytes=most)))
    save_graph(wide(), "graph.json")
    assert cli.run(f"plan graph.json --batch {BATCH} -o one.plan".split()) == 0
    capsys.readouterr()
    for words in (
        "plan graph.json",
        "verify one.plan --graph graph.json",
        "simulate one.plan --graph graph.json",
    ):
        assert cli.run(f"{words} --batch {BATCH} --machine large.json".split()) == 0
        capsys.readouterr()
        words += f" --batch {BATCH} --machine small.json --json"
        assert cli.run(words.split()) == 1, words
        error = json.loads(capsys.readouterr().out)["error"]
        assert (error["kind"], error["rule"], error["lane"]) == (
            "MemoryPlanError",
            "memory",
            "compute",
        )
        assert isinstance(error["step"], int)
    assert cli.run(f"verify one.plan --graph graph.json --batch {BATCH}".split()) == 2
    assert "--machine" in capsys.readouterr().err
    assert issubclass(MemoryPlanError, WeftError)
