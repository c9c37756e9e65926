"""The check of calls: what plans ask of the node's devices is what they ask of the dry run.

    with CallTracer() as tracer: ...  tracer.lines: ops, records, waits, replays, waits of the host
    differences(device, dry)          the first call at which each program differs; empty if none

Both are traced in one way, by what torch tells of itself, so a difference is a finding about the
plans' runtime on that device, or about the dry run.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweft_tools.dryrun.run import run
from torchweft_tools.selftest.dry import ALONE, SEVERAL, TIMEOUT_S, program

Traces = Sequence[Mapping[str, Sequence[str]]]
"""For each rank the calls of each kind of program."""
Launch = Callable[[Sequence[str], int], int]
"""Runs a command for a number of devices, and gives its exit code."""


class CallTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is asked of the current device inside, in order."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []
        self.streams: dict[int, str] = {}
        self.records: dict[int, str] = {}
        self.num_records = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compilers ignore this mode."""
        return True

    def __enter__(self) -> CallTracer:
        _listen()
        _open.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _open.remove(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; it is noted if it touches the device."""
        results = func(*args, **(kwargs or {}))
        tensors = (i for i in tree_leaves((args, kwargs, results)) if isinstance(i, torch.Tensor))
        if any(tensor.is_cuda for tensor in tensors):
            stream = torch.cuda.current_stream().cuda_stream
            self.lines.append(f"{func} on {self.stream(stream)}")
        return results

    def stream(self, handle: int) -> str:
        """A stream, by its first use in this trace."""
        return self.streams.setdefault(handle, f"stream {len(self.streams)}")

    def on_event(self, what: str, event: int, stream: int) -> None:
        """A stream records an event, or waits for one: which handle torch takes is its affair."""
        if what == "record":
            self.num_records += 1
            self.records[event] = f"event {self.num_records}"
        name = self.records.get(event, "an event of before")
        self.lines.append(f"{what} {name} on {self.stream(stream)}")

    def on_call(self, what: str, *handles: int) -> None:
        """The host waits, or replays a graph."""
        self.lines.append(what)


_open: list[CallTracer] = []


def _tell(method: str, what: str, *handles: int) -> None:
    for tracer in _open:
        getattr(tracer, method)(what, *handles)


@cache
def _listen() -> None:
    """Have torch tell the open tracers; it cannot be told to stop."""
    torch._C._activate_gpu_trace()
    for what in ("record", "wait"):
        register = getattr(_gpu_trace, f"register_callback_for_event_{what}")
        register(partial(_tell, "on_event", what))
    for what in ("device", "stream", "event"):
        register = getattr(_gpu_trace, f"register_callback_for_{what}_synchronization")
        register(partial(_tell, "on_call", f"the host waits for a {what}"))
    stock = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        _tell("on_call", "replay")
        stock(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]


def calls(num_ranks: int, on_device: Launch | None = None) -> dict[str, Any]:
    """Run the programs of `recorded` on the node and under the dry run, and compare their calls."""
    start = time.perf_counter()
    kinds = ALONE if num_ranks == 1 else SEVERAL
    traces: list[Traces] = []
    reasons: list[str] = []
    for where, launch in (("device", on_device or _on_device), ("dry run", run_dry)):
        with tempfile.TemporaryDirectory(prefix="weft-calls-") as folder:
            code = launch([*program(kinds, num_ranks), folder], num_ranks)
            paths = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
            traces.append([json.loads(path.read_text()) for path in paths if path.exists()])
        if code:
            reasons.append(f"the programs ended with code {code} on the {where}")
    reasons += differences(traces[0], traces[1], kinds, num_ranks)
    return {
        "check": "calls",
        "state": "failed" if reasons else "passed",
        "reason": "; ".join(reasons[:3]),
        "figures": {kind: len(traces[0][0][kind]) for kind in kinds} if not reasons else {},
        "seconds": round(time.perf_counter() - start, 3),
    }


def differences(device: Traces, dry: Traces, kinds: Sequence[str], num_ranks: int) -> list[str]:
    """For each program and rank the first call at which the device and the dry run differ."""
    if not len(device) == len(dry) == num_ranks:
        return [f"{len(device)} ranks told their calls on the device, {len(dry)} in the dry run"]
    reasons = []
    for rank, (ours, theirs) in enumerate(zip(device, dry, strict=True)):
        for kind in kinds:
            pair = [each.get(kind, ()) for each in (ours, theirs)]
            length = max(map(len, pair))
            padded = [[*each, *["nothing more"] * (length - len(each))] for each in pair]
            for number, (here, there) in enumerate(zip(*padded, strict=True)):
                if here != there:
                    reasons.append(
                        f"rank {rank}, {kind}, call {number}: {here} on the device, {there} in the "
                        "dry run"
                    )
                    break
            if not length:
                reasons.append(f"rank {rank}, {kind}: no call at all")
    return reasons


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _on_device(command: Sequence[str], num_ranks: int) -> int:
    return subprocess.run(
        command, env=_environment(), timeout=TIMEOUT_S, stderr=subprocess.DEVNULL
    ).returncode


def run_dry(command: Sequence[str], num_ranks: int) -> int:
    """Run a command under the dry run: its exit code."""
    return run(
        command, devices=num_ranks, timeout_s=TIMEOUT_S, env=_environment(),
        stderr=subprocess.DEVNULL,
    ).code  # fmt: skip
