"""Rows of tensors: a part of a value as a view, and the place of a whole that parts are put into.

    taker(value)        takes rows: a view wherever torch has one (outer == 1); else it copies
    putter(value)       puts rows into the whole
    room_for(room)      makes a place: parts write into it themselves, so its shape is known before
    whole_like(value)   makes a place: parts are copied into it, so it is like the first of them

The batch of a value is (dim, outer, inner): dim has outer * rows * inner entries. A place is made
by the first part that comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torchweft.errors import PlanError
from torchweft.plan.graph import Batch, Value

Take = Callable[[Any, int, int, int], Any]
"""(tensor, rows it has, first row, end row) -> those rows of it."""


def taker(value: Value) -> Take:
    """The function that takes rows of a value (or of a room)."""
    dim = _batch(value).dim

    def narrow(tensor: Any, rows: int, start: int, stop: int) -> Any:
        inner = tensor.shape[dim] // rows
        return tensor.narrow(dim, start * inner, (stop - start) * inner)

    def outer(tensor: Any, rows: int, start: int, stop: int) -> Any:
        return (
            _apart(value, tensor, rows).narrow(dim + 1, start, stop - start).flatten(dim, dim + 2)
        )

    return narrow if _batch(value).outer.constant == 1 else outer


def putter(value: Value) -> Callable[[Any, Any, int, int, int], None]:
    """The function that puts rows of a value into its whole: (whole, part, rows, start, stop)."""
    dim, take = _batch(value).dim, taker(value)

    def put(whole: Any, part: Any, rows: int, start: int, stop: int) -> None:
        take(whole, rows, start, stop).copy_(part)

    def put_outer(whole: Any, part: Any, rows: int, start: int, stop: int) -> None:
        into = _apart(value, whole, rows).narrow(dim + 1, start, stop - start)
        into.copy_(_apart(value, part, stop - start))

    return put if _batch(value).outer.constant == 1 else put_outer


def _batch(value: Value) -> Batch:
    assert value.batch is not None, "only values with a batch have rows"
    return value.batch


def _apart(value: Value, tensor: Any, rows: int) -> Any:
    """A view of a tensor with a dim for the rows between an outer and an inner one."""
    dim, inner = _batch(value).dim, _batch(value).inner.constant
    assert inner is not None, f"value {value.name}: rows with a symbolic stride inside an outer dim"
    return tensor.unflatten(dim, (tensor.shape[dim] // (rows * inner), rows, inner))


class First:
    """Fills a cell once, whoever comes first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, cells: list[Any], at: int, make: Callable[[], Any]) -> None:
        with self.lock:
            if cells[at] is None:
                cells[at] = make()


def room_for(room: Any, *, poison: bool = False) -> Callable[..., Any]:
    """The function that makes a room of a body (see `capture.outs`): (*shape) -> empty tensor.

    poison: fill it with NaN, so that a read that comes too early cannot find the right numbers of
    an earlier call.
    """
    order, options = room.order, {"dtype": room.dtype, "device": room.device}

    def make(*shape: int) -> Any:
        return _poisoned(torch.empty_permuted(shape, order, **options), poison)

    return make


def whole_like(value: Value, *, poison: bool = False) -> Callable[[Any, int, int], Any]:
    """The function that makes room for all rows: (a part, its rows, all rows) -> empty tensor.

    Dims lie in memory in the part's order, so a transposed part gives a transposed whole.
    """
    dim = _batch(value).dim

    def make(part: Any, part_rows: int, rows: int) -> Any:
        shape = list(part.shape)
        shape[dim] = shape[dim] // part_rows * rows
        order = sorted(range(part.dim()), key=lambda d: (-part.stride(d), d))
        room = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)
        return _poisoned(room, poison)

    return make


def _poisoned(room: Any, poison: bool) -> Any:
    return room.fill_(float("nan")) if poison and room.is_floating_point() else room


def into_of(body: Any, op: str) -> Any:
    """The form of a body that writes into rooms. Raises `PlanError` if it has none."""
    into = getattr(body, "into", None)
    if into is None:
        raise PlanError(f"memory: op {op!r} is to write into places, but its body cannot.")
    return into
