"""The `Template`: the ops of a block, found once and stamped at each of its calls.

    subgraph --rows, units, regions--> ops, values, bodies          once for each kind of call
    layer 0 .. 63 --stamp--> the same ops and bodies under new names, weights as inputs

The ops of every layer are ordinary ops of one graph, so parts overlap across the borders of blocks.
A block that writes into what it is given, draws random numbers, or hands out something that it
has not made cannot be stamped: `BlockError`, and the model is captured without blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchweft.capture.blocks.blocks import INVOKE, BlockError
from torchweft.capture.blocks.inlining import CALLS
from torchweft.capture.blocks.twins import Twins
from torchweft.capture.bodies.bodies import Body, modes_of
from torchweft.capture.marks import Mark, MarkRule, marks_of, told_of
from torchweft.capture.ops.assembly import RNG, Assembly, value_name
from torchweft.capture.ops.peel import peel
from torchweft.capture.ops.regions import cut, settle
from torchweft.capture.ops.states import states_of
from torchweft.capture.ops.sums import sink
from torchweft.capture.ops.units import find_units, source_of, storages
from torchweft.capture.rows.axes import Axis, Symbols
from torchweft.capture.rows.rows import ORDER, Rows, find_rows, is_getitem
from torchweft.plan.graph import Op, Value


@dataclass(frozen=True)
class Template:
    """The ops of a block; `inputs` are the operands that they read, by name."""

    inputs: Mapping[str, int]
    outputs: tuple[str, ...]
    axes: tuple[Axis | None, ...]
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    bases: Mapping[str, str]
    bodies: Mapping[str, Body]
    reasons: Mapping[str, str]
    unplaced: Mapping[str, str]
    num_calls: Mapping[str, int]
    matched: frozenset[MarkRule]

    @property
    def kind(self) -> str:
        """What a split does to the block: the worst of what it does to its ops."""
        return max((op.rows for op in self.ops), key=ORDER.index, default="batch-free")

    def stamp(self, names: Mapping[str, str]) -> tuple[list[Value], list[Op]]:
        """Values and ops under the names that values have in the whole graph."""
        values = [
            replace(v, name=names[v.name], alias_of=v.alias_of and names[v.alias_of])
            for v in self.values
        ]
        ops = [
            replace(
                op,
                reads=tuple(names[name] for name in op.reads),
                makes=tuple(names[name] for name in op.makes),
                mutates=tuple(names[name] for name in op.mutates),
            )
            for op in self.ops
        ]
        return values, ops


def assemble(
    gm: fx.GraphModule,
    symbols: Symbols,
    *,
    rules: Sequence[MarkRule] = (),
    level: str = "torch",
    given: Mapping[str, Axis | None] | None = None,
    blocks: bool = False,
) -> tuple[Rows, Assembly, frozenset[MarkRule]]:
    """Cut a graph into ops by one symbol for the batch; the rules that matched."""
    marks, matched = marks_of(gm.graph, rules)
    if level == "aten" and given is not None:  # what is saved inside a mark: no one vouches for it
        marks = {n: (replace(m, rows=None), key) for n, (m, key) in marks.items()}
    declared = {n: "row-wise" for n in gm.graph.nodes if told_of(n, rules, "rows")}
    declared |= {n: m.rows for n, (m, _) in marks.items() if m.rows is not None}
    templates = Templates(gm, marks, symbols, rules) if blocks else None
    twins = Twins(gm.meta.get(CALLS, ()))
    rows = find_rows(
        gm, symbols, declared, level=level, given=given, templates=templates, twins=twins
    )
    units = find_units(gm.graph, rows, marks, states_of(gm.graph, rules))
    settle(units, rows, gm.graph)
    if given is None:  # else results are kept for the backward graph, or for the next block
        peel(units, rows, gm.graph)
    built = Assembly(gm, rows, cut(sink(units, rows), rows), units)
    built.build()
    inner = [template.matched for template in rows.blocks.values()]
    return rows, built, frozenset(matched).union(*inner)


class Templates:
    """The templates of one graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        marks: Mapping[fx.Node, tuple[Mark, object]],
        symbols: Symbols,
        rules: Sequence[MarkRule],
    ) -> None:
        self.gm, self.symbols, self.rules = gm, symbols, rules
        self.made: dict[object, Template] = {}
        modes = modes_of(gm.graph)
        keys = [key for node, (_, key) in marks.items() if not is_getitem(node)]
        for node in gm.graph.find_nodes(op="call_function", target=INVOKE):
            if modes[node] != ((), None):
                raise BlockError(f"block: {node.name} stands under a switch of torch's modes.")
            if node in marks and keys.count(marks[node][1]) > 1:
                raise BlockError(f"block: the mark {marks[node][0].name!r} spans more than one.")

    def __call__(self, node: fx.Node, rows: Rows) -> Template:
        """What one call of a block is made of. Raises `BlockError`."""
        code = self.gm.get_submodule(str(getattr(node.args[0], "target", "")))
        assert isinstance(code, fx.GraphModule), "a region is a graph"
        axes = self._axes(code, node, rows)
        key = (id(code), *axes)
        if key not in self.made:
            self.made[key] = self._make(code, axes)
        return self.made[key]

    def _axes(self, code: fx.GraphModule, node: fx.Node, rows: Rows) -> list[Axis | None]:
        """Where the rows of the operands are; they must lie as those of the first call did."""
        placeholders = [each for each in code.graph.nodes if each.op == "placeholder"]
        axes: list[Axis | None] = []
        for placeholder, operand in zip(placeholders, node.args[2:], strict=True):
            if not isinstance(operand, fx.Node):
                raise BlockError(f"block: {node.name} is given a constant.")
            wanted, found = placeholder.meta.get("example_value"), rows.value(operand)
            if self.symbols.laid(wanted) != self.symbols.laid(found):
                raise BlockError(f"block: {operand.name} is unlike what the first block got.")
            axes.append(rows.axis(found) if isinstance(found, torch.Tensor) else None)
        return axes

    def _make(self, code: fx.GraphModule, axes: Sequence[Axis | None]) -> Template:
        placeholders = [node for node in code.graph.nodes if node.op == "placeholder"]
        given = {node.name: axis for node, axis in zip(placeholders, axes, strict=True)}
        rows, built, matched = assemble(code, self.symbols, rules=self.rules, given=given)
        _require_closed(built, rows, placeholders)
        place = {node: number for number, node in enumerate(placeholders)}
        outputs = _output_nodes(built)
        return Template(
            inputs={name: place[node] for name, node in built.inputs.items()},
            outputs=tuple(value_name(node) for node in outputs),
            axes=tuple(rows.axis(rows.value(node)) for node in outputs),
            values=tuple(v for v in built.values.values() if v.name not in built.inputs),
            ops=tuple(built.ops),
            bases=dict(built.bases),
            bodies=dict(built.bodies),
            reasons=dict(built.reasons),
            unplaced=dict(built.unplaced),
            num_calls=dict(built.num_calls),
            matched=matched,
        )


def _output_nodes(built: Assembly) -> list[fx.Node]:
    args: Any = built.output.args[0]
    return [built.canonical.get(node, node) for node in args if isinstance(node, fx.Node)]


def _require_closed(built: Assembly, rows: Rows, placeholders: Sequence[fx.Node]) -> None:
    """Raise unless a block only reads what it is given, and hands out what it has made."""
    given = storages([rows.value(node) for node in placeholders])
    if any(unit.draws for unit in built.units) or RNG in built.values:
        raise BlockError("block: it draws random numbers, in an order that must be kept.")
    if any(unit.states for unit in built.units):
        raise BlockError("block: it touches side state, in an order that must be kept.")
    for unit in built.units:
        if unit.writes & given:
            raise BlockError(f"block: it writes into what it is given, at {source_of(unit.first)}.")
    if any(node.op != "placeholder" for node in built.inputs.values()):
        raise BlockError("block: it has constants of its own.")
    outputs = _output_nodes(built)
    made = {name for op in built.ops for name in op.makes}
    names = [value_name(node) for node in outputs]
    if len(names) != len(built.output.args[0]) or len(set(names)) < len(names):
        raise BlockError("block: it hands out something else than tensors, or one of them twice.")
    if not set(names) <= made:
        raise BlockError("block: it hands out what it has not made.")
    if any(value.alias_of in built.inputs for value in built.values.values()):
        raise BlockError("block: an op of it makes a view of what the block is given.")
