"""The watch inside a program: for every op of torch, what it reads and writes goes to the record.

    aten.add.Tensor  reads [[address, bytes of a run, [[count, stride], ...], storage]]  writes ...

A dispatch mode that torch.compile ignores sees every op, in every thread of Python and in
autograd's. Kernels that the op launches carry its number, so an access belongs to the streams on
which the work really ran. Frees are those of torch's caching allocator. This file is loaded alone,
by the program's own Python: it imports nothing else of ours.
"""

import ctypes
import functools
import itertools
import json
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

library = ctypes.CDLL(None)
# Lines of these are not the user's: torch's, Python's own, and ours.
FOREIGN = (
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"] + "/",
    str(Path(__file__).parent),
    "<",
)
SITE = sysconfig.get_paths()["purelib"]
numbers = itertools.count(1)
local = threading.local()  # .op: the op that this thread is in


def line_of(frame: FrameType | None) -> str:
    """FILE:LINE of the innermost frame of the user; of a package, if there is none."""
    packaged = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SITE) and not name.startswith(FOREIGN[0]):
            packaged = packaged or f"{name}:{frame.f_lineno}"
        elif not name.startswith(FOREIGN):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return packaged


def note(call: str, **fields: Any) -> None:
    """Put a line of our own into the record."""
    text = json.dumps({"call": call, **fields})[1:].encode()
    library.weft_dryrun_note(text, len(text))


def layout(tensor: torch.Tensor) -> list[Any] | None:
    """The bytes of a CUDA tensor: address, bytes of a run, [count, stride in bytes]s, storage."""
    if isinstance(tensor, FakeTensor) or not tensor.is_cuda or not tensor.numel():
        return None
    if tensor.layout is not torch.strided:
        return None
    try:
        address, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor without memory: fake, or functional
        return None
    run = tensor.element_size()
    jumps: list[list[int]] = []
    sized = zip(tensor.shape, tensor.stride(), strict=True)
    for size, stride in sorted(((n, s) for n, s in sized if n > 1), key=lambda item: item[1]):
        step = stride * tensor.element_size()
        if not jumps and step == run:
            run *= size
        elif step:
            jumps.append([size, step])
    return [address, run, jumps, storage]


def layouts(value: Any) -> list[list[Any]]:
    """The bytes of all CUDA tensors in an argument."""
    items = (layout(item) for item in tree_leaves(value) if isinstance(item, torch.Tensor))
    return [item for item in items if item is not None]


def accesses(func: Any, args: Any, kwargs: Any, results: Any) -> tuple[list[Any], list[Any]]:
    """What an op reads and writes, by its schema."""
    reads, writes = [], []
    schema = func._schema.arguments
    named = [(schema[i], value) for i, value in enumerate(args) if i < len(schema)]
    named += [(item, kwargs[item.name]) for item in schema if item.name in kwargs]
    for argument, value in named:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            writes += layouts(value)
        if not (is_written and argument.is_out):
            reads += layouts(value)
    returned = func._schema.returns
    if any(item.alias_info is None for item in returned):
        known = {item[3] for item in (*reads, *writes)}
        writes += [item for item in layouts(results) if item[3] not in known]
    return reads, writes


class OpWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op that runs; torch.compile ignores it."""

    def __init__(self, compute: Callable[..., Any], instead: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compute, self.instead = compute, instead

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compilers ignore this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op under a number, and note what it touched."""
        kwargs = kwargs or {}
        # A thread may have inherited the modes of another: then there are two watches. Some
        # compilers run late (DDP's, at the first call of a bucket), and do not ignore us.
        if not {FakeTensor, FunctionalTensor}.isdisjoint(types) or hasattr(local, "op"):
            return func(*args, **kwargs)
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented  # a subclass that runs other ops: those are seen
        if is_composite(func):  # in inference mode they come whole, and hide what they copy
            with self:
                return func.decompose(*args, **kwargs)
        local.op = number = next(numbers)
        library.weft_dryrun_op(number)
        try:
            results = self.run(func, args, kwargs)
        finally:
            library.weft_dryrun_op(0)
            del local.op
        name = str(func)
        if name.startswith("aten.record_stream"):
            stream = library.weft_dryrun_stream(ctypes.c_void_p(stream_handle(args[1])))
            note("keep", ptr=args[0].untyped_storage().data_ptr(), s=stream)
            return results
        # The buffers of a collective are in its own call.
        is_talk = name.startswith(("c10d.", "_c10d_functional."))
        reads, writes = ([], []) if is_talk else accesses(func, args, kwargs, results)
        if reads or writes or is_talk:
            line = line_of(sys._getframe())
            if writes or is_sized(func):
                library.weft_dryrun_op(number)
                results = self.compute(func, args, kwargs, results)
                library.weft_dryrun_op(0)
                reads, writes = accesses(func, args, kwargs, results)
            note("op", op=number, name=name, reads=reads, writes=writes, line=line)
        return results

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results of an op, or what stands for them where it cannot run here."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            sized = self.compute(func, args, kwargs, None) if is_sized(func) else None
            return self.instead(func, args, kwargs, error) if sized is None else sized


def is_sized(func: Any) -> bool:
    """Whether values decide the sizes of what an op gives."""
    return torch.Tag.dynamic_output_shape in func.tags


@functools.cache
def is_composite(func: Any) -> bool:
    """Whether an op is made of other ops on every device."""
    key = torch._C.DispatchKey
    return bool(
        func.has_kernel_for_dispatch_key(key.CompositeImplicitAutograd)
        and not func.has_kernel_for_dispatch_key(key.CUDA)
    )


def stream_handle(stream: Any) -> int:
    """The CUDA handle of a stream of torch."""
    made = torch.cuda.Stream(  # type: ignore[no-untyped-call]
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    )
    return int(made.cuda_stream)


def allocated(pointer: int) -> None:
    """The caching allocator has allocated memory, on the current stream.

    No kernel will write it, so its start is cleared: a count that a kernel would have written is 0,
    and not what a copy once put there. Blocks have at least 512 bytes.
    """
    library.weft_dryrun_settle(ctypes.c_void_p(pointer), ctypes.c_size_t(512))
    ctypes.memset(pointer, 0, 512)
    handle = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    note("alloc", ptr=pointer, s=library.weft_dryrun_stream(ctypes.c_void_p(handle)))


def freed(pointer: int) -> None:
    """The caching allocator got memory back: the next request on its stream may get it."""
    note("free", ptr=pointer, line=line_of(sys._getframe()))


def keep_cudnn_off() -> None:
    """cuDNN has a CUDA runtime of its own inside; a program that switches it on runs without."""
    cudnn = torch.backends.cudnn
    cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)

    def ignore(on: bool) -> None:
        del on

    torch._C._set_cudnn_enabled = ignore  # type: ignore[assignment]
    vars(type(cudnn))["enabled"].setter = ignore


def end() -> None:
    """Python ends: threads that torch still runs do not enter it any more."""
    if hasattr(library, "weft_dryrun_end"):
        library.weft_dryrun_end()


def begin(compute: Callable[..., Any], instead: Callable[..., Any]) -> None:
    """Watch this process from now on.

    `compute` does what small integers need, `instead` what ops of missing libraries do.
    """
    from torch.cuda import _gpu_trace

    if not hasattr(library, "weft_dryrun_torch"):
        return
    if torch.version.cuda is None or not library.weft_dryrun_torch():
        raise RuntimeError("torchweft dryrun: this torch is not a known CUDA build; use torch 2.13")
    keep_cudnn_off()
    tell = ctypes.CFUNCTYPE(None)(
        lambda: library.weft_dryrun_line(json.dumps(line_of(sys._getframe()))[1:-1].encode())
    )
    library.weft_dryrun_callback(tell)
    begin.tell = tell  # type: ignore[attr-defined]  # as long as the process lives

    torch._C._activate_gpu_trace()
    if not library.weft_dryrun_traces():
        raise RuntimeError("torchweft dryrun: the traces of this torch are unknown; use torch 2.13")
    _gpu_trace.register_callback_for_memory_allocation(allocated)
    _gpu_trace.register_callback_for_memory_deallocation(freed)

    OpWatch(compute, instead).__enter__()  # type: ignore[no-untyped-call]
    start = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(self: threading.Thread) -> None:
        with OpWatch(compute, instead):  # torch keeps its modes by thread
            start(self)

    threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]
