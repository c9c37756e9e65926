"""The graph file: a `Graph` as JSON data.

    Graph --graph_data--> dict --read_graph--> Graph       save_graph, load_graph: the same on disk

Loading never executes anything; a field that is missing, unknown or of the wrong kind is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchweft.errors import GraphError, SizeError, clip
from torchweft.files import Reader, Take, read_item, read_json, write_json
from torchweft.plan.graph import Batch, Collective, Graph, Op, Value, check_name
from torchweft.plan.sizes import Size

VERSION = 1


def graph_data(graph: Graph) -> dict[str, object]:
    """The graph as plain data; fields that have their default value are left out."""
    return {
        "weft_graph": VERSION,
        "name": graph.name,
        "batch": graph.batch,
        "level": graph.level,
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "communicators": {name: list(ranks) for name, ranks in graph.communicators},
        "values": [_plain(value) for value in graph.values],
        "ops": [_plain(op) for op in graph.ops],
    }


def _plain(item: Any) -> dict[str, object]:
    data: dict[str, object] = {}
    for spec in fields(item):
        value = getattr(item, spec.name)
        if spec.name == "name" or value != spec.default:
            data[spec.name] = _plain_field(value)
    return data


def _plain_field(value: Any) -> object:
    if isinstance(value, Size):
        return str(value)
    if isinstance(value, tuple):
        return [_plain_field(item) for item in value]
    if isinstance(value, Batch | Collective):
        return {spec.name: _plain_field(getattr(value, spec.name)) for spec in fields(value)}
    return value


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write the graph as a JSON file."""
    write_json(path, graph_data(graph))


def load_graph(path: str | Path) -> Graph:
    """Read a graph file. Raises `GraphError` for a file that is not one."""
    return read_graph(read_json(path, GraphError, "graph"))


def read_graph(data: object) -> Graph:
    """A graph from plain data. Raises `GraphError` naming the field that is wrong."""
    if not isinstance(data, dict) or "weft_graph" not in data:
        raise GraphError("file: this is not a graph: the field 'weft_graph' is missing.")
    if data["weft_graph"] != VERSION:
        raise GraphError(
            f"version: graph format {clip(data['weft_graph'])}; this torchweft reads {VERSION}."
        )
    read = Reader(data, GraphError, "graph")
    graph = Graph(
        name=read.take("name", str),
        batch=read.take("batch", str, None),
        level=read.take("level", str, "none"),
        inputs=read.names("inputs"),
        outputs=read.names("outputs"),
        communicators=_read_communicators(read.take("communicators", dict, {})),
        values=tuple(_item(Value, item) for item in read.take("values", list)),
        ops=tuple(_item(Op, item) for item in read.take("ops", list)),
    )
    read.done("weft_graph")
    return graph


def _read_communicators(data: Mapping[str, object]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    groups = []
    for name, ranks in data.items():
        if not isinstance(ranks, list) or any(type(rank) is not int or rank < 0 for rank in ranks):
            text = f"communicator {clip(name)}: ranks must be whole numbers, from 0 on"
            raise GraphError(f"file: {text}; got {clip(ranks)}.")
        groups.append((check_name(name, "communicator"), tuple(ranks)))
    return tuple(groups)


def _size(read: Reader, name: str, default: Size) -> Size:
    value = read.take(name, (str, int), None)
    return default if value is None else _as_size(read, value)


def _sizes(read: Reader, name: str, default: tuple[Size, ...]) -> tuple[Size, ...]:
    return tuple(_as_size(read, dim) for dim in read.take(name, list, list(default)))


def _as_size(read: Reader, value: object) -> Size:
    try:
        if isinstance(value, str | int):
            return Size.of(value)
    except SizeError as error:
        raise read.fail(str(error)) from None
    raise read.fail(f"{clip(value)} is not a size.")


def _nested(kind: type, read: Reader, name: str, default: None) -> Any:
    data = read.take(name, dict, default)
    return None if data is None else _item(kind, data)


def _item(kind: type, data: object) -> Any:
    """A value or op, or what is nested in one."""
    return read_item(kind, data, GraphError, TAKES)


TAKES: Mapping[str, Take] = MappingProxyType(
    {
        "Size": _size,
        "tuple[Size, ...]": _sizes,
        "Batch | None": partial(_nested, Batch),
        "Collective | None": partial(_nested, Collective),
    }
)
"""How the fields of a graph's items are taken that are not plain, by their types."""
