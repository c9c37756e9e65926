"""The `Replayer`: writes the form of a body that puts its results where it is told.

It copies the calls of an op as the `BodyWriter` does, but calls that make the wanted results are
replayed operator by operator, as `rows` saw them, and the maker among these in the form that writes
into a slice. What else the call does (a transpose before it, a bias behind it) stays as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torchweft.capture.bodies.bodies import BodyWriter, key_of
from torchweft.capture.bodies.outs import Into, Maker, Makers, Unfit, view_of
from torchweft.capture.rows.axes import AtenCall
from torchweft.capture.rows.rows import is_getitem, is_view
from torchweft.errors import SizeError
from torchweft.plan.graph import Graph
from torchweft.private.core import tree_leaves, tree_map

aten = torch.ops.aten
SAFE: Mapping[Any, Any] = MappingProxyType(  # a part may lie in memory otherwise than the whole
    dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
)


def into_of(
    writer: BodyWriter,
    makers: Makers,
    calls: Sequence[fx.Node],
    makes: Sequence[fx.Node],
    wanted: Iterable[fx.Node],
) -> tuple[Into | None, dict[fx.Node, str]]:
    """The form of a body that writes the wanted makes where it is told; why others cannot be.

    writer: has written the body itself.
    """
    chosen: dict[fx.Node, Maker] = {}
    reasons: dict[fx.Node, str] = {}
    for node in wanted:
        try:
            maker = makers.maker(node)
            if maker.node not in calls:
                raise Unfit("it is a view of what another op made")
            if writer.modes[maker.node][0] or torch.is_autocast_enabled("cpu"):
                raise Unfit("it is made under autocast")
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


def placed_by(graph: Graph, bodies: Mapping[str, Any]) -> Graph:
    """The graph, with places only for what these bodies can write where they are told."""
    able: set[str] = set()
    for op in graph.ops:
        into = getattr(bodies.get(op.name), "into", None)
        able.update(op.makes[number] for number in (into.placed if into else ()))
    values = (replace(v, placeable=v.placeable and v.name in able) for v in graph.values)
    return replace(graph, values=tuple(values))


class Replayer(BodyWriter):
    """A writer that replays the calls which make wanted results; `wanted` has their makers."""

    def __init__(self, writer: BodyWriter, wanted: Mapping[fx.Node, Maker]) -> None:
        super().__init__(
            writer.gm, writer.rows, writer.is_copied, writer.canonical, writer.modes, writer.written
        )
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
        self._switch(((), self.grad))
        self.graph.output(tuple(self.local[node] for node in makes))
        rooms = []
        for maker, base in self.bases:
            views = {
                at: view_of(base, self.local[node], list(self.sizes.values()), self.views)
                for at, node in enumerate(makes)
                if self.wanted.get(node) == maker
            }
            rooms.append(replace(maker.room, views=views))
        self._order_placeholders(self.slices)
        code = fx.GraphModule(self.gm, self.graph, class_name="Into")
        all_sizes = tuple(self.sizes)
        key = key_of(code, code.graph, all_sizes)
        return Into(code.forward, all_sizes, tuple(rooms), code, key)

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
        self._switch(self.modes[node])
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
