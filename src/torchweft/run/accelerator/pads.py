"""`Pads`: calls filled up to the next of a few sizes, so that few device graphs serve them all.

    37 rows --fill--> 64 rows, the last one repeated --run--> 64 rows --take--> 37 rows

Rows that are only there to fill must not be seen by the others, and must not be written anywhere.
So graphs whose ops look across rows or draw numbers, or that change an input in place (a row that
fills would write into the KV cache), are not padded; `refused` says why.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch

from torchweft.plan.graph import Graph, Value
from torchweft.run.rows import taker


class Pads:
    """How the calls of one graph are filled up. `refused`: why they are not; empty if they are."""

    def __init__(self, graph: Graph, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.inputs = [_batched(graph.value[name]) for name in graph.inputs]
        self.outputs = [_batched(graph.value[name]) for name in graph.outputs]
        self.refused = _refusal(graph)

    def size(self, rows: int) -> int:
        """The next size that holds so many rows; beyond the largest, and for none, `rows`."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if rows > 0 and at < len(self.sizes) else rows

    def rows(self, inputs: Sequence[Any]) -> int:
        """How many rows a call has; where calls are not padded, too many to be filled up."""
        for value, item in zip(self.inputs, inputs, strict=True):
            if value is not None and (inner := _inner(value)):
                return int(item.shape[value.batch.dim]) // (_outer(value) * inner)
        return sys.maxsize

    def fill(self, inputs: Sequence[Any], rows: int, size: int) -> list[Any]:
        """The inputs with `size` rows: their last row is repeated."""
        return [
            item if value is None else _repeat_last(value, item, rows, size)
            for value, item in zip(self.inputs, inputs, strict=True)
        ]

    def take(self, outputs: Sequence[Any], rows: int, size: int) -> tuple[Any, ...]:
        """The rows of the outputs that the caller asked for."""
        taken = []
        for value, item in zip(self.outputs, outputs, strict=True):
            if value is not None and isinstance(item, torch.Tensor):
                item = taker(value)(item, size, 0, rows)
                item = item if item.is_contiguous() else item.clone()
            taken.append(item)
        return tuple(taken)


def _repeat_last(value: Any, item: Any, rows: int, size: int) -> Any:
    dim, outer = value.batch.dim, _outer(value)
    rest = item.unflatten(dim, (outer, rows, item.shape[dim] // (outer * rows)))
    index = torch.arange(size, device=item.device).clamp_(max=rows - 1)
    return rest.index_select(dim + 1, index).flatten(dim, dim + 2)


def _refusal(graph: Graph) -> str:
    for op in graph.ops:
        if op.rows not in ("row-wise", "batch-free"):
            return f"graphs: calls are not padded, for op {op.name!r} is {op.rows}"
    if written := sorted(graph.mutated & set(graph.inputs)):
        return f"graphs: calls are not padded, for input {written[0]!r} is changed in place"
    inputs = [v for name in graph.inputs if (v := _batched(graph.value[name])) is not None]
    if not any(_inner(value) for value in inputs) or not all(_outer(v) for v in inputs):
        return "graphs: calls are not padded, for no input tells how many rows there are"
    return ""


def _batched(value: Value) -> Any:
    return value if value.batch is not None and value.dtype != "opaque" else None


def _outer(value: Any) -> int:
    return value.batch.outer.constant or 0


def _inner(value: Any) -> int:
    return value.batch.inner.constant or 0
