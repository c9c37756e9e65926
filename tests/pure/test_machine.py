"""Machines and machine files: lanes, devices and links that exist, or a clear `MachineError`."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import MachineError
from torchweft.files import write_json
from torchweft.plan.context import Context
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import (
    LANE,
    Device,
    Lane,
    Link,
    Machine,
    Slowdown,
    accelerator,
    cpu,
    make_lane,
    to_data,
)
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.strategies import overlap
from torchweft.plan.write.strategy import write
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.weft_files import load_machine

TWO = Machine(
    "two",
    (Device("cpu"), Device("gpu0", flops_per_s=1e12)),
    (Lane("compute"), Lane("stream0", "gpu0"), Lane("network", uses=("network",), via="compute")),
    (Link("cpu", "gpu0"), Link("gpu0", "cpu", 2e9, 2e-5)),
)
DATA: dict[str, Any] = json.loads(json.dumps(to_data(TWO)))
CONTEXT = Context(batch=16)
PLAN = lower(write(overlap, transformer(1), CONTEXT))


def load(data: object, folder: Path) -> Machine:
    write_json(folder / "machine.json", data)
    return load_machine(folder / "machine.json")


def test_machine_file_reads_back(tmp_path: Path) -> None:
    gpu = accelerator(2, compute_sms=16, capacity=2.0)
    slow = (Slowdown("compute", "network", 1.2),)
    slowed = replace(cpu(), devices=(replace(cpu().devices[0], slowdowns=slow),))
    for machine in (TWO, cpu(), cpu(3, capacity=2.0, memory_bytes=2**30), gpu, slowed):
        assert load(to_data(machine), tmp_path) == machine


def test_cpu_has_the_lanes_it_was_asked_for() -> None:
    assert [lane.name for lane in cpu(2).lanes] == ["compute", "compute1", "network", "io"]
    assert cpu().lane["network"].via == "compute"
    assert cpu(network_share=0.25).device["cpu"].network_share == 0.25


def test_accelerator_has_a_network_lane_that_goes_first_and_budgets_for_compute() -> None:
    machine = accelerator(2, compute_sms=96)
    assert machine.lane["network"].priority == -1
    assert machine.lane["network"].via == "compute"
    assert [lane.num_sms for lane in machine.lanes] == [96, 96, None, None]
    assert {lane.device for lane in machine.lanes} == {"gpu"}


def test_lane_stands_in_a_plan_with_its_priority_and_budget() -> None:
    for lane in accelerator(2, compute_sms=96, network_priority=-3).lanes:
        found = LANE.fullmatch(str(lane))
        assert found is not None
        assert make_lane(*found.groups()) == lane


def test_plan_with_priorities_and_budgets_reads_back() -> None:
    machine = accelerator(2, compute_sms=96)
    plan = lower(write(overlap, transformer(1), CONTEXT, machine))
    assert "lane network on gpu uses network via compute priority -1" in str(plan)
    assert Plan.parse(str(plan)) == plan


def test_links_join_devices_in_one_direction() -> None:
    assert TWO.link("gpu0", "cpu").bytes_per_s == 2e9
    with pytest.raises(MachineError, match="nothing joins device 'cpu' to 'cpu'"):
        TWO.link("cpu", "cpu")


def slowed_by(uses: str, factor: float) -> Device:
    return Device("cpu", slowdowns=(Slowdown("compute", uses, factor),))


WRONG: dict[str, tuple[Any, str]] = {
    "rate": (lambda: cpu(flops=1), "Did you mean 'flops_per_s'"),
    "no lanes": (lambda: cpu(0), "at least one compute lane"),
    "negative rate": (lambda: cpu(bytes_per_s=-1.0), "bytes_per_s must be a number .*; got '?-1.0"),
    "no rate": (lambda: cpu(flops_per_s=0), "flops_per_s must be a number .*; got '?0"),
    "no number": (lambda: cpu(capacity=float("nan")), "capacity must be a number .*; got '?nan"),
    "word for a rate": (lambda: cpu(capacity="much"), "capacity must be a number .*; got 'much'"),
    "endless latency": (lambda: cpu(network_latency_s=1e308), "network_latency_s must be"),
    "endless number": (lambda: cpu(capacity=10**400), "capacity must be"),
    "no device": (lambda: Machine("m", (), (Lane("a"),)), "no device"),
    "no lane": (lambda: Machine("m", (Device("cpu"),), ()), "no lane"),
    "two lanes": (lambda: Machine("m", (Device("cpu"),), (Lane("a"), Lane("a"))), "two lanes"),
    "foreign device": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a", "gpu"),)), "unknown device 'gpu'"
    ),
    "via nothing": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a", via="b"),)), "no lane with a thread"
    ),
    "via another device": (
        lambda: Machine(
            "m", (Device("cpu"), Device("gpu")), (Lane("a"), Lane("b", "gpu", via="a"))
        ),
        "no lane with a thread on 'gpu'",
    ),
    "via itself": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a", via="a"),)), "no lane with a thread"
    ),
    "resource": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a", uses=("gpu",)),)), "Known: compute, io"
    ),
    "priority": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a", priority=999),)), "priority"
    ),
    "no budget": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a", num_sms=0),)), "num_sms must be"
    ),
    "link": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a"),), (Link("cpu", "x"),)), "joins no two"
    ),
    "link rate": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a"),), (Link("cpu", "cpu", -1.0),)), "link"
    ),
    "link latency": (
        lambda: Machine("m", (Device("cpu"),), (Lane("a"),), (Link("cpu", "cpu", 1e9, -1.0),)),
        "link",
    ),
    "slowdown of nothing": (
        lambda: Machine("m", (slowed_by("net", 2.0),), (Lane("a"),)), "Did you mean 'network'"
    ),
    "speed-up": (
        lambda: Machine("m", (slowed_by("network", 0.5),), (Lane("a"),)), "factor must be from 1"
    ),
    "hostile lane": (lambda: Machine("m", (Device("cpu"),), (Lane("x\ny"),)), "is not a name"),
    "hostile machine": (lambda: Machine("x\ny", (Device("cpu"),), (Lane("a"),)), "is not a name"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_machine_that_cannot_exist_is_refused(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(MachineError, match=says):
        make()


@pytest.mark.parametrize("found", [None, [], {}, {"weft_machine": 2}, {"weft_machine": 1}, "x", 1])
def test_file_that_is_no_machine_is_refused(found: object, tmp_path: Path) -> None:
    with pytest.raises(MachineError):
        load(found, tmp_path)


@pytest.mark.parametrize("field", ["devices", "lanes", "links", "name"])
@pytest.mark.parametrize("value", [1, True, 1.5, "x y", {"a": 1}, [1], [None], [[]]])
def test_field_of_the_wrong_kind_is_refused(field: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(MachineError):
        load({**DATA, field: value}, tmp_path)


def test_unknown_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="more"):
        load({**DATA, "more": 1}, tmp_path)
    with pytest.raises(MachineError, match="speed"):
        load({**DATA, "devices": [{"name": "cpu", "speed": 1}]}, tmp_path)


fields = st.sampled_from(
    [(part, number, key) for part in ("devices", "lanes", "links") for number in range(2)
     for key in DATA[part][number]]
)  # fmt: skip
numbers = st.integers() | st.floats() | st.sampled_from([10**400, 1e308, 5e-324, -0.0, 0, 1e-12])
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400)
@given(st.lists(st.tuples(fields, anything), min_size=1, max_size=3))
def test_wrong_kinds_anywhere_give_a_machine_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[str, int, str], Any]]
) -> None:
    data = json.loads(json.dumps(DATA))
    for (part, number, key), value in changes:
        data[part][number][key] = value
    with suppress(MachineError):
        machine = load(data, tmp_path_factory.getbasetemp())
        simulate(PLAN, CONTEXT, machine).to_text()


@given(anything)
def test_any_data_is_a_machine_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, found: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for data in (found, {"weft_machine": 1, "devices": found, "lanes": found, "links": found}):
        with suppress(MachineError):
            load(data, folder)
