"""Row rules for operators that take a graph: `map`, `scan`, `flex_attention`.

    map(f, [s0, ...])            each row by itself: f sees one row and no other
    scan(f, [s0, H], [T, s0, H]) row-wise if f is, and gives back the carry with its rows in place
    flex_attention(q, k, v, ..)  row-wise unless a score or a mask looks at the number of the row

A rule gives the axes of the results, in their order, or raises `Mixing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torchweft.capture.rows.axes import Axis, Mixing, Symbols
from torchweft.private.core import tree_leaves

AxisOf = Callable[[torch.Tensor], Axis | None]
ROWS = Axis(0)


def map_rows(args: Sequence[Any], axis_of: AxisOf, symbols: Symbols, made: Any) -> list[Any]:
    """map_impl(f, xs, others)"""
    _, given, others = args
    if any(axis_of(tensor) != ROWS for tensor in given):
        raise Mixing("it maps over something else than the rows")
    _require_free(others, axis_of, symbols)
    return [ROWS] * len(tree_leaves(made))


def scan(args: Sequence[Any], axis_of: AxisOf, symbols: Symbols, made: Any) -> list[Any]:
    """scan(f, carry, xs, others): the rows of what f makes, seen on the first step."""
    body, carry, given, others = args
    if any((axis := axis_of(tensor)) is None or axis.dim == 0 for tensor in given):
        raise Mixing("it scans along the batch, or over what has no rows")
    first = [tensor.select(0, 0) for tensor in given]
    results = list(fx.Interpreter(body).run(*carry, *first, *others))
    axes = [axis_of(result) for result in results]
    if axes[: len(carry)] != [axis_of(tensor) for tensor in carry] or None in axes:
        raise Mixing("what it carries on has no clear rows")
    carried, steps = axes[: len(carry)], axes[len(carry) :]
    return carried + [axis and axis.at(axis.dim + 1) for axis in steps]


def flex_attention(args: Sequence[Any], axis_of: AxisOf, symbols: Symbols, made: Any) -> list[Any]:
    """flex_attention(query, key, value, score, block mask, scale, options, buffers, buffers)"""
    *tensors, score, mask = args[:5]
    if any(axis_of(tensor) != ROWS for tensor in tensors):
        raise Mixing("its keys and values have their rows elsewhere")
    if _reads(score, 1) or _reads(mask[-1], 0):
        raise Mixing("a score or a mask looks at the number of the row")
    for block in mask[:-1]:
        if not isinstance(block, torch.Tensor) or axis_of(block) == ROWS:
            continue
        if symbols.expr(block.shape[0]) != 1:
            raise Mixing("its mask has rows elsewhere")
    _require_free(args[7:], axis_of, symbols)
    return [ROWS if symbols.fits(ROWS, leaf) else None for leaf in tree_leaves(made)]


def _reads(graph: Any, number: int) -> bool:
    """Whether a graph uses an input for more than its dtype and device."""
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return any(user.target != "new_ones" for user in places[number].users)


def _require_free(others: Any, axis_of: AxisOf, symbols: Symbols) -> None:
    """Raise `Mixing` if something that all rows share has the batch in it."""
    for leaf in tree_leaves(others):
        batched = isinstance(leaf, torch.Tensor) and (axis_of(leaf) or symbols.dims(leaf))
        if batched or symbols.inside(leaf):
            raise Mixing("what all rows share has the batch in it")


RULES: Mapping[str, Any] = MappingProxyType(
    {"map_impl": map_rows, "scan": scan, "flex_attention": flex_attention}
)
