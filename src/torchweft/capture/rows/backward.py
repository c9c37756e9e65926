"""Row rules for backward operators, and the sums over rows that a backward pass is full of.

A gradient of a batch has its rows where the batch has them. A gradient of a weight is a *sum* over
rows: parts of it add up, so the call is additive and not mixing.

    mm([H, s0], [s0, K])  -> [H, K]        sums over s0: additive
    sum([s0, K], dim 0)   -> [K]           additive
    mean([s0, K], dim 0)  -> [K]           mixing: it divides by the number of rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from torchweft.capture.rows import index, math
from torchweft.capture.rows.aten_call import AtenCall, Axes
from torchweft.capture.rows.axes import Axis, Mixing, agreed, same, wrap

MEAN = 1  # a loss with this reduction divides by the number of entries


def gradient(call: AtenCall) -> Axis | None:
    """The axis of the gradient that comes in."""
    name = next(
        n for n in ("grad_output", "grad_out", "grad_out_", "grad", "grad_in") if n in call.args
    )
    return call.axis(name)


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
    if axis is None:
        raise Mixing("its gradients look across rows")
    if any(call.args["output_mask"][1:]):
        raise Mixing("the gradients of its weights are sums over the batch")
    return axis


def scatter(call: AtenCall) -> Axes:
    """slice_backward, select_backward: the gradient goes to its place among zeros."""
    axis = gradient(call)
    if axis is None:
        return None
    dim = wrap(call.args["dim"], len(call.args["input_sizes"]))
    moved = axis.at(axis.dim + (call.name == "select_backward" and dim <= axis.dim))
    sizes = list(call.args["input_sizes"])
    whole = call.symbols.expr(sizes.pop(moved.dim))
    if call.symbols.inside(sizes):
        raise Mixing("it spreads the batch over several dims")
    if dim == moved.dim:
        given = call.symbols.expr(call.tensors[0].shape[axis.dim])
        if call.name == "slice_backward" and call.args["step"] == 1 and same(whole, given):
            return moved
        raise Mixing("it writes to a piece of the batch")
    places = [call.args.get(name) for name in ("start", "end", "index")]
    if call.symbols.inside(places):
        raise Mixing("where it writes depends on the batch size")
    return moved


def attention(call: AtenCall) -> Axes:
    query = call.axis("query")
    if query is None or query.dim != 0 or query != gradient(call):
        raise Mixing("attention looks across rows")
    return math.attention(call)


def loss(call: AtenCall) -> Axes:
    """Gradients of losses; the mean has a divisor that depends on the batch size."""
    if call.args.get("reduction", MEAN) == MEAN or call.axis("weight"):
        raise Mixing("a loss over the batch")
    return agreed([call.axis("self"), call.axis("target"), gradient(call)])


def nll_loss(call: AtenCall) -> Axes:
    """The divisor of the mean is given, as `total_weight`: rows do not meet."""
    axis = agreed([call.axis("self"), call.axis("target"), gradient(call)])
    if axis is None or axis.dim != 0 or call.axis("total_weight") or call.axis("weight"):
        raise Mixing("a loss over the batch")
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
    given = index.given_places(call)
    if not call.args["accumulate"] or any(item.dtype == torch.bool for _, item in given):
        return False
    rank = max(item.dim() for _, item in given)
    rows = [(call.axis_of(item), rank - item.dim()) for _, item in given]
    try:
        places = agreed([axis and axis.at(axis.dim + shift) for axis, shift in rows])
    except Mixing:
        return False
    values, axis = call.args["values"], call.axis("values")
    shift = rank + call.rank("self") - len(given) - values.dim()
    if places is None or axis is None:
        return False
    front = index.front([dim for dim, _ in given])
    return axis.at(axis.dim + shift) == places.at(places.dim + front)


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
