"""A failure: an error of ours while a model is captured or planned, as an error of our own.

    try: capture, plan, verify, compile
    except Exception as error: own = as_own(error, "capture")     its first line is the reason

The model itself is fine then: its own graph runs, and the reason is counted (or the error raised).
What is nobody's failure passes: no memory, and the exceptions by which Dynamo steers itself.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch import fx

from torchweft.errors import CaptureError, WeftError
from torchweft.private.core import _LazyGraphModule
from torchweft.private.dynamo import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchDynamoException,
)

FAILED = (BackendCompilerFailed, InternalTorchDynamoError)
PASSES = (MemoryError, torch.OutOfMemoryError, TorchDynamoException, FailOnRecompileLimitHit)
MAX_TEXT = 200
FAILURE = "failure"


def as_own(error: Exception, doing: str) -> WeftError:
    """The failure as an error of our own: what was raised, and where. Raises what shall pass."""
    if isinstance(error, WeftError):
        return error
    if isinstance(error, PASSES) and not isinstance(error, FAILED):
        raise error
    said = (str(error).strip().splitlines() or [""])[0][:MAX_TEXT]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    own = CaptureError(f"{doing}: {type(error).__name__}: {said}{where}", rule=FAILURE)
    own.__cause__ = error
    return own


def first_line(error: WeftError) -> str:
    """An error as the reason of a fallback."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, with graphs inside of it: passes may change the original."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    made = _LazyGraphModule(gm, graph)  # its code is written only if it is called
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(made, name, copied(child))
    return made
