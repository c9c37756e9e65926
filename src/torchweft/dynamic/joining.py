"""Joining products: linears of a cell that could be one become one.

    linear(a, U, b) + linear(c, V, d)   ->  linear(cat(a, c), cat(U, V), b + d)
    linear(a, U, b), linear(a, V, d)    ->  parts of linear(a, cat(U, V), cat(b, d))

The joined weights depend on weights only, so they are computed once. Sums are added up in another
order, so results differ in the last bits. New nodes go to the end of the graph; `ordered` gives
the nodes in an order in which they can run, without those that nobody needs.
"""

from __future__ import annotations

import heapq
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def join_products(graph: fx.Graph) -> None:
    """Join what can be joined, in place."""
    if any(_mutable(node) for node in graph.nodes):
        return  # an order of changes in place must be kept
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
            left, right = node.args
            _add_up(graph, left, right, node)
    by_argument: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_linear(node) and node.users:
            by_argument.setdefault((node.args[0], _bias(node) is None), []).append(node)
    for (argument, _), nodes in by_argument.items():
        if len(nodes) > 1:
            _side_by_side(graph, argument, nodes)


def ordered(graph: fx.Graph) -> list[fx.Node]:
    """The calls that the output needs, each behind what it reads, else in the old order."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    needed: set[fx.Node] = set()
    stack = [graph.output_node()]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                stack.append(node)
    if any(_mutable(node) for node in graph.nodes):
        return [node for node in graph.nodes if node.op in ("call_function", "get_attr")]
    missing = {node: len(node.all_input_nodes) for node in needed}
    ready = [(number[node], node) for node in needed if not missing[node]]
    heapq.heapify(ready)
    calls = []
    while ready:
        node = heapq.heappop(ready)[1]
        if node.op != "placeholder":
            calls.append(node)
        for user in node.users:
            if user in missing:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (number[user], user))
    return calls


def is_linear(node: Any) -> bool:
    """Whether a node is a linear whose weights are shared by all rows."""
    return isinstance(node, fx.Node) and str(node.target).startswith("weft.linear")


def _mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _bias(node: fx.Node) -> Any:
    return node.args[2] if len(node.args) > 2 else None


def _make(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda each: each.meta["val"]))
    return node


def _add_up(graph: fx.Graph, left: Any, right: Any, add: fx.Node) -> None:
    """A sum of two linears becomes a linear of both arguments side by side."""
    if not is_linear(left) or not is_linear(right) or len(left.users) + len(right.users) > 2:
        return
    one, other = left.args[0], right.args[0]
    shape, other_shape = one.meta["val"].shape, other.meta["val"].shape
    if left is right or one is other or shape[:-1] != other_shape[:-1]:
        return
    argument = next(
        (user for user in one.users
         if user.target is aten.cat.default and user.args[0] == [one, other]), None
    )  # fmt: skip
    argument = argument or _make(graph, aten.cat.default, [one, other], len(shape) - 1)
    weight = _make(graph, aten.cat.default, [left.args[1], right.args[1]], 1)
    biases = [bias for bias in (_bias(left), _bias(right)) if bias is not None]
    bias = _make(graph, aten.add.Tensor, *biases) if len(biases) == 2 else (*biases, None)[0]
    joined = _make(graph, torch.ops.weft.linear.default, argument, weight, bias)
    add.replace_all_uses_with(joined)


def _side_by_side(graph: fx.Graph, argument: fx.Node, nodes: list[fx.Node]) -> None:
    """Linears of one argument become one, and its result is cut into theirs."""
    weight = _make(graph, aten.cat.default, [node.args[1] for node in nodes], 0)
    bias = None
    if _bias(nodes[0]) is not None:
        bias = _make(graph, aten.cat.default, [_bias(node) for node in nodes], 0)
    joined = _make(graph, torch.ops.weft.linear.default, argument, weight, bias)
    start, dim = 0, joined.meta["val"].dim() - 1
    for node in nodes:
        stop = start + int(node.meta["val"].shape[-1])
        piece = _make(graph, aten.slice.Tensor, joined, dim, start, stop)
        node.replace_all_uses_with(piece)
        start = stop
