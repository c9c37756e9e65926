"""Messages between two ranks as Dynamo shows them, put so that data tells what depends on what.

    r = irecv(buf, 1); ...; wait(wait(r)); ... buf ...     the graph does not say that buf is filled
    w = wait(irecv(buf, 1)); ...; ... w ...                what is received is what is read

A buffer that is not new gets a copy of what was received, which is received straight into it. On a
CPU a batch of messages is its messages, one by one; accelerators need them as one call, so there
they stay one. `dist.send` and `dist.recv` are breaks of the graph, and so is all under gradients.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from torchweft.capture.marks import target_name
from torchweft.capture.ops.units import is_wait

FUNCTIONAL = "_c10d_functional"
KINDS = ("isend", "irecv", "batch_p2p_ops")
BARE = frozenset(["empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros"])


def settle_messages(gm: fx.GraphModule) -> None:
    """Put the messages of a graph, and of graphs inside of it, so that data orders them."""
    for part in gm.modules():
        if isinstance(part, fx.GraphModule):
            starts = [node for node in part.graph.nodes if _kind(node) == "batch_p2p_ops"]
            for node in starts:
                _unbatch(part.graph, node)
            received = [node for node in part.graph.nodes if _kind(node) in ("irecv", "isend")]
            for node in received:
                _settle(part.graph, node)
            if received:
                part.recompile()


def _kind(node: fx.Node) -> str:
    """`isend`, `irecv`, `batch_p2p_ops`; empty for other calls."""
    space, _, name = target_name(node).removesuffix(".default").partition(".")
    return name if space == FUNCTIONAL and name in KINDS else ""


def _unbatch(graph: fx.Graph, batch: fx.Node) -> None:
    """Let the messages of a batch stand for themselves, in their order."""
    kinds, peers, tags, tensors, group = _arguments(batch)
    values = [tensor.meta.get("example_value") for tensor in tensors]
    on_cpu = all(isinstance(v, torch.Tensor) and v.device.type == "cpu" for v in values)
    takers = list(batch.users)
    if not on_cpu or any(user.target is not operator.getitem for user in takers):
        return
    made = []
    with graph.inserting_before(batch):
        for kind, peer, tag, tensor in zip(kinds, peers, tags, tensors, strict=True):
            start = getattr(torch.ops._c10d_functional, kind).default
            made.append(graph.call_function(start, (tensor, peer, tag, group)))
            given = tensor.meta["example_value"]
            value = given if kind == "irecv" else given.new_empty(0)
            made[-1].meta = {**batch.meta, "example_value": value}
    for taker in takers:
        taker.replace_all_uses_with(made[taker.args[1]])  # type: ignore[index]
        graph.erase_node(taker)
    graph.erase_node(batch)


def _arguments(batch: fx.Node) -> tuple[Any, Any, Any, Any, Any]:
    names = ("op_list", "peer_list", "tag_list", "tensors", "group_name")
    given = dict(zip(names, batch.args, strict=False)) | batch.kwargs
    kinds, peers, tags, tensors, group = (given[name] for name in names)
    return kinds, peers, tags, tensors, group


def _settle(graph: fx.Graph, start: fx.Node) -> None:
    """One wait, behind the start; what was received is read from it, or copied to its buffer."""
    waits = [start]
    for node in waits:  # waits of waits, too
        waits += [user for user in node.users if is_wait(user) and user not in waits]
    with graph.inserting_after(start):
        wait = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
    wait.meta = dict(start.meta)
    for old in reversed(waits[1:]):
        old.replace_all_uses_with(wait)
        graph.erase_node(old)
    start.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait)
    if _kind(start) == "isend":
        return
    buffer = start.args[0]
    assert isinstance(buffer, fx.Node), "a message is received into a tensor"
    place = {node: number for number, node in enumerate(graph.nodes)}
    later = [user for user in buffer.users if place[user] > place[wait]]
    if target_name(buffer).split(".")[-1] in BARE and len(later) == len(buffer.users) - 1:
        buffer.replace_all_uses_with(wait, delete_user_cb=lambda user: user in later)
        return
    with graph.inserting_after(wait):
        copy = graph.call_method("copy_", (buffer, wait))
    copy.meta = dict(buffer.meta)
