"""The table of row rules: ATen operator -> `RowRule`.

An operator that stands in no family and carries no `pointwise` tag mixes rows; its name is the
reason. In-place forms (`add_`) and forms with `out=` follow their plain form.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from torchweft.capture.rows import backward, index, math, network, shape
from torchweft.capture.rows.aten_call import RowRule

POINTWISE = """
    copy copy_ clone lift_fresh_copy _to_copy contiguous
    masked_fill fill zero clamp where bernoulli _conj conj _neg_view resolve_conj resolve_neg
    native_dropout dropout convert_element_type view_of real imag _assert_async
    _assert_tensor_metadata gelu silu relu mish hardtanh hardswish hardsigmoid leaky_relu elu celu
    selu softplus softshrink hardshrink threshold rrelu prelu _prelu_kernel addcmul addcdiv lerp
    polar complex log_sigmoid log_sigmoid_forward nan_to_num bitwise_not logical_not isnan isinf
    isfinite fake_quantize_per_tensor_affine_cachemask floor_divide rsub to max.other min.other
    _conj_physical _linalg_check_errors frexp ldexp heaviside xlogy dequantize quantize_per_tensor
"""
ALONG = """
    softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin
    logcumsumexp sort topk argsort flip roll glu _cummax_helper
"""
REDUCE = """
    sum mean amax amin max min argmax argmin prod any all var std var_mean std_mean logsumexp norm
    linalg_vector_norm median nanmedian mode count_nonzero kthvalue aminmax nansum
"""
WINDOWS = {
    1: """avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d max_pool1d_with_indices
          upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d reflection_pad1d
          replication_pad1d circular_pad1d""",
    2: """avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d
          max_pool2d_with_indices upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
          _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa reflection_pad2d
          replication_pad2d tril triu mkldnn_max_pool2d _upsample_lanczos2d_aa max_unpool2d""",
    3: """avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d max_pool3d max_pool3d_with_indices
          upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d reflection_pad3d
          replication_pad3d im2col pixel_shuffle pixel_unshuffle channel_shuffle
          native_channel_shuffle max_unpool3d""",
}
LAST_DIMS = {
    1: "cosine_similarity",
    2: """linalg_inv_ex inverse linalg_cholesky_ex cholesky _linalg_svd _linalg_eigh linalg_qr
          linalg_lu_factor_ex _linalg_det _linalg_slogdet linalg_matrix_exp linalg_eig matrix_exp
          linalg_householder_product _cdist_forward _linalg_solve_ex linalg_solve_triangular
          triangular_solve linalg_pinv cholesky_solve cholesky_inverse linalg_lu_solve lu_unpack
          linalg_ldl_factor_ex linalg_ldl_solve geqrf ormqr linalg_lu _linalg_eigvals
          linalg_lstsq""",
}
ATTENTION = """
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_attention_math _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps
"""
CREATE = (
    "zeros ones full empty new_zeros new_ones new_full new_empty empty_strided new_empty_strided "
    "empty_permuted"
)
LIKE = "zeros_like ones_like full_like empty_like"
VIEWS: dict[str, tuple[Any, str]] = {
    "view _unsafe_view reshape _reshape_alias _reshape_copy view_copy": (shape.view, "size shape"),
    "view.dtype": (shape.dtype_view, ""),
    "expand expand_copy": (shape.expand, "size"),
    "repeat": (shape.repeat, "repeats"),
    "permute permute_copy": (shape.permute, ""),
    "transpose t transpose_copy t_copy swapaxes": (shape.transpose, ""),
    "detach alias lift lift_fresh": (shape.unmoved, ""),
    "unsqueeze unsqueeze_copy": (shape.unsqueeze, ""),
    "squeeze squeeze_copy": (shape.squeeze, ""),
    "slice narrow slice_copy narrow_copy": (shape.slice_, "start end length"),
    "select select_copy unbind unbind_copy": (shape.select, ""),
    "split split_with_sizes chunk tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk": (
        shape.split,
        "split_size split_sizes",
    ),
    "diagonal diagonal_copy": (shape.diagonal, ""),
    "diag_embed": (shape.diag_embed, ""),
    "unfold unfold_copy": (shape.unfold, ""),
    "cat concat concatenate": (shape.cat, ""),
    "stack": (shape.stack, ""),
    "constant_pad_nd pad": (shape.pad, ""),
    "view_as_real view_as_complex view_as_real_copy view_as_complex_copy": (shape.complex_view, ""),
    "as_strided": (shape.strided, "size stride"),
    CREATE: (shape.create, "size stride"),
    LIKE: (shape.like, ""),
    "linspace logspace eye": (shape.position, "end steps n m size"),
    "arange": (shape.arange, "end"),
}
OTHERS: dict[str, tuple[Any, str]] = {
    POINTWISE: (math.pointwise, ""),
    ALONG: (math.along, ""),
    REDUCE: (math.reduce, ""),
    "mm bmm addmm baddbmm mv addmv _int_mm _addmm_activation": (math.matmul, ""),
    "_trilinear": (math.trilinear, ""),
    "linear": (math.linear, ""),
    "native_layer_norm layer_norm rms_norm _fused_rms_norm": (math.layer_norm, ""),
    "native_group_norm": (math.group_norm, "N"),
    """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
       _native_batch_norm_legit_no_training
       _batch_norm_with_update _batch_norm_no_update cudnn_batch_norm batch_norm""": (
        math.batch_norm,
        "",
    ),
    ATTENTION: (math.attention, ""),
    "_transformer_encoder_layer_fwd _native_multi_head_attention": (math.encoder_layer, ""),
    "nll_loss nll_loss_forward nll_loss2d_forward mse_loss l1_loss smooth_l1_loss huber_loss "
    "binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss": (
        math.cross_entropy,
        "",
    ),
    "embedding": (index.embedding, ""),
    "_embedding_bag _embedding_bag_forward_only": (index.embedding_bag, ""),
    "take bucketize searchsorted isin": (index.take, ""),
    "index _unsafe_index": (index.index, ""),
    "index_put _unsafe_index_put _index_put_impl": (index.index_put, ""),
    "gather": (index.gather, ""),
    "scatter scatter_add scatter_reduce": (index.scatter, ""),
    "index_select": (index.index_select, ""),
    "index_add index_copy index_fill index_reduce": (index.index_write, ""),
    "slice_scatter select_scatter": (index.slice_scatter, ""),
    "convolution _convolution mkldnn_convolution convolution_overrideable": (index.convolution, ""),
    "grid_sampler_2d grid_sampler_3d": (index.grid_sample, ""),
    "_fft_r2c _fft_c2r _fft_c2c": (index.fft, ""),
}
COUNTING = (
    *(index.index, index.index_put, index.embedding_bag),
    *(shape.unmoved, shape.unsqueeze, shape.slice_),
)


def _table() -> dict[str, RowRule]:
    table: dict[str, RowRule] = {}
    for families in (VIEWS, OTHERS):
        for names, (find, sizes) in families.items():
            rule = RowRule(find, frozenset(sizes.split()), counts=find in COUNTING)
            table.update(dict.fromkeys(names.split(), rule))
    for num_dims, names in WINDOWS.items():
        table.update(dict.fromkeys(names.split(), RowRule(index.windows(num_dims))))
    for num_dims, names in LAST_DIMS.items():
        table.update(dict.fromkeys(names.split(), RowRule(math.last_dims(num_dims))))
    table.update(backward.TABLE)
    return table


TABLE: Mapping[str, RowRule] = MappingProxyType(_table())


def rule_for(func: Any) -> RowRule | None:
    """The rule of an operator overload; None if nobody knows how it treats rows."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace in network.NAMESPACES:
        return network.TABLE.get(name)
    if namespace not in ("aten", "prims", "prim") or name.startswith("_foreach"):
        return None
    for key in (f"{name}.{func._overloadname}", name, name.removesuffix("_")):
        if key in TABLE:
            return TABLE[key]
    if torch.Tag.pointwise in func.tags:
        return TABLE["clone"]
    return None
