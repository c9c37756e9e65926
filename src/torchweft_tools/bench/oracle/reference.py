"""The `OracleReference`: which version of every cell each op must see, by program order.

The ops run one by one, each over parts 0, 1, ...; a cell of a root starts at version 0 and every
mutation raises it. An additive value of n parts starts at -n and is complete at 0.

    instance = (op name, part)        part None: an op that runs once, over all parts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchweft.plan.graph import Graph, Op


class OracleSpot(NamedTuple):
    """One cell of a root."""

    root: str
    cell: int


Instance = tuple[str, int | None]


@dataclass(frozen=True)
class OracleReference:
    """What each instance must see, and what every cell has come to in the end."""

    graph: Graph
    num_parts: int
    needs: dict[Instance, dict[OracleSpot, int]]
    final: dict[OracleSpot, int]

    def parts_of(self, name: str) -> list[int | None]:
        """The parts a value falls into; [None] if it has no batch."""
        return parts_of(self.graph, self.num_parts, name)

    def spots(self, name: str, part: int | None) -> list[OracleSpot]:
        """The cells that a part of a value (None: the whole) has."""
        return spots(self.graph, self.num_parts, name, part)


def parts_of(graph: Graph, num_parts: int, name: str) -> list[int | None]:
    """The parts a value falls into; [None] if it has no batch."""
    return list(range(num_parts)) if graph.value[name].batch is not None else [None]


def spots(graph: Graph, num_parts: int, name: str, part: int | None) -> list[OracleSpot]:
    """The cells of its root that a part of a value (None: the whole) has."""
    root = graph.root[name]
    if graph.value[root].batch is None:
        return [OracleSpot(root, 0)]
    if part is None or graph.value[name].batch is None:
        return [OracleSpot(root, cell) for cell in range(num_parts)]
    return [OracleSpot(root, part)]


def instances(op: Op, num_parts: int) -> Iterator[Instance]:
    """An op once for each part, or once."""
    if op.whole:
        yield op.name, None
    else:
        for part in range(num_parts):
            yield op.name, part


def follow(graph: Graph, num_parts: int) -> OracleReference:
    """Run the graph in program order and write down every version."""
    version = {spot: 0 for name in graph.inputs for spot in spots(graph, num_parts, name, None)}
    needs: dict[Instance, dict[OracleSpot, int]] = {}
    for op in graph.ops:
        made = [name for name in op.makes if graph.value[name].alias_of is None]
        for name, part in instances(op, num_parts):
            touched = {
                spot
                for value in op.reads + op.mutates
                for spot in spots(graph, num_parts, value, part)
            }
            needs[name, part] = {spot: version[spot] for spot in touched}
            changed = {
                spot for value in op.mutates for spot in spots(graph, num_parts, value, part)
            }
            for spot in changed:
                version[spot] += 1
            for value in made:
                for spot in spots(graph, num_parts, value, part):
                    if op.rows == "additive":
                        version[spot] = -num_parts + 1 + (part or 0)
                    else:
                        version[spot] = 0
    return OracleReference(graph, num_parts, needs, version)
