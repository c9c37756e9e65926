"""The `Twins`: what is known of an inlined block, because it is like the first of its kind.

    layer 0      each call is looked at, on fake tensors (`rows`): about a millisecond a call
    layer 1 ..   if its operands lie alike: the same kinds, axes and sizes, tensors of its own

A twin's bytes are a number only: to make new ones would take most of the time that is saved. What
the rest of the graph uses is computed with, so that has bytes which torch knows of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torchweft.capture.rows.axes import SYMBOLIC, AtenCall
from torchweft.capture.rows.rows import BYTES, CallRows, Rows, id_of
from torchweft.private.core import FakeTensor, no_dispatch, tree_leaves, tree_map

CALLS = "weft_inlined"  # of a graph: its inlined calls, those of one block together


@dataclass(frozen=True)
class InlinedCall:
    """One inlined call of a block: what it was given, and its nodes in the block's own order."""

    operands: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


class Twins:
    """The inlined calls of a graph, those of one block together."""

    def __init__(self, inlined: Sequence[Sequence[InlinedCall]]) -> None:
        worked = [calls for calls in inlined if calls[0].nodes]
        self.pairs = {each.nodes[0]: (calls[0], each) for calls in worked for each in calls[1:]}
        self.plain: dict[fx.Node, bool] = {}

    def __call__(self, node: fx.Node, rows: Rows) -> bool:
        """Whether an inlined call that starts here is like the first; then all of it is known."""
        if node not in self.pairs:
            return False
        first, other = self.pairs[node]
        start, twin = first.nodes[0], _Twin(rows)
        if start not in self.plain:
            self.plain[start] = not _by_data(first, rows)
        if not self.plain[start] or not twin.match(first, other):
            return False
        for old, new in zip(first.nodes, other.nodes, strict=True):
            rows.calls[new] = twin.call(rows.calls[old], new)
        return True


def _by_data(block: InlinedCall, rows: Rows) -> bool:
    """Whether a size in a block hangs on data: each call of it has symbols of its own then."""
    leaves = tree_leaves([rows.value(node) for node in block.nodes])
    return any(free_unbacked_symbols(x) for x in leaves if isinstance(x, (Tensor, *SYMBOLIC)))


class _Twin:
    """Tensors of one inlined call, and numbers of bytes, by those of the first."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.tensors: dict[int, Tensor] = {}
        self.bytes: dict[int, int] = {}

    def match(self, first: InlinedCall, other: InlinedCall) -> bool:
        """Whether two calls are given alike operands, and what they hand out can be told apart."""
        for old, new in self._given(first, other):
            if self.rows.symbols.laid(old) != self.rows.symbols.laid(new):
                return False
            if isinstance(old, Tensor):
                if self.rows.axis(old) != self.rows.axis(new):
                    return False
                if self.bytes.setdefault(id_of(old), id_of(new)) != id_of(new):
                    return False  # two share bytes there, and not here
                self.tensors[id(old)] = new
        if len(set(self.bytes.values())) < len(self.bytes):
            return False  # two share bytes here, and not there
        return all(map(self._make, self._shown(first, other)))

    def call(self, old: CallRows, node: fx.Node) -> CallRows:
        """What is known of a node."""
        return replace(
            old,
            node=node,
            value=tree_map(self._tensor, old.value),
            written=[self._tensor(each) for each in old.written],
            twins=cache(partial(self._atens, old)),
        )

    def _given(self, first: InlinedCall, other: InlinedCall) -> Iterator[tuple[Any, Any]]:
        """Pairs of operands, and each constant of the block with itself."""
        for pair in zip(first.operands, other.operands, strict=True):
            yield tuple(self.rows.value(n) if isinstance(n, fx.Node) else n for n in pair)
        for node in first.nodes:
            if node.op == "get_attr":
                yield self.rows.value(node), self.rows.value(node)

    def _shown(self, first: InlinedCall, other: InlinedCall) -> list[Tensor]:
        """The tensors of the first call whose like is used by other nodes of the graph."""
        inside = set(other.nodes)
        nodes = [
            old
            for old, new in zip(first.nodes, other.nodes, strict=True)
            if not inside.issuperset(new.users)
        ]
        leaves = tree_leaves([self.rows.value(node) for node in nodes])
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())

    def _make(self, old: Tensor) -> bool:
        """Make a tensor with bytes that nobody else shows; whether that is what it should be."""
        if id(old) not in self.tensors:
            if id_of(old) in self.bytes:
                return False
            options: Any = {"dtype": old.dtype, "device": old.device}
            self._keep(old, torch.empty_strided(old.shape, old.stride(), **options))
        return True

    def _tensor(self, old: Any) -> Any:
        if not isinstance(old, Tensor):
            return old
        if id(old) not in self.tensors:
            assert isinstance(old, FakeTensor), "calls are looked at on fake tensors"
            with no_dispatch():
                new = FakeTensor(old.fake_mode, Tensor.detach(old), old.device)
            setattr(new, BYTES, self.bytes.get(id_of(old), -id(new)))
            self._keep(old, new)
        return self.tensors[id(old)]

    def _keep(self, old: Tensor, new: Tensor) -> None:
        self.tensors[id(old)] = new
        self.bytes[id_of(old)] = id_of(new)
        if (axis := self.rows.axis(old)) is not None:
            self.rows.axes[new] = axis

    def _atens(self, old: CallRows) -> list[AtenCall]:
        return [
            replace(
                aten,
                given=tree_map(self._tensor, aten.given),
                args=tree_map(self._tensor, dict(aten.args)),
                results=[self._tensor(each) for each in aten.results],
            )
            for aten in old.atens
        ]
