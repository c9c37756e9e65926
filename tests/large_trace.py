"""A synthetic profiler's file of any size, with times known by construction.

    PYTHONPATH=src python tests/large_trace.py rank0.json 300        300 MB
    /usr/bin/time -v torchweft explain rank0.json

Each layer: 10 kernels of 100 us on stream 7, then an all_reduce of 500 us on stream 20. Three
kernels of the next layer run beside it, the fourth waits for it: 300 us overlapped, 200 us exposed.
Around them stand operators, launches, flow arrows and Python frames, as a profiler with stacks
writes them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KERNEL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
KERNELS, KERNEL_US, REDUCE_US, BESIDE = 10, 100.0, 500.0, 3
EXPOSED_US = REDUCE_US - BESIDE * KERNEL_US
LAYER_US = KERNELS * KERNEL_US + EXPOSED_US


def events(num_layers: int, per_step: int) -> Iterator[dict[str, Any]]:
    """All events of some layers; a step has `per_step` of them."""
    number = 0
    for layer in range(num_layers):
        start = 1e9 + layer * LAYER_US
        if layer % per_step == 0:
            name = f"ProfilerStep#{layer // per_step}"
            yield event("user_annotation", name, 100, start - 50, per_step * LAYER_US - 1)
        for kernel in range(KERNELS):
            number += 1
            at = start + kernel * KERNEL_US + (EXPOSED_US if kernel >= BESIDE else 0)
            yield from launched(KERNEL, number, 7, start - 40 + kernel, at, KERNEL_US)
        number += 1
        at = start + LAYER_US
        group = {"Process Group Name": "0", "Process Group Description": "tp", "Group size": 2}
        about = {"Collective name": "allreduce", "In msg nelems": 1 << 20, **group}
        yield from launched(REDUCE, number, 20, start - 20, at, REDUCE_US, **about)


def launched(
    name: str, number: int, stream: int, at: float, start: float, length: float, **about: Any
) -> Iterator[dict[str, Any]]:
    """A kernel, and what a host does for it."""
    for depth in range(3):
        frame = f"torch/nn/modules/module.py({1700 + depth}): _wrapped_call_impl"
        about_frame = {"Python id": number * 3 + depth, "Python parent id": number * 3}
        yield event("python_function", frame, 100, at - 0.3, 0.9, **about_frame)
    ids = {"External id": number, "Record function id": number, "Ev Idx": number}
    yield event("cpu_op", "aten::add", 100, at, 0.6, Sequence=number, **ids)
    yield event("cuda_runtime", "cudaLaunchKernel", 100, at + 0.2, 0.3, cbid=211,
                correlation=number, **{"External id": number})  # fmt: skip
    flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
    yield {"ph": "s", "pid": 9, "tid": 100, "ts": at + 0.2, **flow}
    yield {"ph": "f", "pid": 0, "tid": stream, "ts": start, "bp": "e", **flow}
    facts = {"registers per thread": 40, "shared memory": 0, "grid": [512, 1, 1],
             "block": [512, 1, 1], "est. achieved occupancy %": 75}  # fmt: skip
    links = {"device": 0, "context": 1, "stream": stream, "correlation": number}
    yield event("kernel", name, stream, start, length, **{"External id": number}, **links,
                **facts, **about)  # fmt: skip


def event(
    cat: str, name: str, tid: int, start: float, length: float, **args: Any
) -> dict[str, Any]:
    """One complete event."""
    where = {"pid": 9 if tid == 100 else 0, "tid": tid, "ts": round(start, 3), "dur": length}
    return {"ph": "X", "cat": cat, "name": name, **where, "args": args}


def write(path: Path, megabytes: float, *, rank: int = 0) -> int:
    """Write a file of about this size; how many layers it has."""
    one = sum(len(json.dumps(each)) + 2 for each in events(1, 1))
    per_step = max(2, int(megabytes * 2**20 / one) // 5)
    with path.open("w", encoding="utf-8") as file:
        file.write(
            f'{{"schemaVersion": 1, "distributedInfo": {{"backend": "nccl", "rank": {rank}}},'
        )
        file.write('"deviceProperties": [{"id": 0, "name": "synthetic"}], "traceEvents": [\n')
        file.write(",\n".join(json.dumps(each) for each in events(5 * per_step, per_step)))
        file.write("\n]}\n")
    return 5 * per_step


if __name__ == "__main__":
    write(Path(sys.argv[1]), float(sys.argv[2]))
