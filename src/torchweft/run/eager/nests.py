"""The `Nest`: arguments or outputs of a call as leaves, and how to put others in their place.

    nest = Nest(output)                      tensors in tuples, dicts, dataclasses ...
    nest.leaves                              [tensor, None, 3, tensor]
    nest.rebuild(other_leaves)               the same form around other leaves

Torch's pytrees know tuples, lists, dicts and what hosts register; dataclasses are taken apart here.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Iterator, Sequence
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
