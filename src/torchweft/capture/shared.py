"""Shared bytes: whether inputs of a call overlap in memory, so that no row of them may be moved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn import Buffer, Parameter


def shared_bytes(inputs: Sequence[Any]) -> str:
    """Why inputs cannot be cut into rows: two of them overlap in memory; empty if none do.

    A row of one may then be another row of the other, which a write would reach too early.
    """
    spans: list[tuple[int, int]] = []
    for item in {id(item): item for item in inputs if isinstance(item, Tensor)}.values():
        if type(item) in (Tensor, Parameter, Buffer) and item.numel():
            reach = sum((n - 1) * s for n, s in zip(item.shape, item.stride(), strict=True))
            start = item.data_ptr()
            spans.append((start, start + (reach + 1) * item.element_size()))
    spans.sort()
    if any(start < end for (_, end), (start, _) in pairwise(spans)):
        return "alias: two inputs overlap in memory, and one of them may be written"
    return ""
