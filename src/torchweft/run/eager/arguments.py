"""The `Arguments` of a call in boundary mode: where the rows are among them, as a `Nest` of leaves.

    nest = Nest(output)                      tensors in tuples, dicts, dataclasses ...
    nest.leaves                              [tensor, None, 3, tensor]
    nest.rebuild(other_leaves)               the same form around other leaves

Torch's pytrees know tuples, lists, dicts and what hosts register; dataclasses are taken apart here.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The same form with these leaves."""
        return self._build(self.key, iter(leaves), iter(self._records))

    def _build(self, key: Any, leaves: Iterator[Any], records: Iterator[Any]) -> Any:
        spec, *inside = key
        found = []
        for form in inside:
            if form is None:
                found.append(next(leaves))
                continue
            record, names = next(records)
            made = copy.copy(record)
            for name, value in zip(names, self._build(form[1], leaves, records), strict=True):
                object.__setattr__(made, name, value)
            found.append(made)
        return tree_unflatten(found, spec)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The leaves that are tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


def is_plain(leaf: Any) -> bool:
    """Whether a leaf that is no tensor is certain to hold no rows either."""
    return isinstance(leaf, PLAIN) or (callable(leaf) and hasattr(leaf, "__code__"))


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
        shapes = [nest.leaves[slot].shape for slot in slots]
        sizes = [shape[dim] if len(shape) > dim else None for shape in shapes]
        counts = Counter(size for size in sizes if size is not None)
        rows = counts.most_common(1)[0][0] if counts else 0
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
