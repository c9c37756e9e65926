"""The `Axis`: where the rows of a tensor are; the `AtenCall`: an operator that moves them.

    [s0, 128, H]     Axis(0)                  one row is one entry of dim 0
    [4*s0, H]        Axis(0, inner=4)         row-major: each row has 4 neighbouring entries
    [4*s0, H]        Axis(0, outer=4)         the batch was second: rows repeat 4 times
    [s0//4, H]       Axis(0, deal=...)        dealt: this rank's share, one of four

Sizes are sympy expressions, as shapes of fake tensors have them; `Symbols` reads them and knows
which symbol is the batch (several, if they were declared to be one and the same).

A row rule takes an `AtenCall` and returns the `Axis` of its results (one for all, or a list), or
raises `Mixing`. `sizes` names the arguments that may depend on the batch size without harm,
because they only say how large the result is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from torchweft.errors import SizeError
from torchweft.plan.graph import Batch, Deal
from torchweft.plan.sizes import Size
from torchweft.private.core import (
    FloorDiv,
    OpOverload,
    OpOverloadPacket,
    decomposition_table,
    tree_leaves,
)

ONE = sympy.Integer(1)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
Order = tuple[int, ...]
"""The dims of a tensor, from the outermost in memory to the innermost."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Dim `dim` has outer * (batch rows) * inner entries.

    step: the entries are 0, step, 2 * step ..., by the number of the row; zero if they are not.
    deal: of a dealt value, whose entries are divided by its ranks.
    """

    dim: int
    outer: Any = ONE
    inner: Any = ONE
    step: Any = 0
    deal: Deal | None = None

    def at(self, dim: int) -> Axis:
        """The same rows, on another dim."""
        return replace(self, dim=dim)

    def uncounted(self) -> Axis:
        """The same rows, whatever their entries are."""
        return replace(self, step=0)

    def batch(self) -> Batch:
        """The same as part of a graph. Raises `SizeError` if a size is no polynomial."""
        return Batch(self.dim, size_of(self.outer), size_of(self.inner), self.deal)


FREE = Axis(-1)  # of a result that a rule knows to be the same whatever rows there are


class Mixing(Exception):  # noqa: N818 - not a failure: a finding
    """A call looks across rows; the text says how."""


def refuse(mixes: object, why: str) -> None:
    """Raise `Mixing` if rows would meet."""
    if mixes:
        raise Mixing(why)


@dataclass(frozen=True)
class Symbols:
    """Reads sizes: `batch` is the symbol that a split cuts, `same` are other names for it.

    unit: the batch and each part are multiples of it, so `2*(s0//2)` is `s0`. undealt: why rows
    may not be dealt out to ranks; empty if they may.
    """

    batch: Any = None
    same: frozenset[Any] = field(default=frozenset())
    unit: int = 1
    undealt: str = ""

    def expr(self, size: Any) -> Any:
        """A size (int or symbolic) as a sympy expression; in shares of the batch it is rational."""
        if not isinstance(size, SYMBOLIC):
            return sympy.sympify(size)
        expr = size.node.expr
        if self.same:
            expr = expr.xreplace(dict.fromkeys(self.same, self.batch))
        if self.unit > 1 and expr.has(FloorDiv) and self.in_expr(expr):
            return _in_units(expr, self.batch, self.unit)
        return expr

    def shape(self, tensor: torch.Tensor) -> list[Any]:
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

    def several(self, size: Any, *, of_one: bool = False) -> bool:
        """Whether a size is more than one in every part: parts meet the guards of the whole, but
        for that they may have one row (of_one)."""
        expr = self.expr(size).xreplace({self.batch: ONE}) if of_one else self.expr(size)
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
        if axis.deal is not None and axis.deal.rounded:
            wanted = FloorDiv(wanted + axis.deal.num_ranks - 1, axis.deal.num_ranks)
            wanted = _in_units(wanted, self.batch, self.unit) if wanted.has(FloorDiv) else wanted
        elif axis.deal is not None:
            wanted /= axis.deal.num_ranks
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


@lru_cache(maxsize=4096)
def _in_units(expr: Any, batch: Any, unit: int) -> Any:
    """An expression with divisions of the batch done, where the batch is a multiple of `unit`."""
    count = sympy.Symbol("count", integer=True, positive=True)
    divided = expr.subs(batch, unit * count)
    return expr if divided.has(FloorDiv) else divided.subs(count, batch / unit)


def size_of(expr: Any) -> Size:
    """A sympy expression as a `Size`. Raises `SizeError` where it is no integer arithmetic."""
    if isinstance(expr, int):
        return Size.of(expr)
    if isinstance(expr, sympy.Expr) and not expr.is_integer:
        over, under = sympy.fraction(sympy.together(expr))
        if under.is_Integer and under != 1:  # shares of the batch, which is a multiple of its unit
            return Size.parse(f"({size_of(over)})//{under}")
    if not getattr(expr, "is_integer", False):
        raise SizeError(f"size: {expr} is not known to be an integer.")
    return Size.parse(str(expr))


def rows_apart(tensor: Any, batch: Batch, rows: int) -> Any:
    """A view of a tensor of so many rows: their dim as three, outer, rows, inner."""
    outer, total = batch.outer.constant, tensor.shape[batch.dim] // rows
    inner = batch.inner.constant if outer is None else total // outer
    assert inner is not None, "rows with a symbolic stride inside an outer dim"
    return tensor.unflatten(batch.dim, (total // inner, rows, inner))


def rows_at(tensor: Any, batch: Batch, rows: int, chosen: torch.Tensor) -> Any:
    """Some of the rows of a tensor, by their numbers, copied."""
    apart = rows_apart(tensor, batch, rows).index_select(batch.dim + 1, chosen)
    return apart.flatten(batch.dim, batch.dim + 2)


def order_of(tensor: torch.Tensor) -> Order | None:
    """The order in which the dims of a tensor without gaps lie in memory; None if it has gaps.

    A dim of one entry stays where it is. Of a fake tensor, by what its sizes are at the time.
    """
    shape, stride = (
        [int(size.node.hint if isinstance(size, torch.SymInt) else size) for size in sizes]
        for sizes in (tensor.shape, tensor.stride())
    )
    moving = [dim for dim in range(len(shape)) if shape[dim] != 1]
    if 0 in shape:
        return tuple(range(len(shape)))
    places = iter(sorted(moving, key=lambda dim: -stride[dim]))
    order = tuple(next(places) if dim in moving else dim for dim in range(len(shape)))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != step:
            return None
        step *= shape[dim]
    return order


def wrap(dim: int, rank: int) -> int:
    """A dim that may count from the end, counted from the front."""
    return dim + rank if dim < 0 else dim


def agreed(axes: Sequence[Axis | None]) -> Axis | None:
    """The one axis that all have who have any. Raises `Mixing` if two differ."""
    unlike = list(dict.fromkeys(axis for axis in axes if axis is not None))
    if len(unlike) > 1:
        raise Mixing("its operands have their rows in different places")
    return unlike[0] if unlike else None


Axes = Axis | None | list[Axis | None]


@dataclass(frozen=True)
class AtenCall:
    """Arguments by the schema's names, results as a flat list, axes of all tensors.

    lone: takes why a part of one row would not do, where a rule finds that.
    """

    name: str
    func: Any
    given: tuple[tuple[Any, ...], Mapping[str, Any]]
    args: Mapping[str, Any]
    results: list[torch.Tensor]
    symbols: Symbols
    axis_of: Callable[[torch.Tensor], Axis | None]
    level: str = "torch"
    lone: list[str] = field(default_factory=list)

    def axis(self, name: str) -> Axis | None:
        """The axis of a tensor argument; None if it has none or was not given."""
        tensor = self.args.get(name)
        return self.axis_of(tensor) if isinstance(tensor, torch.Tensor) else None

    def rows(self, name: str, why: str = "its result has no clear rows") -> Axis:
        """The axis of a tensor argument. Raises `Mixing` if it has none."""
        axis = self.axis(name)
        if axis is None:
            raise Mixing(why)
        return axis

    def rank(self, name: str) -> int:
        return int(self.args[name].dim())

    def dim(self, name: str = "dim") -> int:
        """An argument that is a dim of `self`, counted from the front."""
        return wrap(self.args[name], self.rank("self"))

    def dims(self, name: str, rank: int) -> list[int] | None:
        """Dims given as one or as a list, counted from the front; None for all."""
        given = self.args.get(name)
        if given is None or given == []:
            return None
        return [wrap(dim, rank) for dim in (given if isinstance(given, list | tuple) else [given])]

    def aligned(self, tensors: Sequence[torch.Tensor], rank: int) -> list[Axis | None]:
        """The axes of tensors as they are spread to `rank` dims, from the right."""
        axes = [(self.axis_of(tensor), rank - tensor.dim()) for tensor in tensors]
        return [axis and axis.at(axis.dim + shift) for axis, shift in axes]

    def shares(self, tensor: torch.Tensor, axis: Axis, rank: int) -> bool:
        """Whether an operand fits rows at `axis` of `rank` dims, counted from the right: it has
        its own there, or one entry for all. As many entries as the whole batch has are neither."""
        shift, [own] = rank - tensor.dim(), self.aligned([tensor], rank)
        if own is not None:
            return own == axis
        return axis.dim < shift or self.symbols.expr(tensor.shape[axis.dim - shift]) == 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        return tensors_in(dict(self.args))

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that it changes in place."""
        written = written_by(self.func, self.args)
        # The schemas of these old operators do not own up to what they write.
        if self.name in ("native_batch_norm", "cudnn_batch_norm") and self.args.get("training"):
            written += tensors_in([self.args.get("running_mean"), self.args.get("running_var")])
        return written


@dataclass(frozen=True)
class RowRule:
    """How one family of operators treats rows; `counts`: whether it may read numbers of rows."""

    find: Callable[[AtenCall], Axes]
    sizes: frozenset[str] = frozenset()
    counts: bool = False


def overload_of(target: Any) -> Any:
    """The operator that a call names, with its schema; None if it is none."""
    func = getattr(target, "default", None) if isinstance(target, OpOverloadPacket) else target
    return func if isinstance(func, OpOverload) else None


def decomposition_of(func: Any) -> Any:
    """The function that says in other operators what this one does; None if PyTorch has none.

    An operator that writes in place is looked up as the one that makes a new tensor.
    """
    namespace, _, name = func._schema.name.partition("::")
    plain = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    func = getattr(plain, func._overloadname, func)
    return decomposition_table.get(func) or (func.decompose if func._can_decompose() else None)


def written_by(func: Any, args: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator changes in place, as its schema says."""
    arguments = [each for each in func._schema.arguments if each.alias_info is not None]
    return tensors_in([args.get(each.name) for each in arguments if each.alias_info.is_write])


def tensors_in(nest: Any) -> list[torch.Tensor]:
    """Every tensor in a nest of results or arguments."""
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


def bind(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults filled in."""
    bound: dict[str, Any] = {}
    for number, argument in enumerate(func._schema.arguments):
        if number < len(args):
            bound[argument.name] = args[number]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def flops_of(func: Any, given: tuple[tuple[Any, ...], Mapping[str, Any]], results: Any) -> Any:
    """Multiplications and additions of one operator (products and attention only), or 0."""
    count = flop_registry.get(func.overloadpacket)
    try:
        flops = count(*given[0], **given[1], out_val=results) if count is not None else 0
    except Exception:  # a count is a help, never a reason to fail
        return 0
    return flops.node.expr if isinstance(flops, SYMBOLIC) else flops
