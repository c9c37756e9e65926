"""Costs: what a table says, what the formulas say, and files that are not cost tables."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchweft.errors import MachineError
from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.machine import Costs, CostTable, Device, Lane, Link, Machine, cpu
from torchweft.plan.sizes import Size
from torchweft_tools.formats.weft_files import load_costs, save_costs

S0 = Size.of("s0")
ROWS = Batch(0)
MACHINE = cpu(
    flops_per_s=100.0,
    bytes_per_s=50.0,
    network_bytes_per_s=10.0,
    network_latency_s=2.0,
    io_bytes_per_s=5.0,
    overhead_s=1.0,
)


def graph_of(op: Op, **shapes: int) -> Graph:
    """One op; a value `name=k` has s0 * k bytes."""
    values = [
        Value(name, (S0, Size.of(width)), "uint8", ROWS, alias_of="x" if name == "view" else None)
        for name, width in shapes.items()
    ]
    inputs = tuple(name for name in shapes if name not in op.makes)
    return Graph("one", tuple(values), (op,), inputs, (), "s0")


def seconds(op: Op, rows: int = 10, costs: Costs | None = None, **shapes: int) -> float:
    return (costs or Costs(MACHINE)).run_s(graph_of(op, **shapes), op, {"s0": rows})


def test_compute_takes_the_longer_of_flops_and_bytes() -> None:
    many_flops = Op("a", ("x",), ("y",), flops=S0 * 100)
    assert seconds(many_flops, x=2, y=3) == pytest.approx(1 + 10)
    assert seconds(Op("a", ("x",), ("y",), uses="memory"), x=2, y=3) == pytest.approx(1 + 1)


def test_each_root_is_touched_once_and_views_touch_nothing() -> None:
    assert seconds(Op("a", ("x",), ("y",), ("x",)), x=2, y=3) == pytest.approx(2.0)
    assert seconds(Op("a", ("x", "view"), ("y",)), x=2, view=2, y=3) == pytest.approx(2.0)
    assert seconds(Op("a", ("x",), ("view",)), x=2, view=2) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "moved"), [("all_reduce", 2), ("all_to_all", 2), ("all_gather", 8), ("send", 2)]
)
def test_network_ops_move_what_they_read_or_gather(kind: str, moved: int) -> None:
    talk = Collective(kind, "tp", peer=1 if kind == "send" else None)
    op = Op("r", ("x",), ("y",), uses="network", two_phase=True, collective=talk)
    assert seconds(op, x=2, y=8) == pytest.approx(2 + moved)
    graph = graph_of(op, x=2, y=8)
    assert Costs(MACHINE).run_s(graph, op, {"s0": 10}) == pytest.approx(2 + moved)


def test_io_and_host_overhead() -> None:
    assert seconds(Op("load", ("x",), ("y",), uses="io"), x=1, y=1) == pytest.approx(1 + 4)
    assert Costs(MACHINE).host_s() == 1.0


def test_copies_read_and_write_memory_or_cross_a_link() -> None:
    machine = Machine(
        "pair",
        (Device("cpu", bytes_per_s=50.0, overhead_s=1.0), Device("gpu0")),
        (Lane("compute"),),
        (Link("cpu", "gpu0", bytes_per_s=10.0, latency_s=3.0),),
    )
    assert Costs(machine).copy_s(100, "cpu", "cpu") == pytest.approx(1 + 4)
    assert Costs(machine).copy_s(100, "cpu", "gpu0") == pytest.approx(3 + 10)
    with pytest.raises(MachineError, match="nothing joins device 'gpu0' to 'cpu'"):
        Costs(machine).copy_s(100, "gpu0", "cpu")


def test_unknown_device_lists_the_choices() -> None:
    op = Op("a", ("x",), ("y",))
    with pytest.raises(MachineError, match=r"unknown device 'gpu7'\..*Known: cpu"):
        Costs(MACHINE).run_s(graph_of(op, x=1, y=1), op, {"s0": 1}, "gpu7")


def test_table_is_exact_at_points_linear_between_and_shaped_by_the_formula_beyond() -> None:
    op = Op("a", ("x",), ("y",), body="mlp", flops=S0 * 100)
    costs = Costs(MACHINE, CostTable.of({("mlp", "cpu"): {20: 6.0, 10: 4.0}}))
    assert seconds(op, 10, costs, x=1, y=1) == 4.0
    assert seconds(op, 15, costs, x=1, y=1) == pytest.approx(5.0)
    assert seconds(op, 40, costs, x=1, y=1) == pytest.approx(6.0 * (1 + 40) / (1 + 20))
    assert seconds(op, 5, costs, x=1, y=1) == pytest.approx(4.0 * (1 + 5) / (1 + 10))


def test_table_of_another_device_is_not_used() -> None:
    op = Op("a", ("x",), ("y",))
    costs = Costs(MACHINE, CostTable.of({("a", "gpu0"): {10: 77.0}}))
    assert seconds(op, 10, costs, x=2, y=3) == pytest.approx(2.0)


def test_a_kernel_costs_the_longer_of_network_and_the_rest_or_what_was_measured() -> None:
    ops = (
        Op("a", ("x",), ("y",), flops=S0 * 10),
        Op("b", ("y",), ("z",), flops=S0 * 10),
        Op("r", ("z",), ("w",), uses="network"),
    )
    values = tuple(Value(name, (S0,), "uint8", ROWS) for name in "xyzw")
    graph = Graph("group", values, ops, ("x",), ("w",), "s0")
    env = {"s0": 10}
    assert Costs(MACHINE).group_s(graph, ops, "fused", env) == pytest.approx(4.0)
    assert Costs(MACHINE).group_s(graph, ops[1:], "fused", env) == pytest.approx(3.0)
    measured = CostTable.of({("fused", "cpu"): {10: 0.5}})
    assert Costs(MACHINE, measured).group_s(graph, ops, "fused", env) == 0.5


tables = st.dictionaries(
    st.tuples(st.text(min_size=1, max_size=8), st.sampled_from(["cpu", "gpu0"])),
    st.dictionaries(st.integers(0, 10**9), st.floats(0, 1e6), min_size=1, max_size=4),
    max_size=4,
).map(CostTable.of)


@given(tables)
def test_tables_survive_the_disk(
    tmp_path_factory: pytest.TempPathFactory, table: CostTable
) -> None:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    save_costs(table, path)
    assert load_costs(path) == table


@given(st.dictionaries(st.integers(1, 500), st.floats(0, 9), min_size=1), st.integers(1, 999))
def test_costs_are_finite_and_between_their_neighbours(points: dict[int, float], rows: int) -> None:
    costs = Costs(MACHINE, CostTable.of({("a", "cpu"): points}))
    found = seconds(Op("a", ("x",), ("y",), flops=S0 * 7), rows, costs, x=1, y=1)
    assert 0 <= found < math.inf
    if min(points) <= rows <= max(points):
        low = max(point for point in points if point <= rows)
        high = min(point for point in points if point >= rows)
        nearby = sorted((points[low], points[high]))
        assert nearby[0] - 1e-9 <= found <= nearby[1] + 1e-9


@pytest.mark.parametrize(
    "points",
    [
        [[1, math.nan]],
        [[1, math.inf]],
        [[1, -1.0]],
        [[1, 10**400]],
        [[1, True]],
        [[1, "2"]],
        [[-1, 1.0]],
        [[1.5, 1.0]],
        [[True, 1.0]],
        [[2, 1.0], [1, 1.0]],
        [[1, 1.0], [1, 1.0]],
        [[1]],
        [],
        7,
        None,
    ],
)
def test_impossible_points_are_refused(tmp_path: Path, points: object) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"weft_costs": 1, "entries": [["a", "cpu", points]]}))
    with pytest.raises(MachineError):
        load_costs(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"weft_costs": 1, "entries": [["a", "cpu", [[1, 0.',
        "[]",
        '{"weft_costs": 2, "entries": []}',
        '{"entries": []}',
        '{"weft_costs": 1}',
        '{"weft_costs": 1, "entries": 3}',
        '{"weft_costs": 1, "entries": [["a"]]}',
        '{"weft_costs": 1, "entries": [[1, "cpu", [[1, 1.0]]]]}',
        '{"weft_costs": 1, "entries": [["a", null, [[1, 1.0]]]]}',
        '{"weft_costs": 1, "entries": [["a", "cpu", [[1, 1.0]]], ["a", "cpu", [[2, 1.0]]]]}',
        '{"weft_costs": 1, "entries": [[[], "cpu", [[1, 1.0]]]]}',
        "[" * 100_000,
        "\x00\x01",
    ],
)
def test_files_that_are_no_cost_tables_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(MachineError):
        load_costs(path)


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="there is no cost file"):
        load_costs(tmp_path / "none.json")
