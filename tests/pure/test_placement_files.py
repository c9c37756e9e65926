"""Graph files of other formats: what they say, and that damaged ones get a clear error."""

from __future__ import annotations

import contextlib
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import PlacementError, WeftError
from torchweft.placement import plan
from torchweft.plan.graph import graph_data
from torchweft.plan.machine import Device, Lane, Link, Machine
from torchweft_tools.bench.oracle.exhaustive import exhaustive
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.read_any import ProblemOptions, read_problem
from torchweft_tools.formats.read_dnn import read_dnn
from torchweft_tools.formats.read_stg import read_stg
from torchweft_tools.formats.read_trees import read_trees

STG = """          4
          0          0          0
          1          9          1          0
          2          4          1          0
          3          3          2          1          2
          4          5          1          0
          5          0          2          3          4
# Standard Task Graph Set Project
"""
COSTS = """# with communication costs
    6   2
    0   3   0
    1   5   1
                0   2
    2   2   1
                0   1
    3   2   1
                0   3
    4   4   1
                0   4
    5   1   4
                1   2
                2   3
                3   1
                4   2
"""
NODE = {"supportedOnFpga": 1, "cpuLatency": 4.0, "fpgaLatency": 1.0, "size": 60.0}
DNN = {
    "maxSizePerFPGA": 100.0,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        {**NODE, "id": 7, "isBackwardNode": 0, "name": "any name: of (it)"},
        {**NODE, "id": 3, "colorClass": 5},
        {**NODE, "id": 9, "colorClass": 5, "size": 30.0},
        {**NODE, "id": 1, "supportedOnFpga": False, "fpgaLatency": 0.0},
    ],
    "edges": [
        {"sourceId": 7, "destId": 3, "cost": 0.5, "size": 1},
        {"sourceId": 7, "destId": 1, "cost": 0.5},
        {"sourceId": 3, "destId": 9, "cost": 0.25},
        {"sourceId": 9, "destId": 1, "cost": 0.25},
    ],
}
TREES = "(3 (2 It) (4 (4 (2 's) (2 good)) (2 .)))\n(ROOT\n (S (NP you)))\n"


@pytest.fixture
def write(tmp_path):
    def file(text, name="graph.txt"):
        path = tmp_path / name
        path.write_text(text if isinstance(text, str) else json.dumps(text))
        return path

    return file


def test_stg_says_times_and_predecessors(write):
    problem = read_problem(write(STG, "rand0001.stg"))
    assert problem.name == "rand0001"
    assert problem.ops == ("t0", "t1", "t2", "t3", "t4", "t5")
    assert problem.seconds[1] == (9.0, 9.0)
    assert {(edge.source, edge.target) for edge in problem.edges} == {
        (0, 1), (0, 2), (0, 4), (1, 3), (2, 3), (3, 5), (4, 5),
    }  # fmt: skip
    assert plan(problem, "heft").makespan_s == 12.0
    assert read_problem(write(STG), ProblemOptions(slowness=(1.0, 2.0, 2.0))).seconds[1] == (
        9.0,
        18.0,
        18.0,
    )


def test_stg_with_communication_costs_and_processors(write):
    problem = read_problem(write(COSTS))
    assert problem.num_devices == 2
    slow = {(edge.source, edge.target): edge.num_bytes / 2**30 for edge in problem.edges}
    assert slow[0, 4] == 4.0
    assert slow[4, 5] == 2.0
    assert problem.transfer_s(2**30 * 3, 0, 1) == 3.0


def test_stg_of_the_prototype_set_counts_from_one(write):
    text = "     2     3\n     1    14     0\n     2    20     1     1\n     3     0     1     2\n"
    problem = read_problem(write(text))
    assert problem.num_devices == 3
    assert plan(problem, "heft").makespan_s == 34.0


def test_stg_may_name_later_tasks(write):
    assert plan(read_problem(write("2\n1 3 1 2\n2 4 0\n")), "heft").makespan_s == 7.0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is unknown"),
        ("hello", "is unknown"),
        ("4\n0 0 0\n", "cut off"),
        ("2\n1 3 1 2\n2 4 1 1\n", "depends on itself"),
        ("1\n1 3 1 1\n", "itself"),
        ("1\n1 3 1 8\n", "missing"),
        ("1\n1 -3 0\n", "from 0 to 1e15"),
        ("1\n1 nan 0\n", "from 0 to 1e15"),
        ("1\n1 x 0\n", "must be numbers"),
        ("1\n1.5 3 0\n", "whole number"),
        ("1\n1 3 4 0 0\n", "must follow"),
        ("1\n1 3\n", "a count"),
        ("2\n1 3 0\n1 3 0\n", "must be unique"),
        ("1 2 3\n1 3 0\n", "first line"),
        ("999999999\n", "can be placed"),
        ("1\n1 3 2\n", "communication cost"),
        ("0\n", "can be placed"),
        ("1 0\n1 3 0\n", "1 to 256 processors"),
    ],
)
def test_a_damaged_stg_file_is_refused(write, text, why):
    with pytest.raises(PlacementError, match=why):
        read_problem(write(text))


def test_dnn_graphs_say_devices_limits_and_what_stays_together(write):
    problem = read_problem(write(DNN))
    assert problem.devices == ("cpu0", "accelerator0", "accelerator1")
    assert problem.ops == ("n7", "n3", "n9", "n1")
    assert problem.seconds == ((4.0, 1.0, 1.0),) * 3 + ((4.0, float("inf"), float("inf")),)
    assert problem.room_bytes == (float("inf"), 100.0, 100.0)
    assert problem.group[1] == (1, 2)
    half = 2**29
    assert problem.transfer_s(half, 0, 1) == 0.5
    assert problem.transfer_s(half, 1, 2) == 1.0  # through the memory of the CPUs
    best = plan(problem, exhaustive)
    # n7 on one accelerator; n3 and n9 (90 of 100 bytes) on the other, or n7 on the CPU, ...
    device_of = {op: best.devices[at] for op, at in zip(best.ops, best.device, strict=True)}
    assert device_of["n3"] == device_of["n9"]
    assert device_of["n1"] == "cpu0"
    assert best.makespan_s == 1 + 1.0 + 1 + 1 + 0.25 + 4


@pytest.mark.parametrize("text", [json.dumps(DNN), TREES, "1\n1 3 0\n"])
def test_files_of_other_systems_may_start_with_a_mark_and_end_lines_with_two_bytes(write, text):
    changed = "\ufeff" + text.replace("\n", "\r\n")
    assert read_problem(write(changed)) == read_problem(write(text))


def test_dnn_values_of_several_costs_are_several_values(write):
    data = copy.deepcopy(DNN)
    data["edges"][1]["cost"] = 3.0
    problem = read_problem(write(data))
    assert {edge.value for edge in problem.edges if edge.source == 0} == {"v.n7", "v.n7.1"}
    plan(problem, "heft")


def _without(field):
    return lambda data: data.pop(field)


def _set(part, number, field, value):
    return lambda data: data[part][number].update({field: value})


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_without("nodes"), "'nodes' is missing"),
        (_without("maxCPUs"), "'maxCPUs' is missing"),
        (lambda data: data.update(maxFPGAs=0, maxCPUs=0), "0 CPUs and 0 accelerators"),
        (lambda data: data.update(maxFPGAs=10**6), "accelerators"),
        (lambda data: data.update(nodes=[]), "0 nodes"),
        (lambda data: data.update(edges=[1]), "not an object"),
        (_set("nodes", 0, "id", 3), "must be unique"),
        (_set("nodes", 0, "id", "a"), "'id' cannot be"),
        (_set("nodes", 0, "cpuLatency", -1), "cannot be '-1'"),
        (_set("nodes", 0, "cpuLatency", float("nan")), "cannot be 'nan'"),
        (_set("nodes", 0, "supportedOnFpga", "yes"), "supportedOnFpga"),
        (_set("nodes", 0, "size", float("inf")), "cannot be 'inf'"),
        (_set("edges", 0, "sourceId", 99), "no node with the id 99"),
        (_set("edges", 0, "destId", 7), "to itself"),
        (_set("edges", 3, "destId", 7), "depends on itself"),
        (lambda data: data.update(maxCPUs=0), "no device can run op 'n1'"),
    ],
)
def test_a_damaged_dnn_file_is_refused(write, damage, why):
    data = copy.deepcopy(DNN)
    damage(data)
    with pytest.raises(PlacementError, match=why):
        read_problem(write(data))


def test_trees_are_read_one_by_one(write):
    path = write(TREES)
    problem = read_problem(path, ProblemOptions(slowness=(1.0, 2.0), ratio=0.5))
    assert problem.ops == ("leaf0", "leaf1", "leaf2", "node3", "leaf4", "node5", "node6")
    assert problem.seconds[0] == (0.4, 0.8)
    second = read_problem(path, ProblemOptions(tree=1))
    assert second.ops == ("leaf0", "node1", "node2")
    with pytest.raises(PlacementError, match="no tree number 2"):
        read_problem(path, ProblemOptions(tree=2))


def test_a_very_deep_tree_is_read():
    (tree,) = read_trees("(a " * 2000 + "word" + ")" * 2000)
    assert len(tree) == 2000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(3 (2 a) (2 b)", "not closed"),
        ("(3 (2 a))) (4 b)", "outside"),
        ("(3 ())", "empty"),
        ("(3 (2 a) word more)", "both"),
    ],
)
def test_a_damaged_tree_is_refused(write, text, why):
    with pytest.raises(PlacementError, match=why):
        read_problem(write(text))


MACHINE = Machine(
    "pair",
    (Device("cpu0", 1e9), Device("gpu0", 4e9, memory_bytes=80), Device("gpu1", 2e9)),
    tuple(Lane(name, name) for name in ("cpu0", "gpu0", "gpu1")),
    tuple(Link(a, b) for a in ("cpu0", "gpu0", "gpu1") for b in ("cpu0", "gpu0", "gpu1") if a != b),
)


def test_a_machine_takes_the_place_of_a_files_devices(write):
    problem = read_problem(write(STG), ProblemOptions(machine=MACHINE))
    assert problem.seconds[1] == (36.0, 9.0, 18.0)
    problem = read_problem(write(DNN), ProblemOptions(machine=MACHINE))
    assert problem.seconds[0] == (4.0, 1.0, 2.0)
    assert problem.room_bytes == (float("inf"), 80.0, 100.0)


def test_a_graph_of_ours_needs_a_machine(write):
    path = write(graph_data(transformer(1, 64, tensor_parallel=False)), "g.json")
    with pytest.raises(PlacementError, match="give --machine"):
        read_problem(path)
    assert read_problem(path, ProblemOptions(machine=MACHINE)).num_ops == 3


@settings(max_examples=200)
@given(st.text(alphabet="0123456789 \n#.-(ab)", max_size=80))
def test_any_text_is_read_or_refused(text):
    for reader in (lambda: read_stg(text, "a"), lambda: list(read_trees(text))):
        with contextlib.suppress(WeftError):
            reader()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200)
@given(st.data())
def test_a_dnn_file_with_any_damage_is_read_or_refused(data):
    found = copy.deepcopy(DNN)
    part = data.draw(st.sampled_from([found, *found["nodes"], *found["edges"]]))
    part[data.draw(st.sampled_from(sorted(part)))] = data.draw(json_values)
    with contextlib.suppress(WeftError):
        read_dnn(found, "a")
