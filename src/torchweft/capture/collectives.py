"""Collectives as Dynamo shows them, and their two phases.

    functional   t = all_reduce(x);  y = wait_tensor(t)
                 issue(x) -> t       complete(t) -> (y,)
    in place     t = all_reduce(x);  w = wait_tensor(t);  x.copy_(w)
                 issue(x) reduces x itself, complete waits for it: no copy

Between issue and complete the tensor and its aliases belong to the collective.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchweft.capture.bodies import Function
from torchweft.graph import Collective
from torchweft.marks import target_name

IN_PLACE = {"all_reduce": "all_reduce_", "broadcast": "broadcast_"}


def collective_of(node: fx.Node | None) -> Collective | None:
    """What a call that starts a collective is in a graph: its kind and its communicator."""
    if node is None:
        return None
    texts = [arg for arg in [*node.args, *node.kwargs.values()] if isinstance(arg, str)]
    return Collective(kind_of(node), re.sub(r"\W", "_", f"group_{texts[-1] if texts else 'world'}"))


def kind_of(node: fx.Node) -> str:
    """The kind of a collective: `all_reduce`, `all_gather_into_tensor` ..."""
    return target_name(node).split(".")[1]


def two_phases(calls: Sequence[fx.Node]) -> tuple[Function | None, Function | None]:
    """Issue and complete of a collective op that reads one tensor; None for other forms."""
    start, ends = calls[0], calls[1:]
    tensors = start.all_input_nodes
    waits = [node for node in ends if "wait_tensor" in target_name(node)]
    if len(tensors) != 1 or len(waits) != 1 or start.args[0] is not tensors[0] or start.kwargs:
        return None, None
    target: Any = start.target
    if len(ends) == 2:
        reduce = getattr(torch.ops._c10d_functional, IN_PLACE.get(kind_of(start), "none"), None)
        return _in_place(target, reduce, start.args[1:])
    return _functional(target, start.args[1:])


def _functional(target: Any, rest: tuple[Any, ...]) -> tuple[Function, Function]:
    def issue(tensor: torch.Tensor) -> Any:
        return target(tensor, *rest)

    def complete(handle: Any) -> tuple[Any, ...]:
        return (torch.ops._c10d_functional.wait_tensor(handle),)

    return issue, complete


def _in_place(target: Any, reduce: Any, rest: tuple[Any, ...]) -> tuple[Function, Function]:
    """A tensor with gaps cannot be reduced where it is: it goes the way of a copy."""

    def issue(tensor: torch.Tensor) -> Any:
        if reduce is not None and tensor.is_contiguous():
            reduce(tensor, *rest)
            return tensor, None
        return tensor, target(tensor, *rest)

    def complete(handle: Any) -> tuple[Any, ...]:
        tensor, copy = handle
        if copy is None:
            torch.ops._c10d_functional.wait_tensor(tensor)
        else:
            tensor.copy_(torch.ops._c10d_functional.wait_tensor(copy))
        return ()

    return issue, complete
