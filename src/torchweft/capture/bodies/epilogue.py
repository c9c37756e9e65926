"""The `Epilogue`: Inductor's last kernels store where the body is told, and nothing is copied.

    mm -> add -> copy_(slice)                mm into a buffer; one kernel adds and stores in slice
    add -> mm -> copy_(slice)          ->    add into a buffer; mm_out(..., out=slice)
    cat(a, b) -> copy_(slice)          ->    copy_(slice[:n], a); copy_(slice[n:], b)

A body that writes into slices reaches Inductor as a graph without writes, which ends in a copy to
each slice. Loops are fused with that copy by Inductor itself. Matrix products are calls of torch's
own kernels, and a concatenation is a buffer that its pieces are written into: these are told the
slice here. What is read behind a slice's maker is read from the slice, so its result is nowhere
else.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torchweft.private.core import tree_leaves
from torchweft.private.graph_passes import CustomGraphPass, get_hash_for_files

aten = torch.ops.aten
LIBRARY: Any = torch.library.Library("torchweft", "FRAGMENT")  # type: ignore[no-untyped-call]


def _told(overload: Any) -> Any:
    """An `out=` overload as an operator that returns nothing, which is what Inductor can order."""
    name = f"{overload._schema.name.split('::')[1]}_{overload._schema.overload_name}"
    arguments = str(overload._schema).partition("(")[2].rpartition("->")[0]
    LIBRARY.define(f"{name}({arguments} -> ()", tags=(torch.Tag.flexible_layout,))

    def write(*args: Any, **kwargs: Any) -> None:
        overload(*args, **kwargs)

    def pretend(*args: Any, **kwargs: Any) -> None:
        """On fake tensors: torch's own check of `out=` would take symbols for their numbers."""

    LIBRARY.impl(name, write, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchweft::{name}", pretend, lib=LIBRARY)
    return getattr(torch.ops.torchweft, name).default


TOLD: Mapping[Any, Any] = MappingProxyType(
    {
        aten.mm.default: _told(aten.mm.out),
        aten.addmm.default: _told(aten.addmm.out),
        aten.bmm.default: _told(aten.bmm.out),
        aten.baddbmm.default: _told(aten.baddbmm.out),
        aten.topk.default: _told(aten.topk.values),
    }
)
"""Operators that Inductor calls from outside, each in the form that writes where it is told."""


def called_from_outside(func: Any) -> bool:
    """Whether Inductor runs an operator by a call whose result it would have to copy."""
    from torchweft.private.inductor import fallbacks, lowerings, select_decomp_table

    if func in TOLD:
        return False
    known = func in lowerings or func in select_decomp_table()
    return func in fallbacks or func.overloadpacket in CALLED or not known


CALLED = (aten.sort, aten.kthvalue, aten.median, aten.mode)
"""Inductor has loops for these, but not for every device and length."""


class Epilogue(CustomGraphPass):
    """Inductor's last pass over the graph of a body whose last arguments are slices."""

    def __init__(self, num_slices: int) -> None:
        self.num_slices = num_slices

    def __call__(self, graph: fx.Graph) -> None:
        copies: dict[Any, fx.Node] = {}
        for place in [node for node in graph.nodes if node.op == "placeholder"][-self.num_slices :]:
            users = list(place.users)
            if len(users) != 1 or users[0].target is not aten.copy_.default:
                continue  # an `empty` of the user's, which is read before it is written
            source: Any = users[0].args[1]
            if source.op == "call_function" and not any(u.op == "output" for u in source.users):
                copies[source] = users[0]
        for source, copy in copies.items():
            if copy not in graph.nodes:
                continue  # its maker was told with another result of it
            maker = source.args[0] if source.target is operator.getitem else source
            if maker.target in TOLD:
                _tell(graph, maker, copies)
            else:
                _store(graph, source, copy)

    def uuid(self) -> Any:
        """What Inductor's cache tells this pass by."""
        return get_hash_for_files((__file__,), str(self.num_slices))


def _tell(graph: fx.Graph, maker: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> None:
    """Have a call from outside write into slices; a result without one gets bytes of its own."""
    told = TOLD[maker.target]
    names = [item.name for item in told._schema.arguments if item.is_write]
    results: dict[Any, fx.Node] = {0: maker}
    if len(names) > 1:
        results = {user.args[1]: user for user in maker.users}
    place: Any = next(copies[result].args[0] for result in results.values() if result in copies)
    with graph.inserting_before(maker):
        outs: list[Any] = []
        for n, made in enumerate(tree_leaves(maker.meta["val"])):
            if results.get(n) in copies:
                outs.append(copies[results[n]].args[0])
                continue
            options = {"dtype": made.dtype}
            outs.append(graph.call_function(aten.empty_like.default, (place,), options))
            outs[-1].meta["val"] = torch.empty_like(place.meta["val"], **options)
        graph.call_function(
            told, maker.args, {**maker.kwargs, **dict(zip(names, outs, strict=True))}
        )
    for n, result in results.items():
        for old in (copies[result], result) if result in copies else (result,):
            old.replace_all_uses_with(outs[n])
            graph.erase_node(old)
    if len(names) > 1:
        graph.erase_node(maker)


def _store(graph: fx.Graph, source: fx.Node, copy: fx.Node) -> None:
    """Copy a result to its place where it is made, in the loop that makes it.

    The pieces of a concatenation are copied each by itself, if their lengths are numbers.
    """
    place: Any = copy.args[0]
    source.append(copy)
    source.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    if source.target is not aten.cat.default:
        return
    pieces: Any = source.args[0]
    dim: Any = source.args[1] if len(source.args) > 1 else 0
    lengths = [piece.meta["val"].shape[dim] for piece in pieces]
    if not all(isinstance(length, int) for length in lengths):
        return
    with graph.inserting_before(source):
        for piece, span in zip(pieces, pairwise(accumulate(lengths, initial=0)), strict=True):
            within = graph.call_function(aten.slice.Tensor, (place, dim, *span))
            within.meta["val"] = aten.slice.Tensor(place.meta["val"], dim, *span)
            stored = graph.call_function(aten.copy_.default, (within, piece))
            stored.meta["val"] = within.meta["val"]
    copy.replace_all_uses_with(place)
    graph.erase_node(copy)
    graph.erase_node(source)
