"""The `ResultBytes`: where the parts of a result lie side by side, written there by their makers.

    y = linear(x, w).view(b, t, h, d).transpose(1, 2)           one part makes y for its own rows
    room = empty(b * t, h * d), whole                           mm(x, w, out=rows of room)
    whole y = room.view(b, t, h, d).transpose(1, 2)             nothing is copied

A call falls apart into ATen operators (`rows` saw them). The first of them whose result has the
bytes of the value is its *maker*; it must have a form that writes where it is told. Views behind
it are taken of the room as they were of the result, so the whole has the strides that eager's has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from torchweft.capture.ops.units import Unit, storages
from torchweft.capture.rows.axes import AtenCall, size_of
from torchweft.capture.rows.rows import Rows, id_of
from torchweft.errors import SizeError
from torchweft.plan.graph import Batch
from torchweft.plan.sizes import ONE, Size

aten = torch.ops.aten
Function = Callable[..., Any]
Slices = Mapping[int, fx.Node]


@dataclass(frozen=True)
class ResultBytes:
    """Bytes for one result: shape, dtype, device, where its rows are, its dims from outermost.

    views: for each make of the body that shows these bytes, by number, the function
    (room, *sizes) -> make, or None if it is the room itself. `made_by` is the maker's operator,
    `call` the function of the user's call that it is a part of.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    batch: Batch
    order: tuple[int, ...]
    views: Mapping[int, Function | None]
    made_by: Any = None
    call: Any = None

    @property
    def has_gaps(self) -> bool:
        """Whether the rows of a part are not next to each other in memory."""
        outside = self.order[: self.order.index(self.batch.dim)]
        return any(self.shape[dim] != ONE for dim in outside)


@dataclass(frozen=True)
class Into:
    """The form of a body that writes where it is told.

    function(*reads, *sizes, *slices) -> makes       slices: a part's rows of each room

    `code` is its graph, equal for equal keys.
    """

    function: Function
    sizes: tuple[Size, ...]
    rooms: tuple[ResultBytes, ...]
    code: fx.GraphModule | None = None
    key: str = ""

    @property
    def placed(self) -> set[int]:
        """The makes that lie in rooms, by number."""
        return {number for room in self.rooms for number in room.views}


@dataclass(frozen=True)
class Maker:
    """The operator that makes the bytes of a value: number `at` of a call, its result `which`.

    room: for these bytes, still without views. form: the operator as it writes into a slice.
    """

    node: fx.Node
    at: int
    which: int
    room: ResultBytes
    form: Function = field(compare=False)


class Unfit(Exception):  # noqa: N818 - not a failure: a finding
    """A value cannot be written where it is told; the text says why."""


class Makers:
    """The makers of values in one graph."""

    def __init__(self, graph: fx.Graph, rows: Rows, units: list[Unit]) -> None:
        self.rows = rows
        self.nested = {node for unit in units if _is_nested(unit) for node in unit.nodes}
        self.first: dict[int, fx.Node] = {}
        for node in graph.nodes:
            for number in storages(rows.value(node)) if node.op != "output" else ():
                self.first.setdefault(number, node)

    def maker(self, node: fx.Node) -> Maker:
        """The maker of the bytes of a value. Raises `Unfit` with the reason if it cannot be told
        where to write."""
        value = self.rows.value(node)
        if not isinstance(value, torch.Tensor) or not storages(value):
            raise Unfit("it is no plain tensor")
        number = id_of(value)
        source = self.first[number]
        if source.op not in ("call_function", "call_method") or source in self.nested:
            raise Unfit("its bytes are not made by a plain call")
        for at, call in enumerate(self.rows.calls[source].atens):
            if number in map(id_of, call.tensors):
                break
            made = [id_of(result) for result in call.results]
            if number in made:
                which, form = made.index(number), _form(call)
                room = self._room(call.results[which], call.func, source.target)
                if room.has_gaps and not _is_strided(call):
                    raise Unfit(GAPS)
                return Maker(source, at, which, room, form)
        raise Unfit("its bytes are not made by a plain call")

    def _room(self, tensor: torch.Tensor, func: Any, call: Any) -> ResultBytes:
        """The room for a result. Raises `Unfit` if it has no slices."""
        axis, symbols = self.rows.axis(tensor), self.rows.symbols
        try:
            shape = tuple(size_of(expr) for expr in symbols.shape(tensor))
            strides = [size_of(symbols.expr(stride)) for stride in tensor.stride()]
            batch = axis.batch() if axis is not None else None
        except SizeError:
            raise Unfit("its sizes depend on data") from None
        if batch is None or batch.outer != ONE:
            raise Unfit("its rows are not next to each other")
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-_hint(tensor.stride(dim)), dim)))
        step = ONE
        for dim in reversed(order):
            if shape[dim] != ONE and strides[dim] != step:
                raise Unfit("its result has gaps")
            step = step * shape[dim]
        return ResultBytes(shape, tensor.dtype, tensor.device, batch, order, {}, func, call)


GAPS = "its batch is not the leading dim"


def _hint(size: Any) -> int:
    hint = size.node.hint if isinstance(size, torch.SymInt) else size
    if hint is None:
        raise Unfit("its sizes depend on data")
    return int(hint)


def _is_nested(unit: Unit) -> bool:
    """Whether a unit is a transform of torch.func, whose tensors are not what they seem."""
    return any("nesting" in str(node.target) for node in unit.nodes)


# Forms: (graph, maker's args, kwargs, slices by result) -> nodes for all results.


def _form(call: AtenCall) -> Function:
    """The form of an operator that writes where it is told. Raises `Unfit` if there is none."""
    packet = call.func.overloadpacket
    if _plain_name(call) in (*FILLS, "embedding"):
        return partial(_filled, _plain_name(call))
    overload = _out_overload(call.func)
    names = [item.name for item in overload._schema.arguments if item.is_out] if overload else []
    if len(names) != len(call.results):  # none, or one for a list of results
        raise Unfit(f"{packet.__name__} has no form that writes where it is told")

    def out(graph: fx.Graph, args: Any, kwargs: Any, given: Slices) -> list[Any]:
        outs: dict[str, Any] = {}
        for number, (name, made) in enumerate(zip(names, call.results, strict=True)):
            options: dict[str, Any] = {"dtype": made.dtype, "device": made.device}
            fresh = None if number in given else graph.call_function(torch.empty, (0,), options)
            outs[name] = given.get(number, fresh)
        kept = {k: v for k, v in kwargs.items() if k in _names(overload)}
        all_made = graph.call_function(overload, args, {**kept, **outs})
        if len(names) == 1:
            return [all_made]
        return [graph.call_function(operator.getitem, (all_made, n)) for n in range(len(names))]

    return out


def without(into: Into, gone: Collection[int], instead: Mapping[Any, Function]) -> Into:
    """The form without some rooms, by number: their makers run as they do in the plain body.

    instead: functions in the place of makers' operators. Raises `Unfit` if a maker among them
    cannot be had so.
    """
    assert into.code is not None, "captured bodies have the graph of this form"
    graph = fx.Graph()
    graph.output(graph.graph_copy(into.code.graph, {}))
    slices = [node for node in graph.nodes if node.op == "placeholder"][-len(into.rooms) :]
    makers = {n: next(iter(slices[n].users)) for n in range(len(slices))}
    gone = {n for n in makers if any(makers[n] is makers[other] for other in gone)}
    for maker in {makers[n]: None for n in gone}:
        func = next(into.rooms[n].made_by for n in gone if makers[n] is maker)
        named = getattr(maker.target, "_schema", None)
        outs = [item.name for item in named.arguments if item.is_out] if named else []
        if not outs or not set(_names(func)) <= set(_names(maker.target)):
            raise Unfit(f"{func} cannot be told apart from where it writes")
        maker.kwargs = {name: item for name, item in maker.kwargs.items() if name not in outs}
        maker.target = instead.get(func, func)
    for number in gone:
        graph.erase_node(slices[number])
    code = fx.GraphModule(into.code, graph, class_name="Into")
    rooms = tuple(room for n, room in enumerate(into.rooms) if n not in gone)
    return Into(code.forward, into.sizes, rooms, code, f"{into.key}-{sorted(gone)}")


def _names(overload: Any) -> list[str]:
    return [item.name for item in overload._schema.arguments]


def _out_overload(func: Any) -> Any:
    """The overload that takes the same arguments and writes into `out`; None if torch only has one
    that makes a copy itself (its generated ones do)."""
    wanted = _kept(func)
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        outs = [item for item in other._schema.arguments if item.is_out]
        if not outs or len(outs) != len(func._schema.returns) or not _needs(other) <= _needs(func):
            continue
        if _kept(other) == wanted:
            return None if torch.Tag.generated in other.tags else other
    return None


def _needs(func: Any) -> set[str]:
    """The arguments of an overload that must be given, but for where the result goes."""
    plain = [item for item in func._schema.arguments if not item.is_out]
    return {item.name for item in plain if not item.has_default_value()}


def _kept(func: Any) -> list[tuple[str, str]]:
    """The arguments of an overload that say what to compute, not where the result goes."""
    plain = [item for item in func._schema.arguments if not item.is_out]
    return [(item.name, str(item.type)) for item in plain if item.name not in ALLOCATING]


ALLOCATING = ("dtype", "layout", "device", "pin_memory")


FILLS = ("empty", "empty_strided", "zeros", "ones", "full", "clone", "_to_copy")


def _plain_name(call: AtenCall) -> str:
    """The name of an operator of torch's own: "zeros" for `aten.new_zeros` and its like."""
    name = str(call.func.overloadpacket.__name__) if call.func.namespace == "aten" else ""
    return name.removeprefix("new_").removesuffix("_like")


def _filled(name: str, graph: fx.Graph, args: Any, kwargs: Any, given: Slices) -> list[Any]:
    """The form of an operator that fills or copies: it does so in the slice."""
    match name:
        case "zeros":
            return [graph.call_function(aten.zero_.default, (given[0],))]
        case "ones" | "full":
            value = 1 if name == "ones" else args[-1] if args else kwargs["fill_value"]
            return [graph.call_function(aten.fill_.Scalar, (given[0], value))]
        case "clone" | "_to_copy":
            return [graph.call_function(aten.copy_.default, (given[0], args[0]))]
        case "embedding":
            return [graph.call_function(embed, (given[0], *args[:2]))]
    return [given[0]]


def embed(out: torch.Tensor, weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`aten.embedding` into `out`: it is an index_select, and that has an `out=`."""
    rows = out.view(indices.numel(), weight.shape[1])
    torch.index_select(weight, 0, indices.reshape(-1), out=rows)
    return out


def _is_strided(call: AtenCall) -> bool:
    """Whether an operator writes into a slice with gaps as well as into one without."""
    return torch.Tag.pointwise in call.func.tags or _plain_name(call) in ("cat", *FILLS)


def view_of(base: fx.Node, make: fx.Node, sizes: list[fx.Node], views: set[fx.Node]) -> Any:
    """The function (room, *sizes) -> make for the views between the two; None if there are none.

    Raises `Unfit` if anything else stands between them.
    """
    if make is base:
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {base: graph.placeholder("room")}
    copies |= {size: graph.placeholder(size.name) for size in sizes}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            if node not in views:
                raise Unfit("more than views of it is handed out")
            for used in node.all_input_nodes:
                copy(used)
            copies[node] = graph.node_copy(node, copies.__getitem__)
        return copies[node]

    graph.output(copy(make))
    return fx.GraphModule({}, graph, class_name="View").forward
