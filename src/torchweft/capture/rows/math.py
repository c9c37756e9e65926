"""Row rules for arithmetic: pointwise calls, matrix products, reductions, norms, attention.

A pointwise call keeps rows where they are; a reduction or a product over the batch mixes them.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweft.capture.rows.aten_call import AtenCall, Found
from torchweft.capture.rows.axes import FREE, ONE, Axis, Mixes, agreed

NO_ROWS = "an operand has an entry for each row, but no rows"
VECTORS = ("pivots", "LU_pivots", "tau")  # operands of one dim less than the matrices beside them


def pointwise(call: AtenCall) -> Found:
    """Entry by entry, with broadcasting from the right."""
    rank = max((result.dim() for result in call.results), default=0)
    axes: list[Axis | None] = []
    for tensor in call.tensors:
        axis = call.axis_of(tensor)
        axes.append(axis and axis.at(axis.dim + rank - tensor.dim()))
    axis = agreed(axes)
    if axis is not None and not all(call.shares(tensor, axis, rank) for tensor in call.tensors):
        raise Mixes(NO_ROWS)
    return axis


def along(call: AtenCall) -> Found:
    """Works along one or several dims and keeps them: softmax, cumsum, sort, flip, roll."""
    axis = call.rows("self")
    name = "dims" if "dims" in call.args else "dim"
    dims = call.dims(name, call.rank("self"))
    if dims is None or axis.dim in dims:
        raise Mixes(f"{call.name} works along the batch")
    return axis


def reduce(call: AtenCall) -> Found:
    """Takes dims away (or to size one): sum, mean, max, var, norm."""
    axis, rank = call.rows("self"), call.rank("self")
    dims = call.dims("dim", rank)
    if dims is None or axis.dim in dims:
        raise Mixes(f"{call.name} over the batch")
    dropped = 0 if call.args.get("keepdim") else sum(dim < axis.dim for dim in set(dims))
    return axis.at(axis.dim - dropped)


def last_dims(num_dims: int) -> Any:
    """A rule for calls that work on the last dims and treat those before one by one."""

    def find(call: AtenCall) -> Found:
        given = {n: t for n, t in call.args.items() if isinstance(t, torch.Tensor)}
        ranks = {n: t.dim() - num_dims + (n in VECTORS) for n, t in given.items()}
        rank = max(ranks.values())
        axes = {n: call.axis_of(t) for n, t in given.items()}
        axis = agreed([a and a.at(a.dim + rank - ranks[n]) for n, a in axes.items()])
        if axis is None:
            return None
        if axis.dim >= rank:
            raise Mixes(f"{call.name} works across the batch")
        alone = [n for n, a in axes.items() if a is None and ranks[n] > rank - 1 - axis.dim]
        if any(call.symbols.expr(given[n].shape[axis.dim - rank + ranks[n]]) != 1 for n in alone):
            raise Mixes(NO_ROWS)
        return axis

    return find


def matmul(call: AtenCall) -> Found:
    """mm, bmm and their forms with a bias: rows may be one side of it, but are never summed."""
    left, right = ("mat1", "mat2") if "mat1" in call.args else ("self", "mat2")
    if "batch1" in call.args:
        left, right = "batch1", "batch2"
    elif "vec2" in call.args or "vec" in call.args:
        return _matvec(call)
    rank = call.rank(left)
    first, second = call.axis(left), call.axis(right)
    if (first and first.dim == rank - 1) or (second and second.dim == rank - 2):
        raise Mixes("the product sums over the batch")
    if first and second and not (first == second and first.dim < rank - 2):
        raise Mixes("the product pairs rows of one batch with rows of another")
    if (first or second) and (not first or not second) and (first or second).dim < rank - 2:  # type: ignore[union-attr]
        raise Mixes("the product pairs rows with entries that have none")
    axis = first or second
    if "self" in call.args and left != "self" and (bias := call.axis("self")) is not None:
        moved = bias.at(bias.dim + call.results[0].dim() - call.rank("self"))
        axis = agreed([axis, moved])
    return axis


def _matvec(call: AtenCall) -> Found:
    matrix = "mat" if "mat" in call.args else "self"
    vector = "vec" if "vec" in call.args else "vec2"
    axis = call.axis(matrix)
    if call.axis(vector) is not None or (axis is not None and axis.dim != 0):
        raise Mixes("the product sums over the batch")
    if matrix != "self" and call.axis("self") is not None:
        return agreed([axis, call.axis("self")])
    return axis


def trilinear(call: AtenCall) -> Found:
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
        raise Mixes("the product sums over the batch")
    if any(own is None and shape[axis.dim] != 1 for own, shape in zip(axes, sizes, strict=True)):
        raise Mixes(NO_ROWS)
    return axis.at(axis.dim - sum(dim < axis.dim for dim in call.args["sumdim"]))


def linear(call: AtenCall) -> Found:
    axis = call.axis("input")
    if call.axis("weight") or call.axis("bias"):
        raise Mixes("its weight has the batch in it")
    if axis is not None and axis.dim == call.rank("input") - 1:
        raise Mixes("the product sums over the batch")
    return axis


def layer_norm(call: AtenCall) -> Found:
    axis = call.axis("input")
    rank = call.rank("input")
    if call.axis("weight") or call.axis("bias"):
        raise Mixes("its weight has the batch in it")
    if axis is not None and axis.dim >= rank - len(call.args["normalized_shape"]):
        raise Mixes("it normalises over the batch")
    return axis


def group_norm(call: AtenCall) -> Found:
    axis = call.axis("input")
    if axis is None or axis.dim != 0 or call.axis("weight") or call.axis("bias"):
        raise Mixes("it normalises over the batch")
    return axis


def batch_norm(call: AtenCall) -> Found:
    """Row-wise when it uses running statistics, or when the batch lies in the channels."""
    axis = call.axis("input")
    training = not call.name.endswith("_no_training") and call.args.get(
        "training", call.args.get("train", True)
    )
    if axis is None:
        raise Mixes("its statistics have the batch in them")
    others = [call.args.get(n) for n in ("weight", "bias", "running_mean", "running_var")]
    if axis.dim == 1:
        for other in others:
            if isinstance(other, torch.Tensor) and call.axis_of(other) != axis.at(0):
                raise Mixes("its statistics are shared by all rows")
        axes: list[Axis | None] = [axis]
        return axes + [axis.at(0) if result.numel() != 0 else None for result in call.results[1:]]
    if training:
        raise Mixes("batch norm in training takes its statistics over the batch")
    if any(isinstance(other, torch.Tensor) and call.axis_of(other) for other in others):
        raise Mixes("its statistics have the batch in them")
    return [axis] + [None] * (len(call.results) - 1)


def attention(call: AtenCall) -> Found:
    """Scaled dot product attention: dims left of the last two are treated one by one."""
    query = call.axis("query")
    if query is None or query.dim >= call.rank("query") - 2:
        raise Mixes("attention looks across rows")
    if call.axis("key") != query or call.axis("value") != query:
        raise Mixes("its keys and values have their rows elsewhere")
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    if isinstance(mask, torch.Tensor) and not call.shares(mask, query, call.rank("query")):
        raise Mixes("its mask has rows elsewhere")
    return [query if call.symbols.fits(query, result) else None for result in call.results]


def encoder_layer(call: AtenCall) -> Found:
    """The fused encoder layer: [batch, tokens, hidden], rows first in all that have any."""
    axis = agreed([call.axis_of(tensor) for tensor in call.tensors])
    if axis is None or axis.dim != 0 or call.axis("src" if "src" in call.args else "query") != axis:
        raise Mixes("the fused layer wants the batch first")
    if call.args.get("mask") is not None and (call.args["mask_type"] == 0) == bool(
        call.axis("mask")
    ):
        raise Mixes("its mask has rows elsewhere")  # type 0 is one mask for all rows
    return [axis if call.symbols.dims(result) == [0] else None for result in call.results]


def cross_entropy(call: AtenCall) -> Found:
    """nll_loss and other losses with `reduction`: row-wise only where nothing is summed."""
    if call.args.get("reduction", 1) != 0 or call.axis("weight"):
        raise Mixes("a loss over the batch")
    axis = call.axis("self")
    if axis is None or axis.dim != 0 or call.axis("target") != axis:
        raise Mixes("a loss over the batch")
    return [axis, *[FREE for _ in call.results[1:]]]
