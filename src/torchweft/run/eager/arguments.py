"""The `Arguments` of a call in boundary mode: where the rows are among them, as a `Nest` of leaves.

    nest = Nest(output)                      tensors in tuples, dicts, dataclasses ...
    nest.leaves                              [tensor, None, 3, tensor]
    nest.with_tensors(others)                the same form around other tensors

Torch's pytrees know tuples, lists, dicts and what hosts register; dataclasses are taken apart here.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchweft.private.core import tree_flatten, tree_unflatten

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type, slice, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.nn.Module,
)  # fmt: skip
"""Leaves that hold no rows."""


class Nest:
    """Leaves in a form. `key` is equal for nests of one form."""

    def __init__(self, nest: Any) -> None:
        self.leaves: list[Any] = []
        self._records: list[tuple[Any, tuple[str, ...]]] = []
        self.key = self._take(nest)

    def _take(self, nest: Any) -> tuple[Any, ...]:
        leaves, spec = tree_flatten(nest)
        return (spec, *(self._leaf(leaf) for leaf in leaves))

    def _leaf(self, leaf: Any) -> Any:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = tuple(item.name for item in dataclasses.fields(leaf))
            self._records.append((leaf, names))
            return type(leaf), self._take([getattr(leaf, name) for name in names])
        self.leaves.append(leaf)
        return None

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves that are tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Iterable[Any]) -> Any:
        """The same form and leaves, with other tensors in place of its own."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._build(self.key, iter(leaves), iter(self._records))

    def _build(self, key: Any, leaves: Iterator[Any], records: Iterator[Any]) -> Any:
        spec, *inside = key
        items = []
        for form in inside:
            if form is None:
                items.append(next(leaves))
                continue
            record, names = next(records)
            items.append(copy.copy(record))
            for name, value in zip(names, self._build(form[1], leaves, records), strict=True):
                object.__setattr__(items[-1], name, value)
        return tree_unflatten(items, spec)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf other than a tensor surely holds no rows."""
    return isinstance(leaf, PLAIN) or (callable(leaf) and hasattr(leaf, "__code__"))


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, how many rows they have, and which of their tensors have them."""

    nest: Nest
    tensors: tuple[Tensor, ...]
    batched: tuple[bool, ...]
    rows: int

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> Arguments:
        """The commonest size of dim `dim` of the tensors is the batch."""
        nest = Nest((args, kwargs))
        tensors = tuple(nest.tensors)
        sizes = [each.shape[dim] if each.dim() > dim else None for each in tensors]
        counts = Counter(size for size in sizes if size is not None)
        rows = counts.most_common(1)[0][0] if counts else 0
        return Arguments(nest, tensors, tuple(rows > 0 and size == rows for size in sizes), rows)

    def holds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments are still the same: nothing was put into a list or taken out."""
        now = Nest((args, kwargs))
        same = zip(self.nest.leaves, now.leaves, strict=False)
        return now.key == self.nest.key and all(before is after for before, after in same)


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
