"""Mutations, put back in place: AOTAutograd writes into a copy and copies that back at the end.

    new = index_put(cache, [i], row)       the whole cache is copied, twice
    ... reads new ...                 ->   index_put_(cache, [i], row)
    copy_(cache, new)                      ... reads cache ...

A write goes back in place if nobody reads the old content behind it. Where somebody does, or where
the new content is handed out as it is, the copies stay, and a note says why.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from torchweft.private.core import tree_leaves

aten = torch.ops.aten
Cuts = tuple[tuple[Any, Any], ...]
"""How a view is cut out of a tensor: slices and selections with their arguments, first to last."""
NAMES = (
    "index_put.default index_copy.default index_add.default index_fill.int_Scalar scatter.src "
    "scatter.value scatter_add.default masked_fill.Scalar masked_scatter.default fill.Scalar "
    "copy.default add.Tensor sub.Tensor mul.Tensor div.Tensor lerp.Scalar"
)
WRITES: dict[Any, Any] = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for name, overload in (text.split(".") for text in NAMES.split())
}
PIECES: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def put_back(gm: fx.GraphModule) -> list[str]:
    """Turn writes to copies of inputs into writes to the inputs; notes on what stays a copy."""
    notes: list[str] = []
    for node in list(gm.graph.nodes):
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            why = _put_back(gm.graph, node)
            if why:
                name = node.args[0].name
                notes.append(f"{name} is written through a copy of the whole: {why}")
    return notes


def _put_back(graph: fx.Graph, copy: fx.Node) -> str:
    """Put the writes behind one final copy back in place; why not, if they stay."""
    target, last = copy.args[0], copy.args[1]
    assert isinstance(target, fx.Node) and isinstance(last, fx.Node), "copy_ takes two tensors"
    versions = _versions(target, last)
    if not versions:
        # Whole new content (running statistics) has to be copied anyhow.
        return f"{last.name} is no known write to it" if target in last.all_input_nodes else ""
    for version in versions:
        inside = _inside(version)
        why = _refused(graph, target, inside, copy)
        if why:
            return why
        with graph.inserting_before(version):
            _write(graph, target, inside)
        version.replace_all_uses_with(target, delete_user_cb=lambda user: user is not copy)
        if version is last:
            copy.replace_all_uses_with(target)  # a cache that goes out too is the input itself
            graph.erase_node(copy)
        for node in inside:
            graph.erase_node(node)
    return ""


def _versions(target: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The writes that lead from an input to its final content, first to last; none if unknown."""
    versions: list[fx.Node] = []
    node: Any = last
    while node is not target:
        if not _is_write(node, target):
            return []
        versions.append(node)
        node = node.args[0]
    return versions[::-1]


def _is_write(node: Any, whole: Any) -> bool:
    """Whether a call makes the content of a tensor anew, and could be done in place."""
    if not isinstance(node, fx.Node) or node.target not in WRITES.keys() | PIECES.keys():
        return False
    value, wanted = node.meta["val"], whole.meta["val"]
    return value.dtype == wanted.dtype and list(value.shape) == list(wanted.shape)


def _inside(version: fx.Node) -> list[fx.Node]:
    """The calls that one write is made of, from the whole to the piece of a piece.

    slice_scatter(x, index_put(slice(x), ...)) is an index_put into a slice, if both slices are one.
    """
    inside = [version]
    cuts: Cuts = ()
    while inside[-1].target in PIECES:
        source, *where = inside[-1].args[1:]
        cuts = (*cuts, (PIECES[inside[-1].target], tuple(where)))
        if not isinstance(source, fx.Node) or len(source.users) > 1 or not source.args:
            break
        if _cut_out(source.args[0])[1] != cuts or not _is_write(source, source.args[0]):
            break
        inside.append(source)
    return inside


def _cut_out(node: Any) -> tuple[Any, Cuts]:
    """What a view was cut out of, and how."""
    if not isinstance(node, fx.Node) or node.target not in PIECES.values():
        return node, ()
    root, cuts = _cut_out(node.args[0])
    return root, (*cuts, (node.target, node.args[1:]))


def _refused(graph: fx.Graph, target: fx.Node, inside: list[fx.Node], copy: fx.Node) -> str:
    """Why a write cannot stand where its functional form stands; empty if it can."""
    version = inside[0]
    if any(user.op == "output" for user in version.users):
        return f"{version.name} is handed out as it is"
    if any(_cut_out(node.args[0])[0] is not target for node in inside):
        return f"{inside[-1].name} starts from something else"
    aliases = list(_aliases(target))
    place = {node: number for number, node in enumerate(graph.nodes)}
    for alias in aliases:
        for user in alias.users:
            if user.op == "output":
                return f"{alias.name} is handed out"
            if place[user] > place[version] and user is not copy:
                return f"{user.name} reads its old content after the write"
    operands = inside[-1].args[1:] if inside[-1].target in WRITES else ()
    if set(aliases) & set(tree_leaves(operands)):
        return f"{version.name} writes what it reads"
    return ""


def _aliases(node: fx.Node) -> Iterator[fx.Node]:
    """A value and every view of it."""
    yield node
    for user in node.users:
        shows = user.target is operator.getitem or is_view(user)
        if shows and user.args and user.args[0] is node:
            yield from _aliases(user)


def is_view(node: fx.Node) -> bool:
    """Whether a call gives another look at the bytes of an argument, or may do so."""
    schema = getattr(node.target, "_schema", None)
    returned = [result.alias_info for result in schema.returns] if schema is not None else []
    return node.target in VIEWS or any(info and not info.is_write for info in returned)


def _write(graph: fx.Graph, view: fx.Node, inside: list[fx.Node]) -> None:
    """The write of a version, done to `view`, at the graph's point of insertion."""
    for version in inside:
        if version.target in WRITES:
            form, args = WRITES[version.target], (view, *version.args[1:])
            _call(graph, form, args, version, version.kwargs)
            return
        source: Any = version.args[1]
        view = _call(graph, PIECES[version.target], (view, *version.args[2:]), source)
    _call(graph, aten.copy_.default, (view, source), source)


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: Any = None
) -> fx.Node:
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = dict(like.meta)
    return node
