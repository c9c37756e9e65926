"""The operators that a cell may call: of torch's own, those that only make tensors from tensors.

    "aten.mm.default" --operator_of--> function, or `CaptureError` with the reason

A cell comes from tracing or from a message, and both ask here. An ATen operator may be called if
its schema says that it gives tensors or numbers, takes tensors, numbers and known words, and
changes at most its first argument; not if it draws random numbers, reads or writes files, prints,
or changes what a tensor is (its storage, its flags). Operators with a leading underscore check less
of what they are given: those that tracing makes are listed one by one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from torchweft.errors import CaptureError, clip
from torchweft.private.core import OpOverload, all_op_names

NAME = re.compile(r"aten\.([A-Za-z0-9_]{1,100})\.([A-Za-z0-9_]{1,100})")
TYPE = re.compile(r"(Optional\[|List\[)*(Tensor|int|float|bool|number|Device|Generator)\]*")
WORDS = {
    "UPLO", "approximate", "driver", "equation", "indexing", "interpolation", "mode", "norm", "ord",
    "p", "pad_mode", "padding", "padding_side", "reduce", "rounding_mode", "side",
}  # fmt: skip
"""Arguments that are text: each names a way to compute, none a file."""
STATE = {
    "requires_grad_", "resize", "resize_", "resize_as_", "resize_as_sparse_", "set", "set_",
    "sparse_resize_", "sparse_resize_and_clear_", "to_mkldnn",
}  # fmt: skip
INNER = {
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_addmm_activation", "_cdist_forward"),
    *("_conj", "_conj_physical", "_ctc_loss", "_embedding_bag", "_embedding_bag_forward_only"),
    *("_euclidean_dist", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_flash_attention_forward"),
    *("_linalg_check_errors", "_linalg_det", "_linalg_eigh", "_linalg_slogdet"),
    *("_linalg_solve_ex", "_linalg_svd", "_log_softmax", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_no_training", "_neg_view", "_pdist_forward", "_prelu_kernel"),
    *("_reshape_alias", "_safe_softmax", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_mm", "_softmax", "_to_copy"),
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "_trilinear", "_unsafe_index"),
    *("_unsafe_view", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
    "_weight_norm_interface",
}


def _of_sizes(function: Callable[..., int]) -> Callable[..., int]:
    def compute(*sizes: int) -> int:
        if not all(isinstance(size, int) for size in sizes):
            raise CaptureError("cell: a size must be computed from whole numbers.")
        if abs(made := function(*sizes)) >= 1 << 63:
            raise CaptureError("cell: a size of more than 63 bits.")
        return made

    return compute


PLAIN: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": _of_sizes(getattr(operator, name))
        for name in ("add", "sub", "mul", "floordiv", "mod", "neg")
    },
    "operator.getitem": operator.getitem,
    "weft.linear": torch.nn.functional.linear,
}
"""What a cell may call beside ATen: arithmetic on numbers of rows, one of several results, and
linears, which are kept whole."""


@cache
def operator_of(name: str) -> Callable[..., Any]:
    """The function behind the name of a call. Raises `CaptureError` if a cell may not call it."""
    if name in PLAIN:
        return PLAIN[name]
    words = NAME.fullmatch(name)
    overload = f".{words[2]}" if words and words[2] != "default" else ""
    if words is None or f"aten::{words[1]}{overload}" not in _known():
        raise CaptureError(f"cell: {clip(name)} is no operator of ATen that a cell may call.")
    function: OpOverload[..., Any] = getattr(getattr(torch.ops.aten, words[1]), words[2])
    if why := _refusal(words[1], function):
        raise CaptureError(f"cell: {clip(name)} cannot be called in a cell: {why}.")
    return function


@cache
def _known() -> frozenset[str]:
    """The operators with kernels; the others of this namespace are TorchScript's own functions."""
    return frozenset(all_op_names())


def _refusal(name: str, function: OpOverload[..., Any]) -> str:
    """Why a cell may not call an operator; empty if it may."""
    if name in INNER:
        return ""
    if torch.Tag.nondeterministic_seeded in function.tags:
        return "it draws random numbers"
    if name.startswith("_") and not name.startswith("__"):
        return "it is one of torch's inner operators, which are not listed"
    if name in STATE:
        return "it changes what a tensor is"
    schema = function._schema
    if not schema.returns:
        return "it gives nothing back"
    arguments = [a for a in schema.arguments if a.name not in WORDS or "str" not in str(a.type)]
    kinds = [str(each.type) for each in (*schema.returns, *arguments)]
    if odd := [kind for kind in kinds if not TYPE.fullmatch(kind)]:
        return f"its schema has a {odd[0]}"
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments[1:]):
        return "it writes to other arguments than its first"
    return ""
