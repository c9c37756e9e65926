"""Python ends while threads of torch let go of tensors, as autograd's do behind a backward."""

import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Late:
    """Dies in the middle of Python's end, and gives Python's lock away."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep

    def __del__(self) -> None:
        self.sleep(0.5)


late = Late(time.sleep)
torch.zeros(1, device="cuda")
library = ctypes.PyDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
kind = library.aoti_torch_dtype_float32(), library.aoti_torch_device_type_cuda(), 0
size = (ctypes.c_int64 * 1)(1)
tensors = [ctypes.c_void_p() for _ in range(16)]
for tensor in tensors:
    library.aoti_torch_empty_strided(ctypes.c_int64(1), size, size, *kind, ctypes.byref(tensor))
sys.setswitchinterval(100)  # the threads below get Python's lock when Python ends, not before
for tensor in tensors:
    free = library.aoti_torch_delete_tensor_object
    library.pthread_create(ctypes.byref(ctypes.c_ulong()), None, free, tensor)
until = time.perf_counter() + 0.5
while time.perf_counter() < until:
    pass
