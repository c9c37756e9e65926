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
Path = tuple[tuple[Any, Any], ...]
WRITES: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.fill.Scalar: aten.fill_.Scalar,
    aten.copy.default: aten.copy_.default,
    aten.add.Tensor: aten.add_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.lerp.Scalar: aten.lerp_.Scalar,
}
PIECES: dict[Any, Any] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
}


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
        inside = _inside(version, ())
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
    found: list[fx.Node] = []
    node: Any = last
    while node is not target:
        if not isinstance(node, fx.Node) or (
            node.target not in WRITES and node.target not in PIECES
        ):
            return []
        value, wanted = node.meta["val"], target.meta["val"]
        if value.dtype != wanted.dtype or list(value.shape) != list(wanted.shape):
            return []
        found.append(node)
        node = node.args[0]
    return found[::-1]


def _inside(version: fx.Node, path: Path) -> list[fx.Node]:
    """The calls that one write is made of, from the whole to the piece of a piece.

    slice_scatter(x, index_put(slice(x), ...)) is an index_put into a slice, if both slices are one.
    """
    if version.target not in PIECES:
        return [version]
    source = version.args[1]
    deeper = (*path, (PIECES[version.target], version.args[2:]))
    if isinstance(source, fx.Node) and len(source.users) == 1:
        known = source.target in WRITES or source.target in PIECES
        value = version.meta["val"]
        if known and source.meta["val"].dtype == value.dtype and _path(source.args[0]) == deeper:
            return [version, *_inside(source, deeper)]
    return [version]


def _path(node: Any) -> Path:
    """How a view was cut out of its root: the slices and selections, outermost first."""
    if isinstance(node, fx.Node) and node.target in PIECES.values():
        return (*_path(node.args[0]), (node.target, node.args[1:]))
    return ()


def _root(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.target in PIECES.values():
        node = node.args[0]
    return node


def _refused(graph: fx.Graph, target: fx.Node, inside: list[fx.Node], copy: fx.Node) -> str:
    """Why a write cannot stand where its functional form stands; empty if it can."""
    version = inside[0]
    if any(user.op == "output" for user in version.users):
        return f"{version.name} is handed out as it is"
    if any(_root(node.args[0]) is not target for node in inside):
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
        if user.args and user.args[0] is node and _is_view(user):
            yield from _aliases(user)


def _is_view(node: fx.Node) -> bool:
    if node.target in (aten._unsafe_view.default, aten.reshape.default, operator.getitem):
        return True
    schema = getattr(node.target, "_schema", None)
    returned = [result.alias_info for result in schema.returns] if schema is not None else []
    return any(info is not None and not info.is_write for info in returned)


def _write(graph: fx.Graph, view: fx.Node, inside: list[fx.Node]) -> None:
    """The write of a version, done to `view`, at the graph's point of insertion."""
    version = inside[0]
    if version.target in WRITES:
        _call(graph, WRITES[version.target], (view, *version.args[1:]), version, version.kwargs)
        return
    source = version.args[1]
    assert isinstance(source, fx.Node), "a piece is filled with a tensor"
    piece = _call(graph, PIECES[version.target], (view, *version.args[2:]), source)
    if inside[1:]:
        _write(graph, piece, inside[1:])
    else:
        _call(graph, aten.copy_.default, (piece, source), source)


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: Any = None
) -> fx.Node:
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = dict(like.meta)
    return node
