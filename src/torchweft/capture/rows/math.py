"""Row rules for arithmetic and its gradients: products, reductions, norms, attention, losses.

A pointwise call keeps rows where they are; a reduction or a product over the batch mixes them. A
gradient of a batch has its rows where the batch has them. A gradient of a weight is a *sum* over
rows: parts of it add up, so the call is additive and not mixing (`is_sum`).

    mm([H, s0], [s0, K])  -> [H, K]        sums over s0: additive
    sum([s0, K], dim 0)   -> [K]           additive
    mean([s0, K], dim 0)  -> [K]           mixing: it divides by the number of rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from torchweft.capture.rows.axes import (
    FREE,
    ONE,
    AtenCall,
    Axes,
    Axis,
    Mixing,
    agreed,
    exact,
    refuse,
    same,
    wrap,
)
from torchweft.capture.rows.shape import front, given_places

NO_ROWS = "an operand has an entry for each row, but no rows"
SUMS_ROWS = "the product sums over the batch"
STATISTICS = "its statistics have the batch in them"
LOSS = "a loss over the batch"
ACROSS = "attention looks across rows"
VECTORS = ("pivots", "LU_pivots", "tau")  # operands of one dim less than the matrices beside them
GRADIENTS = ("grad_output", "grad_out", "grad_out_", "grad", "grad_in")


def pointwise(call: AtenCall) -> Axes:
    """Entry by entry, with broadcasting from the right."""
    rank = max((result.dim() for result in call.results), default=0)
    axis = agreed(call.aligned(call.tensors, rank))
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
    axis, dims = call.rows("self"), call.dims("dim", call.rank("self"))
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
    refuse(axis.dim >= rank, f"{call.name} works across the batch")
    alone = [n for n, a in axes.items() if a is None and ranks[n] > rank - 1 - axis.dim]
    sizes = [given[n].shape[axis.dim - rank + ranks[n]] for n in alone]
    refuse(any(call.symbols.expr(size) != 1 for size in sizes), NO_ROWS)
    return axis


def matmul(call: AtenCall) -> Axes:
    """mm, bmm, mv and their forms with a bias: rows may be one side of it, but are never summed."""
    left = next(name for name in ("batch1", "mat1", "mat", "self") if name in call.args)
    right = next(name for name in ("batch2", "mat2", "vec") if name in call.args)
    rank = call.rank(left)
    first, second = call.axis(left), call.axis(right)
    if (first and first.dim == rank - 1) or (second and second.dim == rank - 2):
        raise Mixing(SUMS_ROWS)
    if first and second and not (first == second and first.dim < rank - 2):
        raise Mixing("the product pairs rows of one batch with rows of another")
    axis = first or second
    if axis and not (first and second) and axis.dim < rank - 2:
        raise Mixing("the product pairs rows with entries that have none")
    if left != "self":
        axis = agreed([axis, *call.aligned([call.args["self"]], call.results[0].dim())])
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
        raise Mixing(SUMS_ROWS)
    if any(own is None and shape[axis.dim] != 1 for own, shape in zip(axes, sizes, strict=True)):
        raise Mixing(NO_ROWS)
    return axis.at(axis.dim - sum(dim < axis.dim for dim in call.args["sumdim"]))


def weighted(call: AtenCall) -> Axes:
    """Linear maps, convolutions and norms: rows stand left of the dims that meet each other."""
    axis, shape = call.axis("input"), call.args.get("normalized_shape", [1])
    refuse(call.axis("weight") or call.axis("bias"), "its weight has the batch in it")
    sums_last = call.name == "linear" or "normalized_shape" in call.args
    if axis is not None and axis.dim >= (call.rank("input") - len(shape) if sums_last else 1):
        raise Mixing(f"{call.name} works across the batch")
    return axis


def batch_norm(call: AtenCall) -> Axes:
    """Row-wise when it uses running statistics, or when the batch lies in the channels."""
    axis = call.rows("input", STATISTICS)
    trains = call.args.get("training", call.args.get("train", True))
    others = [call.args.get(n) for n in ("weight", "bias", "running_mean", "running_var")]
    theirs = [call.axis_of(other) for other in others if isinstance(other, torch.Tensor)]
    if axis.dim == 1:
        alike = all(other == axis.at(0) for other in theirs)
        refuse(not alike, "its statistics are shared by all rows")
        made = call.results[1:]
        return [axis, *(axis.at(0) if result.numel() != 0 else None for result in made)]
    if trains and not call.name.endswith("_no_training"):
        raise Mixing("batch norm in training takes its statistics over the batch")
    refuse(any(theirs), STATISTICS)
    return [axis] + [None] * (len(call.results) - 1)


def attention(call: AtenCall) -> Axes:
    """Scaled dot product attention: dims left of the last two are treated one by one."""
    query = call.rows("query", ACROSS)
    refuse(query.dim >= call.rank("query") - 2, ACROSS)
    if not all(_serves(call, name, query) for name in ("key", "value")):
        raise Mixing("its keys and values have their rows elsewhere")
    mask = call.args.get("attn_mask", call.args.get("attn_bias"))
    if isinstance(mask, torch.Tensor) and not call.shares(mask, query, call.rank("query")):
        raise Mixing("its mask has rows elsewhere")
    return [query if call.symbols.fits(query, result) else None for result in call.results]


def _serves(call: AtenCall, name: str, query: Axis) -> bool:
    """Whether keys stand where their queries do; each may serve several in a row, one may all."""
    own = call.axis(name)
    sizes = [call.symbols.expr(call.args[each].shape[query.dim]) for each in ("query", name)]
    times = exact(*sizes)
    if own is None or times is None:
        return bool(sizes[1] == 1)
    return own == replace(query, inner=exact(query.inner, times) or ONE * 0)


def encoder_layer(call: AtenCall) -> Axes:
    """The fused encoder layer: [batch, tokens, hidden], rows first in all that have any."""
    axis = agreed([call.axis_of(tensor) for tensor in call.tensors])
    if axis is None or axis.dim != 0 or call.axis("src" if "src" in call.args else "query") != axis:
        raise Mixing("the fused layer wants the batch first")
    masked = call.args.get("mask") is not None  # type 0 is one mask for all rows
    if masked and (call.args["mask_type"] == 0) == bool(call.axis("mask")):
        raise Mixing("its mask has rows elsewhere")
    return [axis if call.symbols.dims(result) == [0] else None for result in call.results]


def loss(call: AtenCall) -> Axes:
    """nll_loss and its like: row-wise only where nothing is summed."""
    refuse(call.args["reduction"] != 0 or call.axis("weight"), LOSS)
    axis = call.rows("self", LOSS)
    refuse(axis.dim != 0 or call.axis("target") != axis, LOSS)
    return [axis, *[FREE for _ in call.results[1:]]]


# Gradients.


def gradient(call: AtenCall) -> Axis | None:
    """The axis of the gradient that comes in."""
    return call.axis(next(name for name in GRADIENTS if name in call.args))


def row_by_row(call: AtenCall) -> Axis | None:
    """The rows of what a norm or a convolution was given, if no gradient of theirs meets another.

    Those of the weights are sums over rows.
    """
    axis, shape = call.axis("input"), call.args.get("normalized_shape")
    if axis is None or axis != gradient(call) or call.args.get("train"):
        return None
    apart = axis.dim == 0 if shape is None else axis.dim < call.rank("input") - len(shape)
    return axis if apart else None


def of_input(call: AtenCall) -> Axes:
    """The gradient of what a norm or a convolution was given."""
    axis = row_by_row(call)
    refuse(axis is None, "its gradients look across rows")
    weights = any(call.args["output_mask"][1:])
    refuse(weights, "the gradients of its weights are sums over the batch")
    return axis


def scatter_backward(call: AtenCall) -> Axes:
    """slice_backward, select_backward: the gradient goes to its place among zeros."""
    axis = gradient(call)
    if axis is None:
        return None
    sizes = list(call.args["input_sizes"])
    dim = wrap(call.args["dim"], len(sizes))
    moved = axis.at(axis.dim + (call.name == "select_backward" and dim <= axis.dim))
    whole = call.symbols.expr(sizes.pop(moved.dim))
    refuse(call.symbols.inside(sizes), "it spreads the batch over several dims")
    if dim == moved.dim:
        given = call.symbols.expr(call.tensors[0].shape[axis.dim])
        if call.name == "slice_backward" and call.args["step"] == 1 and same(whole, given):
            return moved
        raise Mixing("it writes to a piece of the batch")
    places = [call.args.get(name) for name in ("start", "end", "index")]
    refuse(call.symbols.inside(places), "where it writes depends on the batch size")
    return moved


def attention_backward(call: AtenCall) -> Axes:
    query = call.rows("query", ACROSS)
    refuse(query.dim != 0 or query != gradient(call), ACROSS)
    return attention(call)


def nll_loss_backward(call: AtenCall) -> Axes:
    """The divisor of the mean is given, as `total_weight`: rows do not meet."""
    axis = agreed([call.axis("self"), call.axis("target"), gradient(call)])
    if axis is None or axis.dim != 0 or call.axis("total_weight") or call.axis("weight"):
        raise Mixing(LOSS)
    return axis


# Sums over rows.


def is_sum(call: AtenCall, zeros: Mapping[torch.Tensor, bool]) -> bool:
    """Whether a call makes sums over the rows of the batch and nothing else.

    Run on each part of the batch, its results then add up to what it makes of the whole.
    zeros: the tensors that are known to hold nothing but zeros.
    """
    results, mask = call.results, call.args.get("output_mask")
    if mask is not None and len(results) == len(mask):  # some make what nobody asked for
        results = [result for result, wanted in zip(results, mask, strict=True) if wanted]
    if not results or call.written or any(map(call.symbols.dims, results)):
        return False
    if call.name == "index_put" and call.args["self"] not in zeros:
        return False
    if any(map(call.symbols.inside, [arg for n, arg in call.args.items() if n != "N"])):
        return False
    batched = [tensor for tensor in call.tensors if call.symbols.dims(tensor)]
    if not batched or any(call.axis_of(tensor) is None for tensor in batched):
        return False
    dtypes = [result.dtype for result in results]
    adds = all(d.is_floating_point or d.is_complex or d == torch.int64 for d in dtypes)
    find = SUMS.get(call.name)
    return find is not None and adds and find(call)


def _product(call: AtenCall) -> bool:
    """Both operands have the same rows on the dim that is summed over."""
    right = next(name for name in ("mat2", "vec", "tensor") if name in call.args)
    first, second = call.axis("self"), call.axis(right)
    if first is None or second is None:
        return False
    rank = call.rank("self")
    return first.dim == rank - 1 and second.dim == max(0, rank - 2) and first.at(0) == second.at(0)


def _embedding(call: AtenCall) -> bool:
    places = call.axis("indices")
    scaled = call.args["scale_grad_by_freq"]
    return places is not None and places == call.axis("grad_output") and not scaled


def _index_put(call: AtenCall) -> bool:
    """Rows are added to places that they name themselves."""
    given = given_places(call)
    if not call.args["accumulate"] or any(item.dtype == torch.bool for _, item in given):
        return False
    rank = max(item.dim() for _, item in given)
    try:
        places = agreed(call.aligned([item for _, item in given], rank))
    except Mixing:
        return False
    [axis] = call.aligned([call.args["values"]], rank + call.rank("self") - len(given))
    first = front([dim for dim, _ in given])
    return places is not None and axis == places.at(places.dim + first)


def _weights(call: AtenCall) -> bool:
    """The weights' part of a gradient whose input's part was asked for apart."""
    return row_by_row(call) is not None and not call.args["output_mask"][0]


WEIGHTED = """
    native_layer_norm_backward _fused_rms_norm_backward native_group_norm_backward
    native_batch_norm_backward convolution_backward
"""
SUMS: Mapping[str, Callable[[AtenCall], bool]] = MappingProxyType(
    {
        "sum": lambda call: True,  # over a dim that has the batch, or all: the result has none
        **dict.fromkeys(("mm", "bmm", "dot", "vdot", "mv"), _product),
        "embedding_dense_backward": _embedding,
        "index_put": _index_put,
        **dict.fromkeys(WEIGHTED.split(), _weights),
    }
)
