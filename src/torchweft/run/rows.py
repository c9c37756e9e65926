"""Rows of tensors: a part of a value as a view and put into a whole.

The batch of a value is (dim, outer, inner): dim has outer * rows * inner entries. Taking a part is
a view wherever torch has one (outer == 1); else it copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchweft.plan.graph import Value

Take = Callable[[Any, int, int, int], Any]
"""(tensor, rows it has, first row, end row) -> those rows of it."""


def taker(value: Value) -> Take:
    """The function that takes rows of a value (or of a room)."""
    batch = value.batch
    assert batch is not None, "only values with a batch have rows"
    dim, plain = batch.dim, batch.outer.constant == 1
    inner_one = batch.inner.constant == 1

    def narrow(tensor: Any, rows: int, start: int, stop: int) -> Any:
        inner = tensor.shape[dim] // rows
        return tensor.narrow(dim, start * inner, (stop - start) * inner)

    def outer(tensor: Any, rows: int, start: int, stop: int) -> Any:
        inner = 1 if inner_one else _constant(batch.inner.constant, value)
        shape = (tensor.shape[dim] // (rows * inner), rows, inner)
        parts = tensor.unflatten(dim, shape).narrow(dim + 1, start, stop - start)
        return parts.flatten(dim, dim + 2)

    return narrow if plain else outer


def putter(value: Value) -> Callable[[Any, Any, int, int, int], None]:
    """The function that puts rows of a value into its whole: (whole, part, rows, start, stop)."""
    batch = value.batch
    assert batch is not None, "only values with a batch have rows"
    if batch.outer.constant == 1:
        take = taker(value)

        def put(whole: Any, part: Any, rows: int, start: int, stop: int) -> None:
            take(whole, rows, start, stop).copy_(part)

        return put
    dim = batch.dim
    inner_one = batch.inner.constant == 1

    def put_outer(whole: Any, part: Any, rows: int, start: int, stop: int) -> None:
        inner = 1 if inner_one else _constant(batch.inner.constant, value)
        outer = whole.shape[dim] // (rows * inner)
        into = whole.unflatten(dim, (outer, rows, inner)).narrow(dim + 1, start, stop - start)
        into.copy_(part.unflatten(dim, (outer, stop - start, inner)))

    return put_outer


def _constant(number: int | None, value: Value) -> int:
    assert number is not None, (
        f"value {value.name}: rows with a symbolic stride inside an outer dim"
    )
    return number
