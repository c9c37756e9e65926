"""The assembly of a `Graph`: regions become ops, what passes between them becomes values.

Here aliases and mutations get their names. Bytes are told apart by the storages of the fake
tensors. An alias is worth a word only if somebody could notice: its bytes are written somewhere,
belong to an input, or are handed out twice.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx

from torchweft.capture.blocks.blocks import CALLS, Twins
from torchweft.capture.bodies.bodies import Body, BodyWriter, modes_of
from torchweft.capture.bodies.outs import Makers, into_of
from torchweft.capture.guards import unit_of
from torchweft.capture.marks import MarkRule, marks_of, target_name, told_of
from torchweft.capture.ops.collectives import collective_of, dead_inputs, two_phases
from torchweft.capture.ops.names import OpNames, Origin, Origins, stack_of
from torchweft.capture.ops.regions import Region, cut, peel, settle, sink
from torchweft.capture.ops.units import (
    PIECE,
    Unit,
    asserts,
    find_units,
    is_work,
    source_of,
    states_of,
    storages,
)
from torchweft.capture.rows.axes import SYMBOLIC, Axis, Order, Symbols, order_of, size_of
from torchweft.capture.rows.rows import Rows, find_rows
from torchweft.errors import SizeError
from torchweft.plan.deals import beside
from torchweft.plan.graph import ITEM_BYTES, Op, Value
from torchweft.plan.sizes import ONE, ZERO, Size
from torchweft.private.core import OpOverload

RNG = "random.state"


class Assembly:
    """The pieces of a graph under construction."""

    def __init__(
        self,
        gm: fx.GraphModule,
        rows: Rows,
        regions: list[Region],
        units: list[Unit],
        writes_by: str | None,
    ) -> None:
        self.gm, self.rows, self.regions, self.units = gm, rows, regions, units
        self.writes_by = writes_by
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.bodies: dict[str, Body] = {}
        self.codes: dict[str, fx.GraphModule] = {}
        self.reasons: dict[str, str] = {}
        self.unplaced: dict[str, str] = {}
        self.num_calls: dict[str, int] = {}
        self.regions_of: dict[str, Region] = {}
        self.inputs: dict[str, fx.Node] = {}
        self.given: set[int] = set()
        self.two_phases = cache(two_phases)
        graph = gm.graph
        self.modes = modes_of(graph)
        self.origins = Origins(map(stack_of, graph.nodes))
        self.names = OpNames(self.origins.paths)
        self.cheap = {node for unit in units if unit.cheap for node in unit.nodes}
        self.canonical = _canonical(graph, rows)
        self.output = graph.output_node()
        self.outputs = list(
            dict.fromkeys(self.canonical[node] for node in self.output.all_input_nodes)
        )
        self.written = set[int]().union(*(unit.writes for unit in units))
        self.dead = dead_inputs(graph, rows, regions, self.cheap)

    def build(self) -> None:
        """Fill in values, ops and bodies, region by region."""
        writers = [BodyWriter(self) for _ in self.regions]
        for region, writer in zip(self.regions, writers, strict=True):
            writer.write(region.calls)
        wanted = {node for writer in writers for node in writer.reads}
        wanted.update(self.outputs)
        self._make_inputs(wanted)
        made: list[tuple[Op, Region, BodyWriter, list[fx.Node]]] = []
        for region, writer in zip(self.regions, writers, strict=True):
            makes = [n for n in region.calls if n in wanted and self.canonical[n] is n]
            acts = region.collective or region.states or any(map(asserts, region.calls))
            if makes or acts or self._written_by(region, writer):
                self._make_op(region, writer, makes)
                made.append((self.ops[-1], region, writer, makes))
        self._place(made)

    def undealt(self) -> str:
        """Why rows cannot be dealt out: a dealt value is needed whole; empty if none is."""
        dealt = {name for name, v in self.values.items() if v.batch is not None and v.batch.deal}
        for op in self.ops:
            if op.rows != "row-wise" and dealt.intersection((*op.touched, *op.makes)):
                why = f" ({self.reasons[op.name]})" if op.name in self.reasons else ""
                return f"op {op.name!r} needs the shares of the whole batch{why}"
        if handed := sorted(dealt.intersection(map(value_name, self.outputs))):
            return f"{handed[0]} is handed out, as the share of the whole batch"
        _, why = beside(self.ops, self.values, self._draws)
        return why

    def _draws(self, op: Op) -> bool:
        return any(unit.draws for unit in self.regions_of[op.name].units)

    def is_copied(self, node: fx.Node) -> bool:
        """Whether each op computes this node for itself: sizes, and cheap batch-free calls."""
        if node in self.cheap:
            return True
        call = self.rows.calls[node]
        if node.op == "placeholder":
            return isinstance(call.value, SYMBOLIC)
        return node.op not in ("get_attr", "output") and not is_work(self.rows, node)

    def _make_inputs(self, wanted: set[fx.Node]) -> None:
        owner: dict[int, str] = {}
        for node in self.gm.graph.nodes:
            given = node.op in ("placeholder", "get_attr")
            if not given or node not in wanted or self.is_copied(node):
                continue
            value = self._value(node)
            self.inputs[value.name] = node
            numbers = storages(self.rows.value(node))
            self.given |= numbers
            for number in numbers & self.written:
                if number in owner:
                    value = replace(value, alias_of=owner[number])
                owner.setdefault(number, value.name)
            self.values[value.name] = value
        beside = [name for region in self.regions for name in region.states]
        if sum(unit.draws for unit in self.units) > 1:  # an order between draws no data shows
            beside.insert(0, RNG)
        self.values.update({name: Value(name, (), "opaque") for name in beside})

    def _value(self, node: fx.Node) -> Value:
        tensor = self.rows.value(node)
        opaque = Value(value_name(node), (), "opaque")
        dtype = str(getattr(tensor, "dtype", "opaque")).removeprefix("torch.")
        if not isinstance(tensor, torch.Tensor) or dtype not in ITEM_BYTES:
            return opaque
        exprs = self.rows.symbols.shape(tensor)
        if not all(expr.free_symbols <= self.rows.bound for expr in exprs):
            return opaque
        axis, batch = self.rows.axis(tensor), None
        try:
            shape = tuple(size_of(expr) for expr in exprs)
        except SizeError:
            return opaque
        with contextlib.suppress(SizeError):
            batch = axis.batch() if axis is not None else None
        return Value(opaque.name, shape, dtype, batch)

    def _written_by(self, region: Region, writer: BodyWriter) -> tuple[str, ...]:
        """The values from outside that a region writes into."""
        value = self.rows.value
        return tuple(value_name(n) for n in writer.reads if storages(value(n)) & region.writes)

    def _make_op(self, region: Region, writer: BodyWriter, makes: list[fx.Node]) -> None:
        reads = list(writer.reads)
        made = {node: self._value(node) for node in makes}
        self._alias(region, reads, made)
        mutates = self._written_by(region, writer)
        kind, reason = self._kind(region, reads, made, mutates)
        touched = [*(self.values[value_name(node)] for node in reads), *made.values()]
        if region.mark and region.mark.rows and any(v.batch is not None for v in touched):
            kind = region.mark.rows  # what is declared of rows says nothing of a call without any
        origin = self.origins.of(
            [(stack_of(n), self.rows.calls[n].flops != 0) for n in region.calls]
        )
        pieces = [p for n in region.calls if (p := n.meta.get(PIECE))]
        name = self.names.make(".".join([self._base(region, origin), *pieces[:1]]))
        self.regions_of[name] = region
        code, sizes, key = writer.finish(makes, self.codes)
        talks = region.collective is not None
        mine = id(region) in self.dead
        issue, complete = self.two_phases(code, mine=mine) if talks else (None, None)
        body = Body(
            key,
            code,
            sizes,
            writer.switches_grad,
            issue,
            complete,
            graph=region.mark is None or region.mark.graph,
            examples=tuple(self.rows.value(node) for node in reads),
            orders=tuple(_order(self.rows.value(node)) for node in makes),
            inner=region.mark.inner if region.mark else None,
        )
        draws = any(unit.draws for unit in region.units) and RNG in self.values
        self.values.update({value.name: value for value in made.values()})
        self.bodies[name] = body
        self.num_calls[name] = len(region.calls)
        self.ops.append(
            Op(
                name,
                reads=tuple(value_name(node) for node in reads),
                makes=tuple(value.name for value in made.values()),
                mutates=(*mutates, *((RNG,) if draws else ()), *sorted(region.states)),
                uses=(region.mark and region.mark.uses)
                or ("network" if region.collective else "compute"),
                rows=kind,
                two_phase=talks,
                collective=collective_of(region.collective),
                mark=region.mark.name if region.mark else None,
                body=key,
                flops=self._flops(region),
                source=source_of(region.units[0].nodes[0]),
                path=origin.path,
                layer=origin.layer,
                block=origin.block,
            )
        )
        if kind not in ("row-wise", "batch-free"):
            self.reasons[name] = reason or self._reason(region)

    def _place(self, made: list[tuple[Op, Region, BodyWriter, list[fx.Node]]]) -> None:
        """Say which values that are needed whole are written by their parts where they belong."""
        live = torch.is_grad_enabled() and self.rows.level == "torch"  # `out=` has no gradient
        refused = "gradients are on" if live else "" if self.writes_by else "zero_copy is off"
        whole = {name for op in self.ops if op.whole for name in op.touched}
        whole |= set(map(value_name, self.outputs))
        makers = Makers(self.gm.graph, self.rows, self.units)
        for op, region, writer, makes in made:
            roots = [node for node in makes if self.values[value_name(node)].alias_of is None]
            wanted = [node for node in roots if value_name(node) in whole]
            if op.rows != "row-wise" or op.collective is not None or not wanted:
                continue
            if refused:
                self.unplaced |= {value_name(node): refused for node in wanted}
                continue
            inner = self.bodies[op.name].inner or self.writes_by or ""
            if op.flops == ZERO:  # eager's form will do: memory is its bound anyway
                inner = "eager"
            into, reasons = into_of(writer, makers, region.calls, makes, wanted, inner)
            self.unplaced |= {value_name(node): why for node, why in reasons.items()}
            if into is None:
                continue
            self.bodies[op.name] = replace(self.bodies[op.name], into=into)
            for number in into.placed:
                name = op.makes[number]
                self.values[name] = replace(self.values[name], placeable=True)

    def _alias(self, region: Region, reads: list[fx.Node], made: dict[fx.Node, Value]) -> None:
        """Name the value whose bytes each make shares, where that could be noticed."""
        for node in made:
            number = next(iter(storages(self.rows.value(node))), None)
            twice = sum(number in storages(self.rows.value(out)) for out in self.outputs) > 1
            if number is None or not (number in self.written | self.given or twice):
                continue
            earlier = [*reads, *list(made)[: list(made).index(node)]]
            shown = [other for other in earlier if number in storages(self.rows.value(other))]
            if shown:
                made[node] = replace(made[node], alias_of=value_name(shown[0]))

    def _kind(
        self,
        region: Region,
        reads: list[fx.Node],
        made: Mapping[fx.Node, Value],
        mutates: tuple[str, ...],
    ) -> tuple[str, str]:
        """The kind of the op; some that are row-wise by their calls must run whole all the same."""
        touched = [self.values[value_name(node)] for node in reads]
        batched = [value for value in [*touched, *made.values()] if value.batch is not None]
        if region.kind == "batch-free" and batched:
            return "mixing", "it touches the batch although it needs no row of it"
        if region.kind == "additive" and (
            mutates or any(v.batch is not None or v.alias_of is not None for v in made.values())
        ):
            return "mixing", "its sums over rows cannot stand alone"
        if region.kind != "row-wise":
            return region.kind, ""
        if not batched:
            return "batch-free", ""
        if any(value.batch is None for value in made.values()):
            return "mixing", "a value that it makes has no rows"
        outputs = set(map(value_name, self.outputs))
        for value in made.values():
            if value.alias_of is not None and (
                value.name in outputs or value.alias_of not in self.inputs
            ):
                return "mixing", f"{value.name} shares bytes with {value.alias_of}"
        # A part must be a view of the whole; what a collective works on may have gaps: it reduces a
        # piece without any, and copies that back.
        given = region.collective.args[0] if region.collective is not None else None
        gaps = isinstance(given, fx.Node) and self.canonical[given] in reads
        for name in mutates:
            batch, shape = self.values[name].batch, self.values[name].shape
            ahead = () if gaps or batch is None else shape[: batch.dim]
            if batch is None or batch.outer != ONE or set(ahead) - {ONE}:
                return "mixing", f"it writes into {name}, whose rows do not lie one after another"
        return "row-wise", ""

    def _reason(self, region: Region) -> str:
        unit = region.reason
        others = sum(other.kind == region.kind for other in region.units) - 1
        more = f" (and {others} more)" if others else ""
        where = source_of(unit.cause)
        text = f"{target_name(unit.cause)}: {unit.reason}{more}"
        return f"{text}, at {where}" if where else text

    def _flops(self, region: Region) -> Size:
        total: Any = sum(self.rows.calls[node].flops for node in region.calls)
        with contextlib.suppress(SizeError):
            return size_of(total) if total != 0 else ZERO
        return ZERO

    def _base(self, region: Region, origin: Origin) -> str:
        """What an op is called, but for the number that tells it from others of that name."""
        if region.mark is not None and region.collective is None:
            return region.mark.name
        if region.kind == "row-wise" and region.collective is None:
            return origin.name("" if origin.path else "op")
        if region.kind == "batch-free" and region.collective is None:
            return origin.name("once")
        call = region.collective or region.reason.cause
        target = target_name(call).removesuffix(".default")
        if isinstance(call.target, OpOverload):
            target = str(call.target.overloadpacket)
        return origin.name(re.sub(r"\W", "_", target.split(".")[-1]))


def assemble(
    gm: fx.GraphModule,
    symbols: Symbols,
    *,
    rules: Sequence[MarkRule] = (),
    level: str = "torch",
    given: Mapping[str, Axis | None] | None = None,
    writes_by: str | None = "eager",
) -> tuple[Assembly, frozenset[MarkRule]]:
    """Cut a graph into ops by one symbol for the batch; the rules that matched.

    writes_by: the inner compiler whose bodies write into places; None: values have no places.
    If one of the dealt values of a graph would be needed whole, no rows are dealt out.
    """
    symbols = replace(symbols, unit=unit_of(gm, symbols))
    marks, matched = marks_of(gm.graph, rules)
    if level == "aten" and given is not None:  # what is saved inside a mark: no one vouches for it
        marks = {n: (replace(m, rows=None), key) for n, (m, key) in marks.items()}
    declared = {n: "row-wise" for n in gm.graph.nodes if told_of(n, rules, "rows")}
    declared |= {n: m.rows for n, (m, _) in marks.items() if m.rows is not None}
    twins = Twins(gm.meta.get(CALLS, ()))
    rows = find_rows(gm, symbols, declared, level=level, given=given, twins=twins)
    units = find_units(gm.graph, rows, marks, states_of(gm.graph, rules))
    settle(units, rows, gm.graph)
    if given is None:  # else results are kept for the backward graph
        peel(units, rows, gm.graph)
    built = Assembly(gm, rows, cut(sink(units, rows), rows), units, writes_by)
    built.build()
    if why := built.undealt():
        symbols = replace(symbols, undealt=why)
        return assemble(gm, symbols, rules=rules, level=level, given=given, writes_by=writes_by)
    return built, frozenset(matched)


def value_name(node: fx.Node) -> str:
    """The name of the value that a node stands for."""
    return re.sub(r"[^A-Za-z0-9_]", "_", node.name)[:200]


def _order(value: Any) -> Order | None:
    """How a result lies in memory; None if it has gaps, or is no tensor of known sizes."""
    known = isinstance(value, torch.Tensor) and all(
        not isinstance(size, SYMBOLIC) or size.node.hint is not None
        for size in (*value.shape, *value.stride())
    )
    return order_of(value) if known else None


def _canonical(graph: fx.Graph, rows: Rows) -> dict[fx.Node, fx.Node]:
    """For each node the first one that has the very same tensor: `y.add_(1)` is `y`."""
    first: dict[int, fx.Node] = {}
    canonical: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        value = rows.value(node)
        plain = isinstance(value, torch.Tensor) and node.op != "output"
        canonical[node] = first.setdefault(id(value), node) if plain else node
    return canonical
