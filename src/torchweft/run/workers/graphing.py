"""A `Drawing`: groups as the project's own `Graph`, with where each value's rows are.

    Load (groups, inputs, rows wanted) --draw--> Graph (one op a group, one value a result) --> Plan

Inputs start on the home device; `answer`, the last op, runs there and reads every output, so a
plan brings them home. What a cell needs of weights is one input, resident where it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.sizes import Size
from torchweft.run.workers.cell import Spec
from torchweft.run.workers.channel import bytes_of
from torchweft.run.workers.grouping import Block, Group
from torchweft.run.workers.store import RowStore

HOME = "home"


@dataclass(frozen=True, eq=False)
class Load:
    """What is to run: groups, the blocks of rows that are there, and the rows wanted, by spec.
    The store has the rows of these blocks, and gets those wanted."""

    groups: list[Group]
    inputs: dict[str, Block]
    outputs: dict[Spec, Tensor]
    num_rows: dict[Spec, int]
    store: RowStore

    def rows(self, name: str) -> Tensor:
        """The rows of an input."""
        spec, start, count = self.inputs[name]
        return self.store.rows[spec][start : start + count]

    @cached_property
    def structure(self) -> tuple[object, ...]:
        """Equal for loads that one plan can serve: equal cells on equal rows, for equal outputs."""
        groups = tuple([(group.cell, group.num_rows, group.starts) for group in self.groups])
        read = [group.rows.reshape(-1) for group in self.groups]
        digest = hashlib.sha256(bytes_of(torch.cat([*read, *self.outputs.values()]))).digest()
        sizes = tuple((spec, len(rows)) for spec, rows in self.outputs.items())
        facts = groups, sizes, tuple(self.inputs.items()), tuple(self.num_rows.items())
        return *facts, digest


@dataclass(frozen=True, eq=False)
class Drawing:
    """A graph of groups, with the groups and the blocks of rows behind its names."""

    graph: Graph
    groups: dict[str, Group]
    blocks: dict[str, Block]
    weights: frozenset[str]
    num_rows: dict[Spec, int]


def draw(load: Load, weights: Mapping[str, Tensor]) -> Drawing:
    """The drawing of a load; `weights`: all that its cells may need, by name."""
    blocks: dict[str, Block] = {}
    owner = {spec: torch.full((count,), -1) for spec, count in load.num_rows.items()}
    names: list[str] = []

    def add(name: str, spec: Spec, start: int, count: int) -> Value:
        blocks[name] = spec, start, count
        owner[spec][start : start + count] = len(names)
        names.append(name)
        return Value(name, (Size.of(count * spec.num_bytes),), "uint8")

    def owners(spec: Spec, rows: Tensor) -> list[str]:
        return [names[at] for at in sorted(set(owner[spec][rows].flatten().tolist()))]

    values = [add(name, *block) for name, block in load.inputs.items()]
    groups = {f"{group.cell.name}.{at}": group for at, group in enumerate(load.groups)}
    makes: dict[str, list[Value]] = {}
    resident: dict[str, int] = {}  # bytes
    for name, group in groups.items():
        makes[name] = [add(f"{name}.out{at}", *block) for at, block in enumerate(group.results)]
        values += makes[name]
        if group.cell.weights:
            sizes = [weights[each].nbytes for each in dict.fromkeys(group.cell.weights)]
            resident[f"weights.{group.cell.name}"] = sum(sizes)
    ops = []
    for name, group in groups.items():
        reads = [f"weights.{group.cell.name}"] if group.cell.weights else []
        for spec, rows in zip(group.cell.reads, group.rows, strict=True):
            reads += owners(spec, rows)
        reads, made_here = list(dict.fromkeys(reads)), tuple(value.name for value in makes[name])
        ops.append(Op(name, tuple(reads), made_here, rows="batch-free", body=body_of(group)))
    wanted = dict.fromkeys(
        name for spec, rows in load.outputs.items() for name in owners(spec, rows)
    )
    ops.append(Op("answer", tuple(wanted), uses="io", rows="batch-free", body="answer"))
    values += [Value(name, (Size.of(size),), "uint8") for name, size in resident.items()]
    graph = Graph("dynamic", tuple(values), tuple(ops), (*load.inputs, *resident), tuple(wanted))
    return Drawing(graph, groups, blocks, frozenset(resident), load.num_rows)


def body_of(group: Group) -> str:
    """The key of a group's cost: its cell, for this number of rows."""
    return f"{group.cell.name}.rows{group.num_rows}"
