"""A `Drawing`: groups as the project's own `Graph`, with where each value's rows are.

    groups --draw--> Graph (one op a group, one value a result) --planner--> Placement --> Plan

Inputs start on the home device; `answer`, the last op, runs there and reads every output, so a
plan brings them home. What a cell needs of weights is one input, resident where it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchweft.plan.graph import Graph, Op, Value
from torchweft.plan.sizes import Size
from torchweft.run.workers.cell import Spec
from torchweft.run.workers.channel import bytes_of
from torchweft.run.workers.grouping import Group

HOME = "home"
Block = tuple[Spec, int, int]  # first row, rows


@dataclass(frozen=True, eq=False)
class Drawing:
    """A graph of groups, with the groups and the blocks of rows behind its names."""

    graph: Graph
    groups: dict[str, Group]
    blocks: dict[str, Block]
    weights: frozenset[str]
    num_rows: dict[Spec, int]


def draw(
    groups: Sequence[Group],
    inputs: Mapping[str, Block],
    num_rows: dict[Spec, int],
    outputs: dict[Spec, torch.Tensor],
    weight_bytes: dict[str, int],
) -> Drawing:
    """The drawing of groups. outputs: rows, by spec, that the caller wants."""
    blocks: dict[str, Block] = {}
    owner = {spec: torch.full((count,), -1) for spec, count in num_rows.items()}
    names: list[str] = []

    def add(name: str, spec: Spec, start: int, count: int) -> Value:
        blocks[name] = spec, start, count
        owner[spec][start : start + count] = len(names)
        names.append(name)
        return Value(name, (Size.of(count * spec.num_bytes),), "uint8")

    def owners(spec: Spec, rows: torch.Tensor) -> list[str]:
        return [names[at] for at in sorted(set(owner[spec][rows].flatten().tolist()))]

    values = [add(name, *block) for name, block in inputs.items()]
    found = {f"{group.cell.name}.{at}": group for at, group in enumerate(groups)}
    makes: dict[str, list[Value]] = {}
    for name, group in found.items():
        made = zip(group.cell.makes, group.starts, strict=group.cell.kind != "unpack")
        count = group.num_rows * (len(group.cell.makes) if group.cell.kind == "unpack" else 1)
        makes[name] = [
            add(f"{name}.out{at}", spec, start, count) for at, (spec, start) in enumerate(made)
        ]
        values += makes[name]
    weights = {
        f"weights.{group.cell.name}": weight_bytes[group.cell.name]
        for group in groups
        if group.cell.weights
    }
    ops = []
    for name, group in found.items():
        reads = [f"weights.{group.cell.name}"] if group.cell.weights else []
        for spec, rows in zip(group.cell.reads, group.rows, strict=True):
            reads += owners(spec, rows)
        reads, made_here = list(dict.fromkeys(reads)), tuple(value.name for value in makes[name])
        flops = Size.of(group.cell.flops * group.num_rows)
        ops.append(
            Op(name, tuple(reads), made_here, rows="batch-free", body=body_of(group), flops=flops)
        )
    wanted = dict.fromkeys(name for spec, rows in outputs.items() for name in owners(spec, rows))
    ops.append(Op("answer", tuple(wanted), uses="io", rows="batch-free", body="answer"))
    values += [Value(name, (Size.of(size),), "uint8") for name, size in weights.items()]
    graph = Graph("dynamic", tuple(values), tuple(ops), (*inputs, *weights), tuple(wanted))
    return Drawing(graph, found, blocks, frozenset(weights), num_rows)


def body_of(group: Group) -> str:
    """The key of a group's cost: its cell, for this number of rows."""
    return f"{group.cell.name}.rows{group.num_rows}"


def structure_of(groups: Sequence[Group]) -> str:
    """A digest that is equal for equal cells on equal rows: what plans are cached by."""
    found = hashlib.sha256()
    for group in groups:
        found.update(f"{group.cell.name} {group.num_rows} {group.starts};".encode())
        found.update(bytes_of(group.rows.contiguous()))
    return found.hexdigest()[:16]
