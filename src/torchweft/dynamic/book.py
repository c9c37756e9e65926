"""The `CellBook` of a model: the cell of every kind of call, traced when such a call comes first.

Calls of one callee with equal *patterns* are ops of one cell. A pattern is what stays of the
arguments of a call when its tensors are taken out:

    (x, [h, 2], flag=True)   ->   (tuple, (spec of x, (list, (spec of h, (int, 2))))), ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.tracing import trace
from torchweft.errors import CaptureError
from torchweft.private.core import pytree
from torchweft.run.workers.cell import Cell, Spec, unpack_cell

PLAIN = (int, float, bool, str, type(None), complex, torch.dtype, torch.device, type(Ellipsis))
Pause = Callable[[], AbstractContextManager[None]]


class CellEntry:
    """A cell with its pending ops: of each the first value it makes, and the values it reads."""

    __slots__ = ("cell", "ops", "unflatten")

    def __init__(self, cell: Cell, unflatten: Callable[[list[Lazy]], Any] | None = None) -> None:
        self.cell = cell
        self.unflatten = unflatten
        self.ops: list[int] = []


class Callee(NamedTuple):
    """What is called, a module or a torch function: `call(weights, arguments, options)`.

    lookup: it looks words up one by one, if it has so many arguments. learn: gets the entry of each
    call on lazy values alone; of a lookup, also the words' dtype.
    """

    key: Any
    name: str
    call: Callable[..., Any]
    module: nn.Module | None = None
    lookup: int = 0
    learn: Callable[[CellEntry, torch.dtype | None], None] | None = None


class CellBook:
    """Entries by callee and pattern, and the weights that cells share. reasons: why calls have no
    cell, and how often they came."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.names = {id(weight): name for name, weight in weights.items()}
        self.entries: dict[Any, CellEntry | str] = {}
        self.reasons: Counter[str] = Counter()
        self.functions: dict[Any, Callee] = {}
        self.numbers = count()  # of cells: their names are unique

    def function(self, function: Any) -> Callee:
        """A torch function as a callee."""
        callee = self.functions.get(function)
        if callee is None:
            name = getattr(function, "__name__", "function")
            lookup = 2 if function is functional.embedding else 0
            callee = Callee(
                function, name, lambda _, args, options: function(*args, **options), lookup=lookup
            )
            self.functions[function] = callee
        return callee

    def replace(self, name: str, new: Tensor) -> None:
        """The model has another tensor for a weight; one of another kind needs other cells."""
        old = self.weights[name]
        if new.shape != old.shape or new.dtype != old.dtype:
            self.entries.clear()
        del self.names[id(old)]
        self.weights[name], self.names[id(new)] = new, name

    def unpack(self, spec: Spec) -> CellEntry:
        """The entry of taking values of a spec apart."""
        entry = self.entries.setdefault(spec, CellEntry(unpack_cell(spec)))
        assert isinstance(entry, CellEntry), "it is never refused"
        return entry

    def entry(
        self, callee: Callee, pattern: Any, values: Sequence[Lazy], pause: Pause
    ) -> CellEntry | None:
        """The entry of a call on these values, or None if it cannot be an op. pause: nothing is
        recorded inside."""
        key = callee.key, pattern, torch.is_autocast_enabled("cpu")
        entry = self.entries.get(key)
        if entry is None:
            try:
                with pause():
                    entry = self._trace(callee, pattern, [value.spec for value in values])
            except CaptureError as error:
                entry = f"{callee.name}: {str(error).partition(': ')[2]}"
            self.entries[key] = entry
        if isinstance(entry, str):
            self.reasons[entry] += 1
            return None
        return entry

    def _trace(self, callee: Callee, pattern: Any, specs: Sequence[Spec]) -> CellEntry:
        module = callee.module
        if module is not None:
            shared = dict((*module.named_parameters(), *module.named_buffers()))
        else:
            shared = {name: self.weights[name] for name in sorted(set(_weights_in(pattern)))}
        outer: list[Any] = []

        def function(given: Mapping[str, Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
            args, options = _fill(pattern, iter(rows), given)
            leaves, tree = pytree.tree_flatten(callee.call(given, args, options))
            outer[:] = [tree]
            if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise CaptureError("it gives something else than tensors.")
            return leaves

        cell = trace(f"{_word(callee.name)}.{next(self.numbers)}", function, specs, shared)
        weights = tuple(self.names[id(shared[name])] for name in cell.weights)
        cell, tree = replace(cell, weights=weights), outer[0]
        if tree.is_leaf():
            return CellEntry(cell)
        if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
            return CellEntry(cell, tuple)
        return CellEntry(cell, lambda made: pytree.tree_unflatten(made, tree))


class Weight:
    """Marks the name of a weight in a pattern."""


def _weights_in(pattern: Any) -> Iterator[str]:
    if isinstance(pattern, tuple):
        if pattern and pattern[0] is Weight:
            yield pattern[1]
        elif pattern and pattern[0] in (list, tuple, dict):
            for each in pattern[1]:
                yield from _weights_in(each[1] if pattern[0] is dict else each)


def _fill(pattern: Any, rows: Iterator[Tensor], weights: Mapping[str, Tensor]) -> Any:
    """The arguments of a pattern with tensors in the place of specs."""
    if isinstance(pattern, Spec):
        return next(rows)
    kind, *rest = pattern
    if kind is Weight:
        return weights[rest[0]]
    if kind is dict:
        return {key: _fill(each, rows, weights) for key, each in rest[0]}
    if kind in (list, tuple):
        return kind(_fill(each, rows, weights) for each in rest[0])
    return slice(*rest) if kind is slice else rest[0]


def _word(name: str) -> str:
    """A name as it may stand in a graph."""
    kept = "".join(
        each if (each.isascii() and each.isalnum()) or each in "_." else "_" for each in name
    )
    return kept if kept[:1].isalpha() or kept[:1] == "_" else f"_{kept}"
