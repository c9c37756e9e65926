"""The `AtenCall`: one ATen operator at work on fake tensors, as the row rules see it.

A rule takes an `AtenCall` and returns the `Axis` of its results (one for all, or a list), or
raises `Mixing`. `sizes` names the arguments that may depend on the batch size without harm,
because they only say how large the result is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils.flop_counter import flop_registry

from torchweft.capture.rows.axes import SYMBOLIC, Axis, Mixing, Symbols, wrap
from torchweft.private.core import OpOverload, OpOverloadPacket, decomposition_table, tree_leaves

Axes = Axis | None | list[Axis | None]


@dataclass(frozen=True)
class AtenCall:
    """Arguments by the schema's names, results as a flat list, axes of all tensors."""

    name: str
    func: Any
    given: tuple[tuple[Any, ...], Mapping[str, Any]]
    args: Mapping[str, Any]
    results: list[torch.Tensor]
    symbols: Symbols
    axis_of: Callable[[torch.Tensor], Axis | None]
    level: str = "torch"

    def axis(self, name: str) -> Axis | None:
        """The axis of a tensor argument; None if it has none or was not given."""
        tensor = self.args.get(name)
        return self.axis_of(tensor) if isinstance(tensor, torch.Tensor) else None

    def rows(self, name: str) -> Axis:
        """The axis of a tensor argument. Raises `Mixing` if it has none."""
        axis = self.axis(name)
        if axis is None:
            raise Mixing("its result has no clear rows")
        return axis

    def rank(self, name: str) -> int:
        """How many dims a tensor argument has."""
        return int(self.args[name].dim())

    def dims(self, name: str, rank: int) -> list[int] | None:
        """Dims given as one or as a list, counted from the front; None for all."""
        given = self.args.get(name)
        if given is None or given == []:
            return None
        return [wrap(dim, rank) for dim in (given if isinstance(given, list | tuple) else [given])]

    def shares(self, tensor: torch.Tensor, axis: Axis, rank: int) -> bool:
        """Whether an operand fits rows at `axis` of `rank` dims, counted from the right: it has
        its own there, or one entry for all. As many entries as the whole batch has are neither."""
        shift, own = rank - tensor.dim(), self.axis_of(tensor)
        if own is not None:
            return own.at(own.dim + shift) == axis
        return axis.dim < shift or self.symbols.expr(tensor.shape[axis.dim - shift]) == 1

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor among the arguments."""
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


def flops_of(aten: AtenCall) -> Any:
    """Multiplications and additions of one operator (products and attention only), or 0."""
    count = flop_registry.get(aten.func.overloadpacket)
    if count is None:
        return 0
    try:
        result = aten.results[0] if len(aten.results) == 1 else tuple(aten.results)
        flops = count(*aten.given[0], **aten.given[1], out_val=result)
    except Exception:  # a count is a help, never a reason to fail
        return 0
    return flops.node.expr if isinstance(flops, SYMBOLIC) else sympy.Integer(flops)
