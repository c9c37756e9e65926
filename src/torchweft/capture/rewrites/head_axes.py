"""Where the heads are in the values around an attention: from the attention on, both ways.

    q [b, s, 8, d] --view--> [b, s, 2, 4, d] --permute, all_to_all, view--> [b, 4, 2 s, d] attention
    Axis(2, outer=2)         Axis(3)                                        Axis(1)

Heads are an `Axis`, as rows are: a dim has outer * (heads of a rank) * inner entries. They are
followed through views by the places of entries, through what moves dims by trying it on sizes that
are all different, and else to the same dim counted from the right. This is a proposal: whether the
calls treat heads one by one is for the row rules to say (`heads`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from torchweft.capture.rewrites.chunk import RESHAPES
from torchweft.capture.rewrites.rewriting import CannotError, name_of
from torchweft.capture.rows.axes import ONE, SYMBOLIC, Axis, exact, same, tensors_in
from torchweft.capture.rows.rows import FAILURES, Rows
from torchweft.private.core import OpOverload, tree_map

VIEWS = (*RESHAPES, "flatten", "unflatten", "squeeze", "unsqueeze", "ravel")
MOVES = (
    "permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "swapdims", "stack", "select",
    "getitem", "unbind",
)  # fmt: skip
UNLIKE = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051)  # sizes to tell dims apart by


def called(node: fx.Node) -> str:
    """What is called, whatever the overload: "transpose" of `aten.transpose.int`."""
    target = node.target
    return str(target.overloadpacket.__name__) if isinstance(target, OpOverload) else name_of(node)


class HeadAxes:
    """Finds the axes of the heads for some calls of a graph, and for what these read.

    units: how many groups of heads each rank has that are never cut: heads, or those of one key.
    """

    def __init__(self, rows: Rows, inside: Collection[fx.Node], units: int) -> None:
        self.rows, self.inside, self.units = rows, inside, units

    def spread(self, start: fx.Node, axis: Axis) -> dict[fx.Node, Axis]:
        """The axes of all values that have heads. Raises `CannotError` where they get lost."""
        known, todo = {start: axis}, [start]
        while todo:
            node = todo.pop()
            for other, place in self._beside(node, known[node]):
                if other not in known:
                    todo.append(other)
                if known.setdefault(other, place) != place:
                    raise CannotError(f"the heads of {other.name} are in two places")
        return known

    def shape(self, node: fx.Node) -> list[Any]:
        """The sizes of what a call makes; of several results, of the first."""
        return self.rows.symbols.shape(tensors_in(self.rows.value(node))[0])

    def _beside(self, node: fx.Node, axis: Axis) -> Iterator[tuple[fx.Node, Axis]]:
        """The axes of what reads a value and of what it is made from."""
        for user in node.users:
            if user in self.inside and tensors_in(self.rows.value(user)):
                yield user, self._onward(node, user, axis)
        for given in node.all_input_nodes if node in self.inside else ():
            if tensors_in(self.rows.value(given)):
                back = self._back(node, given, axis)
                if back is not None:
                    yield given, back

    def _onward(self, given: fx.Node, node: fx.Node, axis: Axis) -> Axis:
        old, new, name = self.shape(given), self.shape(node), called(node)
        if name in VIEWS:
            return self._seat(axis, old, new, node)
        if name in MOVES and isinstance(self.rows.value(given), torch.Tensor):
            order = self._order(node)
            if axis.dim not in order:
                raise CannotError(f"{node.name} takes single heads out")
            return axis.at(order.index(axis.dim))
        return self._sized(axis.at(axis.dim + len(new) - len(old)), new, node)

    def _back(self, node: fx.Node, given: fx.Node, axis: Axis) -> Axis | None:
        """The axis of an operand; None if it is the same for all heads."""
        old, new, name = self.shape(given), self.shape(node), called(node)
        if name in VIEWS:
            return self._seat(axis, new, old, node)
        if name in MOVES and isinstance(self.rows.value(given), torch.Tensor):
            dim = self._order(node)[axis.dim]
            if dim is None:
                raise CannotError(f"{node.name} puts heads together")
            return axis.at(dim)
        dim = axis.dim + len(old) - len(new)
        if dim < 0 or (old[dim] == 1 and new[axis.dim] != 1):
            return None
        return self._sized(axis.at(dim), old, node)

    def _seat(self, axis: Axis, old: Sequence[Any], new: Sequence[Any], node: fx.Node) -> Axis:
        """The dim of a view on which the same entries are."""
        left = prod(old[: axis.dim], start=ONE) * axis.outer
        right = prod(old[axis.dim + 1 :], start=ONE) * axis.inner
        for dim, size in enumerate(new):
            outer = exact(left, prod(new[:dim], start=ONE))
            inner = exact(right, prod(new[dim + 1 :], start=ONE))
            if outer is not None and inner is not None and same(size, outer * self.units * inner):
                return Axis(dim, outer, inner)
        raise CannotError(f"{node.name} mixes heads with another dim")

    def _sized(self, axis: Axis, shape: Sequence[Any], node: fx.Node) -> Axis:
        """The axis for so many entries: keys may have fewer heads than queries."""
        inner = exact(shape[axis.dim], axis.outer * self.units) if axis.dim >= 0 else None
        if inner is None:
            raise CannotError(f"the heads cannot be followed through {node.name}")
        return Axis(axis.dim, axis.outer, inner)

    def _order(self, node: fx.Node) -> list[int | None]:
        """For each dim of a result the dim of the operand that it is."""

        def unlike(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.empty(UNLIKE[: value.dim()], device="meta")
            return value.node.hint if isinstance(value, SYMBOLIC) else value

        def given(nest: Any) -> Any:
            return fx.map_arg(nest, lambda each: tree_map(unlike, self.rows.value(each)))

        args, kwargs = given(node.args), given(node.kwargs)
        call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        try:
            made = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
        except (*FAILURES, IndexError) as error:
            raise CannotError(f"the heads cannot be followed through {node.name}") from error
        sizes = tensors_in(made)[0].shape
        return [UNLIKE.index(size) if size in UNLIKE else None for size in sizes]
