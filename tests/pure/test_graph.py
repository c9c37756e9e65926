"""Graphs and graph files: what contradicts itself or is no graph is refused by name."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchweft.errors import GraphError
from torchweft.files import MAX_BYTES
from torchweft.plan.graph import Batch, Collective, Graph, Op, Value, graph_data
from torchweft.plan.sizes import Size
from torchweft_tools.demo.blueprint import transformer
from torchweft_tools.formats.weft_files import load_graph, read_graph, save_graph

GRAPH = transformer(2, kv_cache=True)
DATA: dict[str, Any] = json.loads(json.dumps(graph_data(GRAPH)))
HOSTILE = "x\n__import__('os')"
BATCH = Batch(0)


def row(name: str, **facts: Any) -> Value:
    return Value(name, (Size.of("s0"), Size.of(4)), **{"batch": BATCH, **facts})


def graph(*ops: Op, values: tuple[Value, ...] = (), outputs: tuple[str, ...] = ("y",)) -> Graph:
    return Graph("tiny", (row("x"), *(values or (row("y"),))), ops, ("x",), outputs, "s0")


def test_graph_file_reads_back(tmp_path: Path) -> None:
    save_graph(GRAPH, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == GRAPH
    assert load_graph(tmp_path / "graph.json").digest == GRAPH.digest


def test_any_change_changes_the_digest() -> None:
    digests = {GRAPH.digest}
    for path in places(DATA):
        old = at(DATA, path)
        if isinstance(old, str | bool) and path[-1] not in ("weft_graph", "name", "level", "batch"):
            with suppress(GraphError):
                new = not old if isinstance(old, bool) else f"{old}0"
                changed = read_graph(put(DATA, path, new))
                assert changed.digest not in digests, path
                digests.add(changed.digest)
    assert len(digests) > 20


def test_equal_layers_share_one_structure() -> None:
    assert GRAPH.structure["attn0"] == GRAPH.structure["attn1"] != GRAPH.structure["mlp0"]


def test_graph_prints_as_numbered_text() -> None:
    lines = str(GRAPH).splitlines()
    assert lines[0].startswith(f"graph transformer2 {GRAPH.digest}")
    assert [line.split()[0] for line in lines if " #" in line] == [str(n) for n in range(9)]
    assert any("mutates kv0" in line for line in lines)
    assert any("all_reduce@tp two-phase" in line for line in lines)


WRONG: dict[str, tuple[Any, str]] = {
    "unknown read": (lambda: graph(Op("f", ("z",), ("y",))), "unknown value 'z'"),
    "unknown made": (lambda: graph(Op("f", ("x",), ("z",))), "unknown value 'z'"),
    "made twice": (lambda: graph(Op("f", ("x",), ("y",)), Op("g", ("x",), ("y",))), "second time"),
    "read too early": (
        lambda: graph(
            Op("f", ("b",), ("y",)), Op("g", ("x",), ("b",)), values=(row("y"), row("b"))
        ),
        "before anything makes it",
    ),
    "two ops": (lambda: graph(Op("f", ("x",), ("y",)), Op("f", ("x",))), "named 'f'"),
    "two values": (
        lambda: graph(Op("f", ("x",), ("y",)), values=(row("y"), row("y"))), "named 'y'"
    ),
    "no maker": (lambda: graph(Op("f", ("x",), ())), "no op makes 'y'"),
    "orphan": (lambda: graph(Op("f", ("x",), ("y",)), values=(row("y"), row("z"))), "'z'"),
    "uses": (lambda: graph(Op("f", ("x",), ("y",), uses="magic")), "Known: compute, io, memory"),
    "rows": (lambda: graph(Op("f", ("x",), ("y",), rows="rowwise")), "Did you mean 'row-wise'"),
    "dtype": (
        lambda: graph(Op("f", ("x",), ("y",)), values=(row("y", dtype="float31"),)),
        "Did you mean 'float32'",
    ),
    "alias of nothing": (
        lambda: graph(Op("f", ("x",), ("y",)), values=(row("y", alias_of="z"),)), "'z'"
    ),
    "alias of itself": (
        lambda: graph(Op("f", ("x",), ("y",)), values=(row("y", alias_of="y"),)), "itself"
    ),
    "batch dim": (
        lambda: graph(Op("f", ("x",), ("y",)), values=(row("y", batch=Batch(5)),)), "no dim 5"
    ),
    "row-wise without a batch": (
        lambda: graph(Op("f", ("x",), ("y",)), values=(row("y", batch=None),)), "mixing"
    ),
    "batch-free with a batch": (
        lambda: graph(Op("f", ("x",), ("y",), rows="batch-free")), "batch-free but touches 'x'"
    ),
    "send to nobody": (
        lambda: graph(Op("f", ("x",), ("y",), collective=Collective("send", "tp"))), "peer"
    ),
    "hostile op": (lambda: graph(Op(HOSTILE, ("x",), ("y",))), r"op \"x\\n__import__"),
    "hostile value": (lambda: graph(Op("f", ("x",), (HOSTILE,)), values=(row(HOSTILE),)), "value"),
    "hostile mark": (lambda: graph(Op("f", ("x",), ("y",), mark=HOSTILE)), "mark"),
    "hostile kind": (
        lambda: graph(Op("f", ("x",), ("y",), collective=Collective(HOSTILE, "tp"))), "collective"
    ),
    "hostile communicator": (
        lambda: graph(Op("f", ("x",), ("y",), collective=Collective("all_reduce", HOSTILE))),
        "communicator",
    ),
    "hostile tag": (
        lambda: graph(Op("f", ("x",), ("y",), collective=Collective("send", "tp", 1, HOSTILE))),
        "tag",
    ),
    "hostile batch": (
        lambda: Graph("g", (row("x"),), (), ("x",), ("x",), HOSTILE), "batch"
    ),
    "hostile graph": (lambda: Graph(HOSTILE, (), (), (), ()), "graph"),
    "endless name": (lambda: graph(Op("f" * 201, ("x",), ("y",))), "200"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_graph_that_contradicts_itself_is_refused(name: str) -> None:
    make, says = WRONG[name]
    with pytest.raises(GraphError, match=says):
        make()


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (b"", "cut off"),
        (b"{", "cut off"),
        (b"[]", "'weft_graph' is missing"),
        (b"{}", "'weft_graph' is missing"),
        (b'{"weft_graph": 2}', "this torchweft reads"),
        (b'{"weft_graph": 1}', "'name' is missing"),
        (b'{"weft_graph": 1, "name": "g", "values": [], "ops": [], "more": 1}', "field 'more'"),
        (b"\xff\xfe", "is not text"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"weft_graph": ' + b"9" * 5000 + b"}", "file"),
    ],
)
def test_file_that_is_no_graph_says_why(found: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(found)
    with pytest.raises(GraphError, match=says):
        load_graph(path)


def test_graph_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "graph.json", json.dumps(DATA)
    for number in range(0, len(text), 7):
        path.write_text(text[:number])
        with pytest.raises(GraphError, match="cut off"):
            load_graph(path)


def test_huge_graph_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "graph.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(GraphError, match="larger than 32 MiB"):
        load_graph(tmp_path / "graph.json")


def test_field_of_the_wrong_kind_is_named() -> None:
    for path in places(DATA):
        if path and isinstance(path[-1], str) and path[-1] not in ("weft_graph", "communicators"):
            with pytest.raises(GraphError, match=path[-1]):
                read_graph(put(DATA, path, 1.5))


Path_ = tuple[str | int, ...]


def places(found: Any, before: Path_ = ()) -> list[Path_]:
    """The way to every value inside nested data."""
    inner: Any = ()
    if isinstance(found, dict | list):
        inner = found.items() if isinstance(found, dict) else enumerate(found)
    return [before, *(path for key, value in inner for path in places(value, (*before, key)))]


def at(found: Any, path: Path_) -> Any:
    for key in path:
        found = found[key]
    return found


def put(found: Any, path: Path_, value: Any) -> Any:
    """A copy of nested data with one value exchanged."""
    if not path:
        return value
    copy = dict(found) if isinstance(found, dict) else list(found)
    copy[path[0]] = put(found[path[0]], path[1:], value)
    return copy


PLACES = places(DATA)
texts = st.sampled_from(["", "x", HOSTILE, "\ud800", "s0", "4 // 0", "9" * 5000, "tp"]) | st.text()
numbers = st.integers() | st.floats() | st.just(10**400)
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(PLACES), anything), min_size=1, max_size=3))
def test_wrong_kinds_anywhere_give_a_graph_or_our_error(changes: list[tuple[Path_, Any]]) -> None:
    data: Any = DATA
    for path, value in changes:
        with suppress(KeyError, IndexError, TypeError):
            data = put(data, path, value)
    with suppress(GraphError):
        found = read_graph(data)
        assert len(str(found).splitlines()) == 2 + len(found.inputs) + len(found.ops)
        assert len(found.digest) == 16 and set(found.structure) == set(found.op)


@given(anything)
def test_any_data_is_a_graph_or_our_error(found: Any) -> None:
    with suppress(GraphError):
        read_graph(found)
    with suppress(GraphError):
        read_graph({"weft_graph": 1, "name": "g", "values": found, "ops": found})


TEXT = json.dumps(DATA)


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(TEXT) - 1), st.integers(0, 255)), max_size=4))
def test_flipped_bytes_give_a_graph_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    letters = bytearray(TEXT.encode())
    for number, byte in changes:
        letters[number] = byte
    path = tmp_path_factory.getbasetemp() / "flipped.json"
    path.write_bytes(letters)
    with suppress(GraphError):
        found = load_graph(path)
        assert read_graph(json.loads(json.dumps(graph_data(found)))) == found
