"""The table of row rules: ATen operator -> `RowRule`.

An operator that stands in no family and carries no `pointwise` tag is taken apart into operators
that do (`stack`, `diag_embed`); it mixes rows where PyTorch has no other words for it. In-place
forms (`add_`) and forms with `out=` follow their plain form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from torchweft.capture.rows import backward, index, math, network, shape
from torchweft.capture.rows.aten_call import AtenCall, Axes, RowRule

POINTWISE = """
    copy copy_ clone lift_fresh_copy _to_copy contiguous zeros_like ones_like full_like empty_like
    masked_fill fill zero where bernoulli _conj conj _neg_view resolve_conj resolve_neg
    native_dropout dropout convert_element_type view_of real imag _assert_async
    _assert_tensor_metadata gelu relu mish hardtanh hardswish hardsigmoid leaky_relu elu celu
    selu softplus softshrink hardshrink threshold rrelu prelu _prelu_kernel
    polar complex log_sigmoid log_sigmoid_forward isnan isinf
    isfinite fake_quantize_per_tensor_affine_cachemask floor_divide rsub to max.other min.other
    _conj_physical _linalg_check_errors frexp ldexp dequantize quantize_per_tensor heaviside xlogy
    elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward
    log_sigmoid_backward mish_backward softplus_backward _prelu_kernel_backward threshold_backward
    gelu_backward native_dropout_backward rrelu_with_noise_backward
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
          upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d reflection_pad1d
          replication_pad1d reflection_pad1d_backward replication_pad1d_backward
          upsample_linear1d_backward""",
    2: """avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d
          max_pool2d_with_indices upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d
          _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa reflection_pad2d
          replication_pad2d tril triu mkldnn_max_pool2d _upsample_lanczos2d_aa max_unpool2d
          avg_pool2d_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward
          max_pool2d_with_indices_backward reflection_pad2d_backward replication_pad2d_backward
          upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
          _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa_backward""",
    3: """avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d max_pool3d max_pool3d_with_indices
          upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d reflection_pad3d
          replication_pad3d im2col pixel_shuffle pixel_unshuffle channel_shuffle
          native_channel_shuffle max_unpool3d avg_pool3d_backward _adaptive_avg_pool3d_backward
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
LOSSES = """
    nll_loss nll_loss_forward nll_loss2d_forward mse_loss l1_loss smooth_l1_loss huber_loss
    binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss
"""
LOSSES_BACKWARD = """
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward
    binary_cross_entropy_backward
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
    (math.loss, LOSSES, ""),
    (index.embedding, "embedding", ""),
    (index.embedding_bag, "_embedding_bag _embedding_bag_forward_only", ""),
    (index.take, "take bucketize searchsorted isin", ""),
    (index.index, "index _unsafe_index", ""),
    (index.index_put, "index_put _unsafe_index_put _index_put_impl", ""),
    (index.gather, "gather scatter scatter_add scatter_reduce", ""),
    (index.index_select, "index_select", ""),
    (index.index_write, "index_add index_copy index_fill index_reduce", ""),
    (index.slice_scatter, "slice_scatter select_scatter", ""),
    (index.grid_sample, "grid_sampler_2d grid_sampler_3d", ""),
    (backward.of_input, backward.WEIGHTED, "N"),
    (backward.scatter, "slice_backward select_backward", "input_sizes end"),
    (backward.attention, ATTENTION_BACKWARD, ""),
    (backward.loss, LOSSES_BACKWARD, ""),
    (backward.nll_loss, "nll_loss_backward nll_loss2d_backward", ""),
    *((index.windows(num_dims), names, "input_size") for num_dims, names in WINDOWS.items()),
)
COUNTING = (
    *(index.index, index.index_put, index.embedding_bag),
    *(shape.unmoved, shape.unsqueeze, shape.slice_),
)
TABLE: Mapping[str, RowRule] = MappingProxyType(
    {
        name: RowRule(find, frozenset(sizes.split()), counts=find in COUNTING)
        for find, names, sizes in FAMILIES
        for name in names.split()
    }
)


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
