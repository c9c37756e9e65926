"""Buffers that only a collective fills: the result itself takes their place.

    out = empty(2 * n, H)                               w = wait_tensor(all_gather(x))
    w = wait_tensor(all_gather(x))             ->       ... reads w ...
    out.copy_(w);  ... reads out ...

So Dynamo shows `dist.all_gather_into_tensor(out, x)` and its kin, and AOTAutograd, which writes
`copy(out, w)`. An empty buffer does not know its rows; the result does. A piece of a result
(`dist.all_gather` fills a list) is copied as before, into a tensor of its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torchweft.capture.marks import target_name
from torchweft.capture.ops.units import is_copy, is_wait

aten = torch.ops.aten
MAKERS = ("empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros")
PIECES = (operator.getitem, aten.slice.Tensor, aten.select.int)


def drop_buffers(gm: fx.GraphModule) -> None:
    """Take out the buffers of a graph that hold nothing but what a collective made."""
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    for copy in list(gm.graph.nodes):
        if copy.target is aten.copy.default:
            if _fits(copy.args[0], copy.args[1]):
                _put(gm.graph, copy, copy.args[1])
        elif is_copy(copy) and _is_bare(copy, place) and _fits(copy.args[0], copy.args[1]):
            out = copy.args[0]
            made = _put(gm.graph, copy, copy.args[1])
            out.replace_all_uses_with(made)
            gm.graph.erase_node(out)
    gm.recompile()


def _put(graph: fx.Graph, copy: fx.Node, source: fx.Node) -> fx.Node:
    """Let the source, or a copy of it if it is not the whole result, stand where the copy stood."""
    made = source
    if not is_wait(source) or len(source.users) > 1:
        with graph.inserting_before(copy):
            if copy.op == "call_method":
                made = graph.call_method("clone", (source,))
            else:
                made = graph.call_function(aten.clone.default, (source,))
        made.meta = dict(copy.meta)
    copy.replace_all_uses_with(made)
    graph.erase_node(copy)
    return made


def _is_bare(copy: fx.Node, place: dict[fx.Node, int]) -> bool:
    """Whether a copy fills a buffer that nobody has touched since it was made."""
    out: Any = copy.args[0]
    if not isinstance(out, fx.Node) or target_name(out).split(".")[-1] not in MAKERS:
        return False
    if set(out.kwargs) & {"out", "memory_format", "requires_grad"}:
        return False
    return all(user is copy or place[user] > place[copy] for user in out.users)


def _fits(out: Any, source: Any) -> bool:
    """Whether a result, or a piece of one, has the shape and type of what it fills."""
    root = source
    while isinstance(root, fx.Node) and root.target in PIECES:
        root = root.args[0]
    if not isinstance(root, fx.Node) or not isinstance(out, fx.Node) or not is_wait(root):
        return False
    mine, theirs = out.meta.get("example_value"), source.meta.get("example_value")
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    alike = mine.dtype == theirs.dtype and mine.device == theirs.device
    return alike and list(map(str, mine.shape)) == list(map(str, theirs.shape))
