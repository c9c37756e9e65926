"""The place of a whole value at run time: room for all rows, made by the first part that comes.

room_for(room)      the parts write into it themselves: its shape is known before any part
whole_like(value)   the parts are copied into it: it is like the first of them, for all rows
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from torchweft.errors import PlanError
from torchweft.plan.graph import Value


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
    assert value.batch is not None, "only values with a batch have rows"
    dim = value.batch.dim

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
        text = f"memory: the graph says that op {op!r} writes into places, but its body cannot."
        raise PlanError(text, rule="memory")
    return into
