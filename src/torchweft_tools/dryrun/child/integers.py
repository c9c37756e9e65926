"""Small integers are really computed: programs exchange sizes that decide what they do next.

Kernels do nothing, but the memory of a device is the host's: an op whose tensors are all small and
of integers is repeated on the host, over the same bytes. Loaded alone, like `watch`.
"""

import ctypes
from collections.abc import Sequence
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


def compute(func: Any, args: Any, kwargs: Any, results: Any) -> Any:
    """The results of an op, which is repeated on the host if its tensors are small integers.

    Where sizes depend on values (nonzero, repeat_interleave), they are the host's; without
    `results` the op has failed on the device, and None says that the host cannot do it either.
    Small integers that are made of other tensors (argmax, randint) are 0, not what lay there.
    """
    given = tree_leaves((args, kwargs))
    # The host would draw from the generator of the program.
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_repeated = not is_random and all(map(is_small, (*given, *tree_leaves(results))))
    # What a custom operator gives may come from other ranks.
    fresh = own_integers(results, given) if not is_repeated and func.namespace == "aten" else []
    if not (is_repeated or fresh) or torch.cuda.is_current_stream_capturing():
        return results
    try:
        for item in fresh:
            on_host(item).zero_()
        return repeat(func, args, kwargs, results) if is_repeated else results
    except (RuntimeError, TypeError, ValueError):
        return results  # the host has no kernel for it: this number means nothing, as all others


def repeat(func: Any, args: Any, kwargs: Any, results: Any) -> Any:
    """The results of an op, with the host's numbers in them."""
    values, named = tree_map(on_host, (args, kwargs))
    made = func(*values, **named)
    shapes = [[x.shape for x in tree_leaves(side) if is_tensor(x)] for side in (results, made)]
    if shapes[0] != shapes[1] and torch.Tag.dynamic_output_shape in func.tags:
        device = next(x.device for x in tree_leaves((args, kwargs)) if is_on_device(x))
        results = tree_map(lambda value: torch.empty_like(value, device=device), made)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        library.weft_dryrun_kernel(str(func).encode(), ctypes.c_void_p(stream))  # it writes these
    for result, value in zip(tree_leaves(results), tree_leaves(made), strict=True):
        if is_on_device(result) and result.shape == value.shape:
            on_host(result).copy_(value)
    return results


def own_integers(results: Any, given: Sequence[Any]) -> list[torch.Tensor]:
    """Small integers that an op has made on the device, in memory of its own."""
    tensors = [item for item in given if is_tensor(item)]
    if not all(map(is_on_device, tensors)):
        return []  # a copy from the host, which has arrived
    made = [item for item in tree_leaves(results) if is_on_device(item) and is_small(item)]
    held = {item.untyped_storage().data_ptr() for item in tensors} if made else set()
    return [item for item in made if item.untyped_storage().data_ptr() not in held]


def is_tensor(value: Any) -> bool:
    """Whether this is a tensor."""
    return isinstance(value, torch.Tensor)


def is_on_device(value: Any) -> bool:
    """Whether this is a CUDA tensor with bytes of its own."""
    return is_tensor(value) and value.is_cuda and value.layout is torch.strided


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
