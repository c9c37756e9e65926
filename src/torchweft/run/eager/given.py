"""The `Arguments` of a call in boundary mode: its arguments, and where the rows are among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchweft.run.eager.nests import Nest


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: which leaves are tensors, and which of these have rows."""

    nest: Nest
    slots: tuple[int, ...]
    batched: tuple[bool, ...]
    rows: int

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> Arguments:
        """The commonest size of dim `dim` of the tensors is the batch."""
        nest = Nest((args, kwargs))
        slots = [n for n, leaf in enumerate(nest.leaves) if isinstance(leaf, torch.Tensor)]
        sizes = [_size(nest.leaves[slot], dim) for slot in slots]
        counts = Counter(size for size in sizes if size is not None)
        rows = max(counts, key=lambda size: counts[size]) if counts else 0
        return Arguments(nest, tuple(slots), tuple(rows > 0 and s == rows for s in sizes), rows)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The leaves that are tensors, in order."""
        return tuple(self.nest.leaves[slot] for slot in self.slots)

    def holds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments are still the same: nothing was put into a list or taken out."""
        now = Nest((args, kwargs))
        same = zip(self.nest.leaves, now.leaves, strict=False)
        return now.key == self.nest.key and all(before is after for before, after in same)

    def with_tensors(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in place of theirs."""
        leaves = list(self.nest.leaves)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = self.nest.rebuild(leaves)
        return args, kwargs


def _size(tensor: torch.Tensor, dim: int) -> int | None:
    return tensor.shape[dim] if tensor.dim() > dim else None


class RowSpan:
    """The rows of a part, in a form that a plan can split."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.shape = (stop - start,)

    def narrow(self, dim: int, start: int, length: int) -> RowSpan:
        """Some of these rows."""
        return RowSpan(self.start + start, self.start + start + length)


def rows_at(shape: Sequence[int], rows: int, dim: int) -> int | None:
    """The dim of a shape where the rows are: `dim` itself, the only such one, or a multiple."""
    if len(shape) > dim and shape[dim] == rows:
        return dim
    equal = [at for at, size in enumerate(shape) if size == rows]
    if equal:
        return equal[0] if len(equal) == 1 else None
    return next((at for at, size in enumerate(shape) if size and size % rows == 0), None)
