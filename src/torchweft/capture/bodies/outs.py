"""The `Maker` of a result's bytes: parts lie side by side, written there by their makers.

    y = linear(x, w).view(b, t, h, d).transpose(1, 2)           one part makes y for its own rows
    room = empty(b * t, h * d), whole                           mm(x, w, out=rows of room)
    whole y = room.view(b, t, h, d).transpose(1, 2)             nothing is copied

A call falls apart into ATen operators (`rows` saw them). The first of them whose result has the
bytes of the value is its *maker*; it must have a form that writes where it is told. Views behind
it are taken of the room as they were of the result, so the whole has the strides that eager's has.

The `Replayer` writes that form of a body: it copies calls as the `BodyWriter` does, but those that
make wanted results are replayed operator by operator, the maker in the form that writes to a slice.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import fx

from torchweft.capture.bodies.bodies import BodyWriter, Function, Into, ResultBytes
from torchweft.capture.ops.units import Unit, is_nested, storages
from torchweft.capture.rows.axes import AtenCall, size_of
from torchweft.capture.rows.rows import Rows, id_of, is_getitem, is_view
from torchweft.errors import SizeError
from torchweft.plan.sizes import ONE
from torchweft.private.core import c_linear, tree_leaves, tree_map

aten = torch.ops.aten
Slices = Mapping[int, fx.Node]
SAFE: Mapping[Any, Any] = MappingProxyType(  # a part may lie in memory otherwise than the whole
    dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
)


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
        self.nested = {node for unit in units if is_nested(unit) for node in unit.nodes}
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
                pointwise = torch.Tag.pointwise in call.func.tags
                if room.has_gaps and not pointwise and _plain_name(call) not in STRIDED:
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
        hints = [s.node.hint if isinstance(s, torch.SymInt) else s for s in tensor.stride()]
        if None in hints:
            raise Unfit("its sizes depend on data")
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-hints[dim], dim)))
        step = ONE
        for dim in reversed(order):
            if shape[dim] != ONE and strides[dim] != step:
                raise Unfit("its result has gaps")
            step = step * shape[dim]
        return ResultBytes(shape, tensor.dtype, tensor.device, batch, order, {}, func, call)


PRODUCTS = (F.linear, c_linear, aten.mm.default)  # what oneDNN has its own kernels for
GAPS = "its batch is not the leading dim"


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
        known = {item.name for item in overload._schema.arguments}
        kept = {k: v for k, v in kwargs.items() if k in known}
        all_made = graph.call_function(overload, args, {**kept, **outs})
        if len(names) == 1:
            return [all_made]
        return [graph.call_function(operator.getitem, (all_made, n)) for n in range(len(names))]

    return out


def unfit_for(inner: str, room: ResultBytes) -> str:
    """Why an inner compiler cannot write into a room; empty if it can."""
    if inner == "onednn":
        product = room.call in PRODUCTS and room.made_by in (aten.mm.default, aten.addmm.default)
        return "oneDNN's products do not write where they are told" if product else ""
    if inner == "eager":
        return ""
    from torchweft.capture.bodies.epilogue import called_from_outside

    if room.has_gaps:
        return GAPS
    return f"Inductor copies what {room.made_by} makes" if called_from_outside(room.made_by) else ""


def _out_overload(func: Any) -> Any:
    """The overload that takes the same arguments and writes into `out`; None if torch only has one
    that makes a copy itself (its generated ones do)."""
    wanted, given = _asked(func)
    for name in func.overloadpacket.overloads():
        other = getattr(func.overloadpacket, name)
        num_outs = sum(item.is_out for item in other._schema.arguments)
        kept, needed = _asked(other)
        alike = kept == wanted and needed <= given
        if num_outs and num_outs == len(func._schema.returns) and alike:
            return None if torch.Tag.generated in other.tags else other
    return None


def _asked(func: Any) -> tuple[list[tuple[str, str]], set[str]]:
    """The arguments of an overload that say what to compute, and those that must be given."""
    plain = [item for item in func._schema.arguments if not item.is_out]
    kept = [(item.name, str(item.type)) for item in plain if item.name not in ALLOCATING]
    return kept, {item.name for item in plain if not item.has_default_value()}


ALLOCATING = ("dtype", "layout", "device", "pin_memory")
FILLS = ("empty", "empty_strided", "zeros", "ones", "full", "clone", "_to_copy")
STRIDED = ("cat", *FILLS)  # they write into a slice with gaps as well as into one without


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


def into_of(
    writer: BodyWriter,
    makers: Makers,
    calls: Sequence[fx.Node],
    makes: Sequence[fx.Node],
    wanted: Iterable[fx.Node],
    inner: str,
) -> tuple[Into | None, dict[fx.Node, str]]:
    """The form of a body that writes the wanted makes where it is told; why others cannot be.

    writer: has written the body itself. inner: what will compile it.
    """
    chosen: dict[fx.Node, Maker] = {}
    reasons: dict[fx.Node, str] = {}
    for node in wanted:
        try:
            maker = makers.maker(node)
            if maker.node not in calls:
                raise Unfit("it is a view of what another op made")
            if writer.built.modes[maker.node][0] or torch.is_autocast_enabled("cpu"):
                raise Unfit("it is made under autocast")
            if why := unfit_for(inner, maker.room):
                raise Unfit(why)
            chosen[node] = maker
        except Unfit as unfit:
            reasons[node] = str(unfit)
    if not chosen:
        return None, reasons
    try:
        replayer = Replayer(writer, chosen)
        replayer.write(calls)
        return replayer.into(makes), reasons
    except (Unfit, SizeError) as unfit:
        return None, reasons | dict.fromkeys(chosen, str(unfit))


class Replayer(BodyWriter):
    """A writer that replays the calls which make wanted results; `wanted` has their makers."""

    def __init__(self, writer: BodyWriter, wanted: Mapping[fx.Node, Maker]) -> None:
        super().__init__(writer.built)
        self.like, self.wanted = writer, wanted
        self.makers: dict[fx.Node, dict[int, dict[int, Maker]]] = {}
        for maker in wanted.values():
            results = self.makers.setdefault(maker.node, {}).setdefault(maker.at, {})
            results.setdefault(maker.which, maker)
        self.slices: list[fx.Node] = []
        self.bases: list[tuple[Maker, fx.Node]] = []
        self.views: set[fx.Node] = set()

    def into(self, makes: Sequence[fx.Node]) -> Into:
        """The finished form. Raises `Unfit` if it would not read what the body reads."""
        if list(self.reads) != list(self.like.reads) or self.switches_grad:
            raise Unfit("its op switches the grad mode")
        code, sizes, key = self.finish(makes, {}, self.slices)
        rooms = []
        for maker, base in self.bases:
            views = {
                at: view_of(base, self.local[node], list(self.sizes.values()), self.views)
                for at, node in enumerate(makes)
                if self.wanted.get(node) == maker
            }
            rooms.append(replace(maker.room, views=views))
        return Into(code.forward, sizes, tuple(rooms), code, key)

    def _copy(self, node: fx.Node) -> Any:
        if node in self.makers:
            self.local[node] = self._replay(node)
            return self.local[node]
        of: Any = node.args[0] if is_getitem(node) else None
        if isinstance(self.local.get(of), tuple):
            number: Any = node.args[1]
            self.local[node] = self.local[of][number]
            return self.local[node]
        made = super()._copy(node)
        if self.rows.calls[node].only_views:
            self.views.add(made)
        return made

    def _replay(self, node: fx.Node) -> Any:
        """A call as the operators it is made of."""
        fx.map_arg((node.args, node.kwargs), self._argument)  # the reads, in the body's order
        self._switch(self.built.modes[node])
        known: dict[int, Any] = {}
        for used in node.all_input_nodes:
            value = self.rows.value(used)
            if isinstance(value, torch.Tensor):
                known[id(value)] = self._argument(used)
        for at, call in enumerate(self.rows.calls[node].atens):
            args, kwargs = (tree_map(lambda leaf: self._known(leaf, known), g) for g in call.given)
            made = self._operator(call, args, kwargs, self.makers[node].get(at))
            for tensor, new in zip(call.results, made, strict=True):
                known.setdefault(id(tensor), new)  # what an operator changes stays what it was
        value = self.rows.value(node)
        results = [known[id(leaf)] for leaf in tree_leaves(value)]
        return results[0] if isinstance(value, torch.Tensor) else tuple(results)

    def _known(self, leaf: Any, known: Mapping[int, Any]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return self._size(leaf)
        if id(leaf) not in known:
            raise Unfit("its maker reads what no call shows")
        return known[id(leaf)]

    def _operator(
        self, call: AtenCall, args: Any, kwargs: Any, makers: Mapping[int, Maker] | None
    ) -> list[Any]:
        """Nodes for the results of an operator; `makers`: for those that are placed."""
        if makers:
            first = len(self.slices)
            given = {n: self.graph.placeholder(f"slice{at}") for at, n in enumerate(makers, first)}
            self.slices += given.values()
            results: list[Any] = next(iter(makers.values())).form(self.graph, args, kwargs, given)
            self.bases += [(maker, results[n]) for n, maker in makers.items()]
            return results
        made = self.graph.call_function(SAFE.get(call.func, call.func), args, kwargs)
        items = [made]
        if [str(item.type) for item in call.func._schema.returns] != ["Tensor"]:
            count = range(len(call.results))
            items = [self.graph.call_function(operator.getitem, (made, n)) for n in count]
        if is_view(call) and not call.written:
            self.views.update((made, *items))
        return items
