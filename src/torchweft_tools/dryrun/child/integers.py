"""Small integers are really computed: programs exchange sizes that decide what they do next.

Kernels do nothing, but the memory of a device is the host's: an op whose tensors are all small and
of integers is repeated on the host, over the same bytes. Loaded alone, like `watch`.
"""

import ctypes
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

MAX_NUMEL = 1 << 16
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
library = ctypes.CDLL(None)


def is_small(value: Any) -> bool:
    """Whether a tensor has few entries, all integers; true for anything that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        return True
    return value.dtype in INTEGERS and value.numel() <= MAX_NUMEL


def compute(func: Any, args: Any, kwargs: Any, results: Any) -> None:
    """Repeat an op on the host, if all its tensors are small and of integers."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return  # it would draw from the generator of the program
    if not all(map(is_small, tree_leaves((args, kwargs, results)))):
        return
    if torch.cuda.is_current_stream_capturing():
        return
    try:
        given, named = tree_map(on_host, (args, kwargs))
        made = func(*given, **named)
        for result, value in zip(tree_leaves(results), tree_leaves(made), strict=True):
            if isinstance(result, torch.Tensor) and result.is_cuda and result.shape == value.shape:
                on_host(result).copy_(value)
    except (RuntimeError, TypeError, ValueError):
        return  # the host has no kernel for it: this number means nothing, like all others


def on_host(value: Any) -> Any:
    """A CUDA tensor as one of the host, over the same bytes; a device becomes the host's."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor) or not value.is_cuda:
        return value
    if not value.numel():
        return torch.empty(value.shape, dtype=value.dtype)
    steps = zip(value.shape, value.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    num_bytes = count * value.element_size()
    if not library.weft_dryrun_settle(
        ctypes.c_void_p(value.data_ptr()), ctypes.c_size_t(num_bytes)
    ):
        raise RuntimeError("a rank never reached the collective that makes this value")
    buffer = (ctypes.c_char * num_bytes).from_address(value.data_ptr())
    return torch.frombuffer(buffer, dtype=value.dtype).as_strided(value.shape, value.stride())
