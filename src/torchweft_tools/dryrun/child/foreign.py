"""Ops whose library cannot run here: an op and its error come in; results of torch's shapes go out.

cuFFT, cuSOLVER, cuSPARSE and cuDNN have a CUDA runtime of their own inside; kernels that are
compiled at run time (Triton, torch's jiterator) need the driver. Such an op becomes one kernel on
the current stream, and torch's meta kernel says what its results look like; an op without one is
an error of ours. Loaded alone, like `watch`.
"""

import ctypes
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

library = ctypes.CDLL(None)
LIBRARIES = {  # what torch's errors say -> what is missing
    "cufft": "cuFFT",
    "cusolver": "cuSOLVER",
    "cusparse": "cuSPARSE",
    "cudnn": "cuDNN",
    "libcuda.so": "the CUDA driver",
    "nvrtc": "the CUDA driver",
    "active driver": "the CUDA driver",
}


class ForeignLibraryError(RuntimeError):
    """An op needs a library that the dry run does not model."""


def library_of(error: BaseException) -> str:
    """The library that an error says is missing, or nothing."""
    text = str(error).lower()
    return next((name for word, name in LIBRARIES.items() if word in text), "")


def instead(func: Any, args: Any, kwargs: Any, error: RuntimeError) -> Any:
    """The results of an op that has failed for want of its library. Raises other errors again."""
    name = library_of(error)
    if not name or isinstance(error, ForeignLibraryError):
        raise error
    real: dict[int, torch.Tensor] = {}
    here = torch.device("cuda", torch.cuda.current_device())
    device = next((item.device for item in tensors((args, kwargs)) if item.is_cuda), here)

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("meta")
        if not isinstance(value, torch.Tensor):
            return value
        meta = value.to("meta")
        real[id(meta)] = value
        return meta

    def from_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in real:
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
        given = real[id(value)]
        return given if given.shape == value.shape else given.resize_(value.shape)

    try:
        given, named = tree_map(to_meta, (args, kwargs))
        shaped = func(*given, **named)
        if any(item.layout is not torch.strided for item in tensors(shaped)):
            raise NotImplementedError
    except (RuntimeError, TypeError):  # NotImplementedError is one: torch has no meta kernel
        library.weft_dryrun_unmodelled(f"{func}, which needs {name},".encode())
        raise ForeignLibraryError(
            f"torchweft dryrun: {func} needs {name}, which is not modelled. Compute it on the CPU, "
            "or leave it out of the dry run."
        ) from error
    with torch.cuda.device(device):
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        library.weft_dryrun_kernel(f"{func} ({name})".encode(), ctypes.c_void_p(stream))
        return tree_map(from_meta, shaped)


def explain_at_exit() -> None:
    """A program that ends for want of the driver (torch.compile, Triton) is told why."""
    before = sys.excepthook

    def hook(kind: Any, error: Any, trace: Any) -> None:
        before(kind, error, trace)
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ForeignLibraryError):
            name = library_of(cause)
            if name:
                what = f"what needs {name} (torch.compile, Triton, kernels made at run time)"
                library.weft_dryrun_unmodelled(what.encode())
                sys.stderr.write(f"torchweft dryrun: {what} is not modelled\n")
                return
            cause = cause.__cause__ or cause.__context__

    sys.excepthook = hook


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a result."""
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]
