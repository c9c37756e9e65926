"""Row rules for backward operators, and the sums over rows that a backward pass is full of.

A gradient of a batch has its rows where the batch has them. A gradient of a weight is a *sum* over
rows: parts of it add up, so the call is additive and not mixing.

    mm([H, s0], [s0, K])  -> [H, K]        sums over s0: additive
    sum([s0, K], dim 0)   -> [K]           additive
    mean([s0, K], dim 0)  -> [K]           mixing: it divides by the number of rows
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from torchweft.capture.rows import index, math
from torchweft.capture.rows.aten_call import AtenCall, Found, RowRule
from torchweft.capture.rows.axes import Axis, Mixes, agreed, same, wrap

POINTWISE = """
    elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_backward mish_backward softplus_backward _prelu_kernel_backward threshold_backward
    gelu_backward silu_backward tanh_backward sigmoid_backward native_dropout_backward
    rrelu_with_noise_backward logit_backward
"""
WINDOWS = {
    1: "reflection_pad1d_backward replication_pad1d_backward upsample_linear1d_backward",
    2: """avg_pool2d_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward
          max_pool2d_with_indices_backward reflection_pad2d_backward replication_pad2d_backward
          upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
          _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa_backward""",
    3: """avg_pool3d_backward _adaptive_avg_pool3d_backward adaptive_max_pool3d_backward
          max_pool3d_with_indices_backward upsample_nearest3d_backward""",
}
LOSSES = """
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward
    binary_cross_entropy_backward
"""
ATTENTION = """
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward
"""
INTO_ZEROS = ("index_put",)
MEAN = 1  # a loss with this reduction divides by the number of entries


def gradient(call: AtenCall) -> Axis | None:
    """The axis of the gradient that comes in."""
    name = next(
        n for n in ("grad_output", "grad_out", "grad_out_", "grad", "grad_in") if n in call.args
    )
    return call.axis(name)


def along(call: AtenCall) -> Found:
    """Works along one dim and keeps it: the gradients of softmax and glu."""
    axis = agreed([call.axis_of(tensor) for tensor in call.tensors])
    if axis is not None and axis.dim == wrap(call.args["dim"], call.tensors[0].dim()):
        raise Mixes(f"{call.name} works along the batch")
    return axis


def norm_input(call: AtenCall) -> Found:
    """The gradient of what was normalised; those of weight and bias are sums."""
    axis = call.axis("input")
    mask = call.args["output_mask"]
    if axis is None or axis != gradient(call) or any(mask[1:]):
        raise Mixes("the gradients of its weights are sums over the batch")
    if "normalized_shape" in call.args:
        if axis.dim >= call.rank("input") - len(call.args["normalized_shape"]):
            raise Mixes("it normalises over the batch")
    elif axis.dim != 0:
        raise Mixes("it normalises over the batch")
    return axis


def batch_norm(call: AtenCall) -> Found:
    if call.args.get("train", True):
        raise Mixes("batch norm in training takes its statistics over the batch")
    return norm_input(call)


def convolution(call: AtenCall) -> Found:
    axis = call.axis("input")
    if axis is None or axis.dim != 0 or axis != gradient(call) or any(call.args["output_mask"][1:]):
        raise Mixes("the gradients of its weights are sums over the batch")
    return axis


def scatter(call: AtenCall) -> Found:
    """slice_backward, select_backward: the gradient goes to its place among zeros."""
    axis = gradient(call)
    if axis is None:
        return None
    dim = wrap(call.args["dim"], len(call.args["input_sizes"]))
    moved = axis.at(axis.dim + (call.name == "select_backward" and dim <= axis.dim))
    sizes = list(call.args["input_sizes"])
    whole = call.symbols.expr(sizes.pop(moved.dim))
    if call.symbols.inside(sizes):
        raise Mixes("it spreads the batch over several dims")
    if dim == moved.dim:
        given = call.symbols.expr(call.tensors[0].shape[axis.dim])
        if call.name == "slice_backward" and call.args["step"] == 1 and same(whole, given):
            return moved
        raise Mixes("it writes to a piece of the batch")
    places = [call.args.get(name) for name in ("start", "end", "index")]
    if call.symbols.inside(places):
        raise Mixes("where it writes depends on the batch size")
    return moved


def attention(call: AtenCall) -> Found:
    query = call.axis("query")
    if query is None or query.dim != 0 or query != gradient(call):
        raise Mixes("attention looks across rows")
    return math.attention(call)


def loss(call: AtenCall) -> Found:
    """Gradients of losses; the mean has a divisor that depends on the batch size."""
    if call.args.get("reduction", MEAN) == MEAN or call.axis("weight"):
        raise Mixes("a loss over the batch")
    return agreed([call.axis("self"), call.axis("target"), gradient(call)])


def nll_loss(call: AtenCall) -> Found:
    """The divisor of the mean is given, as `total_weight`: rows do not meet."""
    axis = agreed([call.axis("self"), call.axis("target"), gradient(call)])
    if axis is None or axis.dim != 0 or call.axis("total_weight") or call.axis("weight"):
        raise Mixes("a loss over the batch")
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
    if call.name in INTO_ZEROS and call.args["self"] not in zeros:
        return False
    if any(map(call.symbols.inside, [arg for n, arg in call.args.items() if n != "N"])):
        return False
    batched = [tensor for tensor in call.tensors if call.symbols.dims(tensor)]
    if not batched or any(call.axis_of(tensor) is None for tensor in batched):
        return False
    find = SUMS.get(call.name)
    return find is not None and all(map(_adds, results)) and bool(find(call))


def _adds(result: torch.Tensor) -> bool:
    return result.dtype.is_floating_point or result.dtype.is_complex or result.dtype == torch.int64


def _sum(call: AtenCall) -> bool:
    return True  # over all dims, or over one that has the batch: the result has none


def _product(call: AtenCall) -> bool:
    """Both operands have the same rows on the dim that is summed over."""
    left, right = ("batch1", "batch2") if "batch1" in call.args else ("self", "mat2")
    if call.name in ("dot", "vdot"):
        left, right = "self", "tensor"
    first, second = call.axis(left), call.axis(right)
    if first is None or second is None:
        return False
    rank = call.rank(left)
    return first.dim == rank - 1 and second.dim == max(0, rank - 2) and first.at(0) == second.at(0)


def _vector(call: AtenCall) -> bool:
    first, second = call.axis("self"), call.axis("vec")
    return first is not None and second is not None and first.dim == 1 and first.at(0) == second


def _embedding(call: AtenCall) -> bool:
    places = call.axis("indices")
    scaled = call.args["scale_grad_by_freq"]
    return places is not None and places == call.axis("grad_output") and not scaled


def _index_put(call: AtenCall) -> bool:
    """Rows are added to places that they name themselves."""
    given = [(dim, i) for dim, i in enumerate(call.args["indices"]) if i is not None]
    if not call.args["accumulate"] or any(i.dtype == torch.bool for _, i in given):
        return False
    rank = max(i.dim() for _, i in given)
    axes = [call.axis_of(i) for _, i in given]
    try:
        places = agreed(
            [a and a.at(a.dim + rank - i.dim()) for a, (_, i) in zip(axes, given, strict=True)]
        )
    except Mixes:
        return False
    dims = [dim for dim, _ in given]
    front = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    values = call.args["values"]
    full = rank + call.rank("self") - len(dims)
    axis = call.axis_of(values)
    if places is None or axis is None:
        return False
    return axis.at(axis.dim + full - values.dim()) == places.at(places.dim + front)


def _weights(call: AtenCall) -> bool:
    """The weights' part of a gradient whose input's part was asked for apart."""
    axis = call.axis("input")
    if axis is None or axis != gradient(call) or call.args["output_mask"][0]:
        return False
    if "normalized_shape" in call.args:
        return axis.dim < call.rank("input") - len(call.args["normalized_shape"])
    return axis.dim == 0 and not (call.name == "native_batch_norm_backward" and call.args["train"])


SUMS: Mapping[str, Any] = MappingProxyType(
    {
        "sum": _sum,
        **dict.fromkeys(("mm", "bmm", "dot", "vdot"), _product),
        "mv": _vector,
        "embedding_dense_backward": _embedding,
        "index_put": _index_put,
        **dict.fromkeys(
            [
                "native_layer_norm_backward",
                "_fused_rms_norm_backward",
                "native_group_norm_backward",
                "convolution_backward",
                "native_batch_norm_backward",
            ],
            _weights,
        ),
    }
)


def _table() -> dict[str, RowRule]:
    table: dict[str, RowRule] = {}
    for names, find, sizes in (
        (POINTWISE, math.pointwise, ""),
        ("_softmax_backward_data _log_softmax_backward_data glu_backward", along, ""),
        ("native_layer_norm_backward _fused_rms_norm_backward", norm_input, ""),
        ("native_group_norm_backward", norm_input, "N"),
        ("native_batch_norm_backward", batch_norm, ""),
        ("convolution_backward", convolution, ""),
        ("slice_backward select_backward", scatter, "input_sizes end"),
        (ATTENTION, attention, ""),
        (LOSSES, loss, ""),
        ("nll_loss_backward nll_loss2d_backward", nll_loss, ""),
    ):
        table.update(dict.fromkeys(names.split(), RowRule(find, frozenset(sizes.split()))))
    for num_dims, names in WINDOWS.items():
        rule = RowRule(index.windows(num_dims), frozenset({"input_size"}))
        table.update(dict.fromkeys(names.split(), rule))
    return table


TABLE: Mapping[str, RowRule] = MappingProxyType(_table())
