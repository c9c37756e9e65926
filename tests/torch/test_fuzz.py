"""Damaged and hostile files: our error or a right result, in bounds. `bench fuzz` has more."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchweft.errors import GraphError, WeftError
from torchweft.placement.learn.policy import Policy
from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.plan import Plan
from torchweft_tools.bench import fuzz
from torchweft_tools.bench.fuzz.files import PAIR, chain, formats
from torchweft_tools.formats.read_any import read_problem
from torchweft_tools.formats.read_trees import read_trees
from torchweft_tools.formats.weft_files import (
    load_costs,
    load_graph,
    load_machine,
    load_placement,
    load_served,
    load_trace,
    served_problem,
)
from torchweft_tools.train.checkpoint import POLICY, RUN, load_run

READERS: dict[str, Callable[[Path], object]] = {
    "graph": load_graph, "plan": Plan.load, "costs": load_costs, "trace": load_trace,
    "machine": load_machine, "placement": load_placement, "served": load_served,
    "problem": read_problem, "policy": Policy.load,
}  # fmt: skip


def test_damaged_files_get_our_error_or_are_read_right() -> None:
    rows, summary = fuzz.run(num_files=12 * len(formats()), seed=3)
    assert (summary["foreign"], summary["slow"], summary["heavy"]) == ([], [], [])
    assert summary["own_error"] + summary["read"] == summary["files"]
    assert summary["read"] > 0, "some damage does no harm"
    assert all(row["own_error"] for row in rows), "no format is read whatever it says"


def test_the_bench_sees_what_is_foreign(tmp_path: Path) -> None:
    broken = fuzz.Format("broken", b"1 2", lambda path: int(path.read_text()))
    case = fuzz._judge(broken, b"x", tmp_path)
    assert case["result"] == "foreign"
    assert case["error"].startswith("ValueError")


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", READERS)
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(WeftError, match=r"not a regular file|directory"):
            READERS[name](path)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", READERS)
def test_a_file_without_end_is_not_loaded(name: str, tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    with huge.open("wb") as file:
        file.truncate(12 * 10**9)
    with pytest.raises(WeftError, match="larger than 32 MiB"):
        READERS[name](huge)


@pytest.mark.usefixtures("in_time")
def test_lists_without_end_are_refused_before_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text("[" + "[]," * 10**6 + "[]]")
    with pytest.raises(GraphError, match="more than 500000 lists"):
        load_graph(tmp_path / "graph.json")


@pytest.mark.usefixtures("in_time")
def test_long_chains_of_aliases_are_read_in_time() -> None:
    graph = chain(20_000)
    assert set(graph.root.values()) == {"v0"}
    turned = Graph("turned", graph.values[::-1], graph.ops, graph.inputs, graph.outputs)
    assert turned.root == graph.root


def test_an_alias_of_itself_is_named() -> None:
    values = (Value("a", alias_of="b"), Value("b", alias_of="c"), Value("c", alias_of="b"))
    with pytest.raises(GraphError, match="value 'a' is an alias of itself"):
        Graph("g", values, (), ("a", "b", "c"), ())
    with pytest.raises(GraphError, match="value 'a' is an alias of 'z', which does not exist"):
        Graph("g", (Value("a", alias_of="z"),), (), ("a",), ())


@pytest.mark.usefixtures("in_time")
def test_one_op_with_many_values_is_read_in_time() -> None:
    names = [f"v{number}" for number in range(20_000)]
    values = (Value("x"), *(Value(name, alias_of="x") for name in names))
    Graph("g", values, (Op("o", ("x",), tuple(names), rows="batch-free"),), ("x",), ())
    with pytest.raises(GraphError, match="several ops"):
        Graph("g", (Value("x"),), (Op("o", ("x",), rows="batch-free"),) * 20_000, ("x",), ())
    with pytest.raises(GraphError, match="unknown value"):
        wide = tuple(Value("v" * 190 + str(number)) for number in range(5000))
        Graph("g", wide, (Op("o", ("v" * 192,)),), tuple(v.name for v in wide), ())


@pytest.mark.usefixtures("in_time")
def test_trees_that_never_close_are_refused_early() -> None:
    with pytest.raises(WeftError, match="more than 20000 brackets"):
        list(read_trees("(a " * 10**5))


def damaged(name: str, folder: Path, change: Callable[[Any], None]) -> Path:
    """An example with another one of its numbers, beside the files that it needs."""
    kind = next(kind for kind in formats() if kind.name == name)
    data = json.loads(kind.data)
    change(data)
    for other, found in kind.beside:
        (folder / other).write_bytes(found)
    (folder / name).write_text(json.dumps(data))
    return folder / name


@pytest.mark.parametrize("number", [10**400, -(10**400), "9" * 1000, 1e308], ids=range(4))
def test_huge_numbers_of_a_served_file_are_our_error(number: Any, tmp_path: Path) -> None:
    def change(data: Any) -> None:
        data["graph"]["ops"][0]["flops"] = number
        data["costs"] = []

    path = damaged("served", tmp_path, change)
    with pytest.raises(WeftError):
        served_problem(load_served(path))


SETTINGS = [
    ("seed", 10**30), ("seed", -1), ("seed", 10**400), ("num_steps", -1), ("num_problems", 0),
    ("num_tries", 10**20), ("rate", 1e300), ("rate", float("nan")),
]  # fmt: skip


@pytest.mark.parametrize(("field", "number"), SETTINGS, ids=range(len(SETTINGS)))
def test_huge_numbers_of_a_training_run_are_our_error(
    field: str, number: Any, tmp_path: Path
) -> None:
    damaged(RUN, tmp_path, lambda data: data["settings"].update({field: number}))
    with pytest.raises(WeftError):
        load_run(tmp_path, ())


def test_a_run_whose_optimizer_is_of_another_policy_is_refused(tmp_path: Path) -> None:
    damaged(RUN, tmp_path, lambda data: None)
    Policy((8, 3, 2, 4)).save(tmp_path / POLICY)
    with pytest.raises(WeftError, match="does not fit the policy"):
        load_run(tmp_path, ())


def test_a_link_is_found_by_its_ends() -> None:
    assert PAIR.link("a", "b") is PAIR.links[0]
    assert PAIR.link("b", "a") is PAIR.links[1]
