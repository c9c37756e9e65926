"""Row rules for arithmetic: pointwise calls, matrix products, reductions, norms, attention.

A pointwise call keeps rows where they are; a reduction or a product over the batch mixes them.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweft.capture.rows.aten_call import AtenCall, Axes
from torchweft.capture.rows.axes import FREE, ONE, Axis, Mixing, agreed

NO_ROWS = "an operand has an entry for each row, but no rows"
VECTORS = ("pivots", "LU_pivots", "tau")  # operands of one dim less than the matrices beside them


def pointwise(call: AtenCall) -> Axes:
    """Entry by entry, with broadcasting from the right."""
    rank = max((result.dim() for result in call.results), default=0)
    axes: list[Axis | None] = []
    for tensor in call.tensors:
        axis = call.axis_of(tensor)
        axes.append(axis and axis.at(axis.dim + rank - tensor.dim()))
    axis = agreed(axes)
    if axis is not None and not all(call.shares(tensor, axis, rank) for tensor in call.tensors):
        raise Mixing(NO_ROWS)
    return axis


def along(call: AtenCall) -> Axes:
    """Works along one or several dims and keeps them: softmax, cumsum, sort, flip, roll, fft."""
    axis = agreed([call.axis_of(tensor) for tensor in call.tensors])
    name = next(name for name in ("dim", "dims", "dimension") if name in call.args)
    dims = call.dims(name, call.tensors[0].dim())
    if axis is not None and (dims is None or axis.dim in dims):
        raise Mixing(f"{call.name} works along the batch")
    return axis


def reduce(call: AtenCall) -> Axes:
    """Takes dims away (or to size one): sum, mean, max, var, norm."""
    axis, rank = call.rows("self"), call.rank("self")
    dims = call.dims("dim", rank)
    if dims is None or axis.dim in dims:
        raise Mixing(f"{call.name} over the batch")
    dropped = 0 if call.args.get("keepdim") else sum(dim < axis.dim for dim in set(dims))
    return axis.at(axis.dim - dropped)


def matrices(call: AtenCall) -> Axes:
    """Works on the last two dims, and treats those before one by one."""
    given = {n: t for n, t in call.args.items() if isinstance(t, torch.Tensor)}
    ranks = {n: t.dim() - 2 + (n in VECTORS) for n, t in given.items()}
    rank = max(ranks.values())
    axes = {n: call.axis_of(t) for n, t in given.items()}
    axis = agreed([a and a.at(a.dim + rank - ranks[n]) for n, a in axes.items()])
    if axis is None:
        return None
    if axis.dim >= rank:
        raise Mixing(f"{call.name} works across the batch")
    alone = [n for n, a in axes.items() if a is None and ranks[n] > rank - 1 - axis.dim]
    if any(call.symbols.expr(given[n].shape[axis.dim - rank + ranks[n]]) != 1 for n in alone):
        raise Mixing(NO_ROWS)
    return axis


def matmul(call: AtenCall) -> Axes:
    """mm, bmm, mv and their forms with a bias: rows may be one side of it, but are never summed."""
    left = next(name for name in ("batch1", "mat1", "mat", "self") if name in call.args)
    right = next(name for name in ("batch2", "mat2", "vec") if name in call.args)
    rank = call.rank(left)
    first, second = call.axis(left), call.axis(right)
    if (first and first.dim == rank - 1) or (second and second.dim == rank - 2):
        raise Mixing("the product sums over the batch")
    if first and second and not (first == second and first.dim < rank - 2):
        raise Mixing("the product pairs rows of one batch with rows of another")
    axis = first or second
    if axis and not (first and second) and axis.dim < rank - 2:
        raise Mixing("the product pairs rows with entries that have none")
    if left != "self" and (bias := call.axis("self")) is not None:
        axis = agreed([axis, bias.at(bias.dim + call.results[0].dim() - call.rank("self"))])
    return axis


def trilinear(call: AtenCall) -> Axes:
    """Three operands, spread by dims of size one (`expand`), multiplied, summed over `sumdim`."""
    axes: list[Axis | None] = []
    sizes: list[list[Any]] = []
    for number in "123":
        axis, shape = call.axis(f"i{number}"), call.symbols.shape(call.args[f"i{number}"])
        for dim in sorted(call.args[f"expand{number}"]):
            shape.insert(dim, ONE)
            axis = axis and axis.at(axis.dim + (dim <= axis.dim))
        axes.append(axis)
        sizes.append(shape)
    axis = agreed(axes)
    if axis is None or axis.dim in call.args["sumdim"]:
        raise Mixing("the product sums over the batch")
    if any(own is None and shape[axis.dim] != 1 for own, shape in zip(axes, sizes, strict=True)):
        raise Mixing(NO_ROWS)
    return axis.at(axis.dim - sum(dim < axis.dim for dim in call.args["sumdim"]))


def weighted(call: AtenCall) -> Axes:
    """Linear maps, convolutions and norms: rows stand left of the dims that meet each other."""
    axis, shape = call.axis("input"), call.args.get("normalized_shape", [1])
    if call.axis("weight") or call.axis("bias"):
        raise Mixing("its weight has the batch in it")
    sums_last = call.name == "linear" or "normalized_shape" in call.args
    if axis is not None and axis.dim >= (call.rank("input") - len(shape) if sums_last else 1):
        raise Mixing(f"{call.name} works across the batch")
    return axis


def batch_norm(call: AtenCall) -> Axes:
    """Row-wise when it uses running statistics, or when the batch lies in the channels."""
    axis = call.axis("input")
    training = not call.name.endswith("_no_training") and call.args.get(
        "training", call.args.get("train", True)
    )
    if axis is None:
        raise Mixing("its statistics have the batch in them")
    others = [call.args.get(n) for n in ("weight", "bias", "running_mean", "running_var")]
    if axis.dim == 1:
        for other in others:
            if isinstance(other, torch.Tensor) and call.axis_of(other) != axis.at(0):
                raise Mixing("its statistics are shared by all rows")
        axes: list[Axis | None] = [axis]
        return axes + [axis.at(0) if result.numel() != 0 else None for result in call.results[1:]]
    if training:
        raise Mixing("batch norm in training takes its statistics over the batch")
    if any(isinstance(other, torch.Tensor) and call.axis_of(other) for other in others):
        raise Mixing("its statistics have the batch in them")
    return [axis] + [None] * (len(call.results) - 1)


def attention(call: AtenCall) -> Axes:
    """Scaled dot product attention: dims left of the last two are treated one by one."""
    query = call.axis("query")
    if query is None or query.dim >= call.rank("query") - 2:
        raise Mixing("attention looks across rows")
    if call.axis("key") != query or call.axis("value") != query:
        raise Mixing("its keys and values have their rows elsewhere")
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    if isinstance(mask, torch.Tensor) and not call.shares(mask, query, call.rank("query")):
        raise Mixing("its mask has rows elsewhere")
    return [query if call.symbols.fits(query, result) else None for result in call.results]


def encoder_layer(call: AtenCall) -> Axes:
    """The fused encoder layer: [batch, tokens, hidden], rows first in all that have any."""
    axis = agreed([call.axis_of(tensor) for tensor in call.tensors])
    if axis is None or axis.dim != 0 or call.axis("src" if "src" in call.args else "query") != axis:
        raise Mixing("the fused layer wants the batch first")
    if call.args.get("mask") is not None and (call.args["mask_type"] == 0) == bool(
        call.axis("mask")
    ):
        raise Mixing("its mask has rows elsewhere")  # type 0 is one mask for all rows
    return [axis if call.symbols.dims(result) == [0] else None for result in call.results]


def loss(call: AtenCall) -> Axes:
    """nll_loss and other losses with `reduction`: row-wise only where nothing is summed."""
    if call.args.get("reduction", 1) != 0 or call.axis("weight"):
        raise Mixing("a loss over the batch")
    axis = call.axis("self")
    if axis is None or axis.dim != 0 or call.axis("target") != axis:
        raise Mixing("a loss over the batch")
    return [axis, *[FREE for _ in call.results[1:]]]
