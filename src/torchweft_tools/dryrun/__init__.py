"""The dry run: runs a PyTorch program for CUDA without a device, and records what it asks for.

    program --stand-in for CUDA--> calls of each rank --order--> what comes before what --> findings

PyTorch's real CUDA build runs on a machine without a device: a library of ours stands in for the
CUDA runtime, cuBLAS and NCCL. Memory is the host's, kernels are recorded and do nothing, and
streams, events, captures and collectives are recorded in the order of their calls. Numbers mean
nothing; only the order can be judged, and it has never been compared with a device.

    standin/   the library (C)               child/   what observes torch inside the program
    build      compiles the library          run      runs a program under it
    calls      the record, as data           order    vector clocks over it
    check      findings                      show     timeline, collectives, synchronisations
"""

import ctypes
import json


def is_dry() -> bool:
    """Whether this process runs under the dry run."""
    return hasattr(ctypes.CDLL(None), "weft_dryrun_note")


def mark(name: str) -> None:
    """Note a name in the record, such as "steady"; does nothing outside the dry run."""
    if is_dry():
        text = json.dumps({"call": "mark", "name": name})[1:].encode()
        ctypes.CDLL(None).weft_dryrun_note(text, len(text))
