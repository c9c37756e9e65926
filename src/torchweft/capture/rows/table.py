"""The table of row rules: ATen operator -> `RowRule`.

An operator that stands in no family and carries no `pointwise` tag is taken apart into operators
that do (`stack`, `diag_embed`); it mixes rows where PyTorch has no other words for it. In-place
forms (`add_`) and forms with `out=` follow their plain form.

Every rank cuts its batch alike. Collectives work on dim 0 and put ranks outermost; a batch on
another dim stays where it is. Coalesced forms do the same, tensor by tensor:

    all_reduce            rows stay
    all_gather_into_tensor   [n, ...] -> [ranks * n, ...]    outer * ranks
    reduce_scatter_tensor    [ranks * n, ...] -> [n, ...]    outer / ranks
    all_to_all_single        [ranks * n, ...], equal pieces  rows stay, if outer / ranks is whole

Where there are no copies to share out, a reduce_scatter deals out the rows: of each part, each rank
has its share. Nothing but the all_gather of the same group puts them together; two ranks' shares
are of other rows than those of the whole batch, so no other collective may bring them together.

    reduce_scatter_tensor [s0, H] -> [s0//ranks, H]    the rows of one rank    Axis(0, deal=...)
    all_gather_into_tensor   [s0//ranks, H] -> [s0, H]    all rows, in order

Operators that take a graph have rules of their own (`HIGHER`): they give the axes of all results.

    map(f, [s0, ...])            each row by itself: f sees one row and no other
    scan(f, [s0, H], [T, s0, H]) row-wise if f is, and gives back the carry with its rows in place
    flex_attention(q, k, v, ..)  row-wise unless a score or a mask looks at the number of the row
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torchweft.capture.rows import math, shape
from torchweft.capture.rows.axes import (
    AtenCall,
    Axes,
    Axis,
    Mixing,
    RowRule,
    Symbols,
    exact,
    refuse,
    same,
)
from torchweft.plan.graph import Deal
from torchweft.private.core import tree_leaves

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "weft")  # of collectives

POINTWISE = """
    copy copy_ clone lift_fresh_copy _to_copy contiguous zeros_like ones_like full_like
    empty_like masked_fill fill zero where bernoulli _conj conj _neg_view resolve_conj
    resolve_neg native_dropout dropout convert_element_type view_of real imag _assert_async
    _assert_tensor_metadata gelu mish hardswish threshold rrelu prelu _prelu_kernel polar
    complex log_sigmoid log_sigmoid_forward fake_quantize_per_tensor_affine_cachemask
    floor_divide rsub to max.other min.other _linalg_check_errors dequantize quantize_per_tensor
    heaviside xlogy log_sigmoid_backward _prelu_kernel_backward rrelu_with_noise_backward
"""
ALONG = """
    softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin
    logcumsumexp sort topk argsort flip roll glu _cummax_helper
    _softmax_backward_data _log_softmax_backward_data glu_backward unfold unfold_copy
    _fft_r2c _fft_c2r _fft_c2c
"""
REDUCE = """
    sum mean amax amin max min argmax argmin prod any all var std var_mean std_mean logsumexp norm
    linalg_vector_norm median nanmedian mode count_nonzero kthvalue aminmax nansum
"""
WINDOWS = {
    1: """avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d max_pool1d_with_indices
          reflection_pad1d_backward replication_pad1d_backward upsample_linear1d_backward""",
    2: """avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d
          max_pool2d_with_indices _upsample_bilinear2d_aa _upsample_bicubic2d_aa mkldnn_max_pool2d
          _upsample_lanczos2d_aa max_unpool2d avg_pool2d_backward _adaptive_avg_pool2d_backward
          adaptive_max_pool2d_backward max_pool2d_with_indices_backward reflection_pad2d_backward
          replication_pad2d_backward upsample_nearest2d_backward upsample_bilinear2d_backward
          upsample_bicubic2d_backward _upsample_nearest_exact2d_backward
          _upsample_bilinear2d_aa_backward""",
    3: """avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d max_pool3d max_pool3d_with_indices
          max_unpool3d avg_pool3d_backward _adaptive_avg_pool3d_backward
          adaptive_max_pool3d_backward max_pool3d_with_indices_backward
          upsample_nearest3d_backward""",
}
MATRICES = """
    linalg_inv_ex inverse linalg_cholesky_ex cholesky _linalg_svd _linalg_eigh linalg_qr
    linalg_lu_factor_ex _linalg_det _linalg_slogdet linalg_matrix_exp linalg_eig matrix_exp
    linalg_householder_product _cdist_forward _linalg_solve_ex linalg_solve_triangular
    triangular_solve linalg_pinv cholesky_solve cholesky_inverse linalg_lu_solve lu_unpack
    linalg_ldl_factor_ex linalg_ldl_solve geqrf ormqr linalg_lu _linalg_eigvals linalg_lstsq
"""
WEIGHTED = """
    linear native_layer_norm layer_norm rms_norm _fused_rms_norm native_group_norm
    convolution _convolution mkldnn_convolution convolution_overrideable
"""
BATCH_NORM = """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
    cudnn_batch_norm batch_norm
"""
ATTENTION = """
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps
"""
ATTENTION_BACKWARD = """
    _scaled_dot_product_flash_attention_for_cpu_backward
    _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention_backward
"""
CREATE = """
    zeros ones full empty new_zeros new_ones new_full new_empty empty_strided new_empty_strided
    empty_permuted
"""
# (rule, operators, arguments that may depend on the batch size)
FAMILIES: tuple[tuple[Callable[[AtenCall], Axes], str, str], ...] = (
    (shape.view, "view _unsafe_view reshape _reshape_alias _reshape_copy view_copy", "size shape"),
    (shape.reinterpret, "view.dtype view_as_real view_as_complex view_as_real_copy", ""),
    (shape.reinterpret, "view_as_complex_copy", ""),
    (shape.expand, "expand expand_copy repeat", "size repeats"),
    (shape.permute, "permute permute_copy", ""),
    (shape.transpose, "transpose t transpose_copy t_copy swapaxes", ""),
    (shape.unmoved, "detach alias lift lift_fresh", ""),
    (shape.unsqueeze, "unsqueeze unsqueeze_copy", ""),
    (shape.squeeze, "squeeze squeeze_copy", ""),
    (shape.slice_, "slice narrow slice_copy narrow_copy", "start end length"),
    (shape.select, "select select_copy unbind unbind_copy", ""),
    (shape.split, "split split_with_sizes chunk tensor_split", "split_size split_sizes"),
    (shape.split, "unsafe_split unsafe_split_with_sizes unsafe_chunk", "split_size split_sizes"),
    (shape.diagonal, "diagonal diagonal_copy", ""),
    (shape.cat, "cat concat concatenate", ""),
    (shape.pad, "constant_pad_nd pad", ""),
    (shape.strided, "as_strided", "size stride"),
    (shape.create, CREATE, "size stride"),
    (shape.position, "linspace logspace eye", "end steps n m size"),
    (shape.arange, "arange", "end"),
    (math.pointwise, POINTWISE, ""),
    (math.along, ALONG, ""),
    (math.reduce, REDUCE, ""),
    (math.matrices, MATRICES, ""),
    (math.matmul, "mm bmm addmm baddbmm mv addmv _int_mm _addmm_activation", ""),
    (math.trilinear, "_trilinear", ""),
    (math.weighted, WEIGHTED, "N"),
    (math.batch_norm, BATCH_NORM, ""),
    (math.attention, ATTENTION, ""),
    (math.encoder_layer, "_transformer_encoder_layer_fwd _native_multi_head_attention", ""),
    (math.loss, "nll_loss_forward nll_loss2d_forward binary_cross_entropy", ""),
    (shape.embedding, "embedding", ""),
    (shape.embedding_bag, "_embedding_bag _embedding_bag_forward_only", ""),
    (shape.take, "take bucketize searchsorted isin", ""),
    (shape.index, "index _unsafe_index", ""),
    (shape.index_put, "index_put _unsafe_index_put _index_put_impl", ""),
    (shape.gather, "gather scatter scatter_add scatter_reduce", ""),
    (shape.index_write, "index_add index_copy index_fill index_reduce", ""),
    (shape.slice_scatter, "slice_scatter select_scatter", ""),
    (shape.grid_sample, "grid_sampler_2d grid_sampler_3d", ""),
    (math.of_input, math.WEIGHTED, "N"),
    (math.scatter_backward, "slice_backward select_backward", "input_sizes end"),
    (math.nll_loss_backward, "nll_loss_backward nll_loss2d_backward", ""),
    (math.attention_backward, ATTENTION_BACKWARD, ""),
    *((shape.windows(num_dims), names, "input_size") for num_dims, names in WINDOWS.items()),
)
READS_NUMBERS = (shape.index, shape.index_put, shape.embedding_bag)
COUNTING = (*READS_NUMBERS, shape.unmoved, shape.unsqueeze, shape.slice_)
TABLE: Mapping[str, RowRule] = MappingProxyType(
    {
        name: RowRule(find, frozenset(sizes.split()), counts=find in COUNTING)
        for find, names, sizes in FAMILIES
        for name in names.split()
    }
)


# Collectives.

STAY = """
    all_reduce all_reduce_ all_reduce_coalesced all_reduce_coalesced_ broadcast broadcast_
"""
GATHER = "all_gather_into_tensor all_gather_into_tensor_coalesced"
SCATTER = "reduce_scatter_tensor reduce_scatter_tensor_coalesced"
DEALS = "it deals out the rows of the batch to the ranks"
Move = Callable[[Axis, AtenCall], Axis]


def wait(axis: Axis, call: AtenCall) -> Axis:
    return axis


def all_gather(axis: Axis, call: AtenCall) -> Axis:
    if axis.deal is not None:
        whole = axis.dim == 0 and axis.deal == _deal(call)
        whole = whole and (axis.outer == 1 or axis.deal.rounded)
        refuse(not whole, "it gathers other shares than those that were dealt out")
        return replace(axis, deal=None)
    return replace(axis, outer=axis.outer * call.args["group_size"]) if axis.dim == 0 else axis


def reduce_scatter(axis: Axis, call: AtenCall) -> Axis:
    if axis.dim != 0:
        return axis
    rounded = "rounded" in call.args
    if rounded and call.args["group_size"] == 1:
        return axis
    if (rounded or axis.outer == 1) and call.args["group_size"] > 1:
        refuse(call.symbols.undealt, f"{DEALS}: {call.symbols.undealt}")
        return replace(axis, deal=_deal(call))
    return replace(axis, outer=_dealt(axis, call.args["group_size"]))


def share(axis: Axis, call: AtenCall) -> Axis:
    """A rank's rows of what all ranks have: as if a reduce_scatter had dealt them out."""
    refuse(axis.dim != 0, DEALS)
    refuse(call.symbols.undealt, f"{DEALS}: {call.symbols.undealt}")
    return replace(axis, deal=_deal(call)) if call.args["group_size"] > 1 else axis


def _deal(call: AtenCall) -> Deal:
    """Who shares the rows that a collective deals out or gathers."""
    rounded = not {"rounded", "rows"}.isdisjoint(call.args) or call.name == "share"
    return Deal(communicator_of(call.args["group_name"]), call.args["group_size"], rounded)


def communicator_of(group_name: object) -> str:
    """The name of a process group in a graph."""
    return re.sub(r"\W", "_", f"group_{group_name}")


def all_to_all(axis: Axis, call: AtenCall) -> Axis:
    given = [call.args["input_split_sizes"], call.args["output_split_sizes"]]
    if axis.dim != 0:
        refuse(call.symbols.inside(given), "its result depends on the batch size")
        return axis
    piece = _dealt(axis, len(given[0])) * call.symbols.batch * axis.inner
    sizes = [call.symbols.expr(size) for split in given for size in split]
    whole = all(same(size, piece) for size in sizes)
    refuse(not whole, "the pieces that it deals out cut through the batch")
    return axis


def _dealt(axis: Axis, num_ranks: int) -> Any:
    """How many copies of the batch each rank gets."""
    outer = exact(axis.outer, num_ranks)
    refuse(outer is None, DEALS)
    return outer


def talk_to_one(axis: Axis, call: AtenCall) -> Axis:
    """Each part is a message of its own; ranks agree before a call that they cut alike."""
    refuse(axis.dim != 0, "it talks to one rank, which may have its batch in another dim")
    return axis


def talk_to_several(axis: Axis, call: AtenCall) -> Axis:
    raise Mixing("it is several messages at once")


def _rule(move: Move, sizes: str = "") -> RowRule:
    """A rule for one tensor or for a list of them, each by itself."""

    def find(call: AtenCall) -> Axes:
        axes = [call.axis_of(tensor) for tensor in call.tensors]
        dealt = any(axis is not None and axis.deal is not None for axis in axes)
        refuse(dealt and move not in (wait, all_gather), "it brings together shares of rows")
        moved: list[Axis | None] = [axis and move(axis, call) for axis in axes]
        return moved if len(call.results) == len(moved) else moved[0]

    return RowRule(find, frozenset(sizes.split()))


def _sent(call: AtenCall) -> Axes:
    axis = call.axis("tensor")
    return [axis and talk_to_one(axis, call) and None]  # what it gives is empty


COLLECTIVES: Mapping[str, RowRule] = MappingProxyType(
    {
        **dict.fromkeys(STAY.split(), _rule(lambda axis, call: axis)),
        "wait_tensor": _rule(wait),
        **dict.fromkeys(GATHER.split(), _rule(all_gather, "rows")),
        **dict.fromkeys(SCATTER.split(), _rule(reduce_scatter)),
        "share": _rule(share),
        "all_to_all_single": _rule(all_to_all, "input_split_sizes output_split_sizes"),
        "isend": RowRule(_sent),
        "irecv": _rule(talk_to_one),
        "batch_p2p_ops": _rule(talk_to_several),
    }
)


# Operators that take a graph.

AxisOf = Callable[[torch.Tensor], Axis | None]
ROWS = Axis(0)


def map_rows(args: Sequence[Any], axis_of: AxisOf, symbols: Symbols, made: Any) -> list[Any]:
    """map_impl(f, xs, others)"""
    _, given, others = args
    elsewhere = any(axis_of(tensor) != ROWS for tensor in given)
    refuse(elsewhere, "it maps over something else than the rows")
    _require_free(others, axis_of, symbols)
    return [ROWS] * len(tree_leaves(made))


def scan(args: Sequence[Any], axis_of: AxisOf, symbols: Symbols, made: Any) -> list[Any]:
    """scan(f, carry, xs, others): the rows of what f makes, seen on the first step."""
    body, carry, given, others = args
    if any((axis := axis_of(tensor)) is None or axis.dim == 0 for tensor in given):
        raise Mixing("it scans along the batch, or over what has no rows")
    first = [tensor.select(0, 0) for tensor in given]
    axes = list(map(axis_of, fx.Interpreter(body).run(*carry, *first, *others)))
    carried, steps = axes[: len(carry)], axes[len(carry) :]
    if carried != [axis_of(tensor) for tensor in carry] or None in axes:
        raise Mixing("what it carries on has no clear rows")
    return carried + [axis and axis.at(axis.dim + 1) for axis in steps]


def flex_attention(args: Sequence[Any], axis_of: AxisOf, symbols: Symbols, made: Any) -> list[Any]:
    """flex_attention(query, key, value, score, block mask, scale, options, buffers, buffers)"""
    *tensors, score, mask = args[:5]
    elsewhere = any(axis_of(tensor) != ROWS for tensor in tensors)
    refuse(elsewhere, "its keys and values have their rows elsewhere")
    numbered = _reads(score, 1) or _reads(mask[-1], 0)
    refuse(numbered, "a score or a mask looks at the number of the row")
    shared = [b for b in mask[:-1] if isinstance(b, torch.Tensor) and axis_of(b) != ROWS]
    refuse(any(symbols.expr(b.shape[0]) != 1 for b in shared), "its mask has rows elsewhere")
    _require_free(args[7:], axis_of, symbols)
    return [ROWS if symbols.fits(ROWS, leaf) else None for leaf in tree_leaves(made)]


def _reads(graph: Any, number: int) -> bool:
    """Whether a graph uses an input for more than its dtype and device."""
    place = graph.graph.find_nodes(op="placeholder")[number]
    return any(user.target != "new_ones" for user in place.users)


def _require_free(others: Any, axis_of: AxisOf, symbols: Symbols) -> None:
    """Raise `Mixing` if something that all rows share has the batch in it."""
    for leaf in tree_leaves(others):
        batched = isinstance(leaf, torch.Tensor) and (axis_of(leaf) or symbols.dims(leaf))
        refuse(batched or symbols.inside(leaf), "what all rows share has the batch in it")


HIGHER: Mapping[str, Any] = MappingProxyType(
    {"map_impl": map_rows, "scan": scan, "flex_attention": flex_attention}
)


def rule_for(func: Any) -> RowRule | None:
    """The rule of an operator overload; None if nobody knows how it treats rows."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace in (*NAMESPACES, "weft_rows"):
        return COLLECTIVES.get(name)
    if namespace not in ("aten", "prims", "prim") or name.startswith("_foreach"):
        return None
    for key in (f"{name}.{func._overloadname}", name, name.removesuffix("_")):
        if key in TABLE:
            return TABLE[key]
    return TABLE["clone"] if torch.Tag.pointwise in func.tags else None
