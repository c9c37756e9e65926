"""The `Axis`: where the rows of the batch are in a tensor, while a graph is looked at.

    [s0, 128, H]     Axis(0)                  one row is one entry of dim 0
    [4*s0, H]        Axis(0, inner=4)         row-major: each row has 4 neighbouring entries
    [4*s0, H]        Axis(0, outer=4)         the batch was second: rows repeat 4 times

Sizes are sympy expressions, as shapes of fake tensors have them; `Symbols` reads them and knows
which symbol is the batch (several, if they were declared to be one and the same).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from torchweft.errors import SizeError
from torchweft.plan.graph import Batch
from torchweft.plan.sizes import Size

ONE = sympy.Integer(1)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, slots=True)
class Axis:
    """Dim `dim` has outer * (batch rows) * inner entries.

    step: the entries are 0, step, 2 * step ..., by the number of the row; zero if they are not.
    """

    dim: int
    outer: Any = ONE
    inner: Any = ONE
    step: Any = 0

    def at(self, dim: int) -> Axis:
        """The same rows, on another dim."""
        return replace(self, dim=dim)

    def uncounted(self) -> Axis:
        """The same rows, whatever their entries are."""
        return replace(self, step=0)

    def batch(self) -> Batch:
        """The same as part of a graph. Raises `SizeError` if a size is no polynomial."""
        return Batch(self.dim, size_of(self.outer), size_of(self.inner))


FREE = Axis(-1)  # of a result that a rule knows to be the same whatever rows there are


class Mixing(Exception):  # noqa: N818 - not a failure: a finding
    """A call looks across rows; the text says how."""


@dataclass(frozen=True)
class Symbols:
    """Reads sizes: `batch` is the symbol that a split cuts, `same` are other names for it."""

    batch: Any = None
    same: frozenset[Any] = field(default=frozenset())

    def expr(self, size: Any) -> Any:
        """A size (int or symbolic) as a sympy expression."""
        if isinstance(size, SYMBOLIC):
            expr = size.node.expr
            return expr.xreplace(dict.fromkeys(self.same, self.batch)) if self.same else expr
        return sympy.sympify(size)

    def shape(self, tensor: torch.Tensor) -> list[Any]:
        """The sizes of all dims."""
        return [self.expr(size) for size in tensor.shape]

    def laid(self, value: Any) -> object:
        """How a tensor lies in memory, its dtype and device; of a size, what it is."""
        if not isinstance(value, torch.Tensor):
            return self.expr(value) if isinstance(value, SYMBOLIC) else value
        strides = [self.expr(stride) for stride in value.stride()]
        return self.shape(value), strides, value.dtype, value.device

    def in_expr(self, expr: Any) -> bool:
        """Whether an expression depends on the batch."""
        return self.batch is not None and self.batch in getattr(expr, "free_symbols", ())

    def inside(self, thing: Any) -> bool:
        """Whether a scalar, or any in a nested sequence, depends on the batch."""
        if isinstance(thing, SYMBOLIC):
            return self.in_expr(self.expr(thing))
        if isinstance(thing, list | tuple):
            return any(self.inside(item) for item in thing)
        if isinstance(thing, slice):
            return self.inside((thing.start, thing.stop, thing.step))
        return False

    def several(self, size: Any) -> bool:
        """Whether a size is more than one in every part: parts meet the guards of the whole."""
        expr = self.expr(size)
        env = size.node.shape_env if isinstance(size, SYMBOLIC) else None
        return bool(env is not None and env.bound_sympy(expr).lower > 1)

    def dims(self, tensor: torch.Tensor) -> list[int]:
        """The dims whose size depends on the batch."""
        return [dim for dim, size in enumerate(self.shape(tensor)) if self.in_expr(size)]

    def uniform(self, tensor: torch.Tensor) -> Axis | None:
        """An axis for a tensor whose entries do not care where they stand, by its shape alone."""
        dims = self.dims(tensor)
        if len(dims) != 1:
            return None
        inner = exact(self.expr(tensor.shape[dims[0]]), self.batch)
        return Axis(dims[0], ONE, inner) if inner is not None and not self.in_expr(inner) else None

    def fits(self, axis: Axis, tensor: torch.Tensor) -> bool:
        """Whether the tensor's shape is what the axis says, with the batch in no other dim."""
        shape = self.shape(tensor)
        if self.dims(tensor) != [axis.dim]:
            return False
        wanted = axis.outer * self.batch * axis.inner
        return same(shape[axis.dim], wanted) and not self.in_expr(axis.outer * axis.inner)


def exact(total: Any, factor: Any) -> Any:
    """total / factor if that is a whole number whatever the symbols, else None."""
    if factor == 0:
        return None
    ratio = sympy.cancel(total / factor)
    numerator, denominator = sympy.fraction(ratio)
    return numerator if denominator == 1 else None


def same(left: Any, right: Any) -> bool:
    """Whether two expressions are equal whatever the symbols."""
    return bool(left == right or sympy.expand(left - right) == 0)


def product(sizes: Iterable[Any]) -> Any:
    """All sizes multiplied."""
    total: Any = ONE
    for size in sizes:
        total = total * size
    return total


def size_of(expr: Any) -> Size:
    """A sympy expression as a `Size`. Raises `SizeError` where it is no integer arithmetic."""
    if isinstance(expr, int):
        return Size.of(expr)
    if not getattr(expr, "is_integer", False):
        raise SizeError(f"size: {expr} is not known to be an integer.")
    return Size.parse(str(expr))


def wrap(dim: int, rank: int) -> int:
    """A dim that may count from the end, counted from the front."""
    return dim + rank if dim < 0 else dim


def agreed(axes: Sequence[Axis | None]) -> Axis | None:
    """The one axis that all have who have any. Raises `Mixing` if two differ."""
    unlike = list(dict.fromkeys(axis for axis in axes if axis is not None))
    if len(unlike) > 1:
        raise Mixing("its operands have their rows in different places")
    return unlike[0] if unlike else None
