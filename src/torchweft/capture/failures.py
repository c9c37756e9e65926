"""Failures and breaks: why a part of a model was not captured, in one line.

    try: capture, plan, verify, compile
    except Exception as error: own = as_own(error, "capture")     its first line is the reason

    y = self.up(x);  dist.broadcast(y, 0);  return self.down(y)
    ------ graph ------   a break: not captured   ----- graph -----

After a failure of ours the model's own graph runs, and the reason is counted (or the error raised).
What is nobody's failure passes: no memory, and the exceptions by which Dynamo steers itself. What
Dynamo cannot capture is a break: it runs as it is, between two graphs.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchweft.capture.ops.units import is_users
from torchweft.errors import CaptureError, WeftError
from torchweft.private.core import _LazyGraphModule
from torchweft.private.dynamo import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    InternalTorchDynamoError,
    TorchDynamoException,
    graph_break_reasons,
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


def break_of(gm: fx.GraphModule) -> str:
    """Where and why the graph was ended; empty if the model, or a frame of it, just ended."""
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    return described(reason) if reason is not None and reason.graph_break else ""


def breaks_since(number: int) -> list[str]:
    """The breaks that came behind the first `number`, those too that left no graph."""
    return [described(reason) for reason in graph_break_reasons[number:]]


def described(reason: Any) -> str:
    """A break in one line: the user's line, and Dynamo's reason."""
    why = str(reason.reason).strip().split("\n")[0]
    frames = list(reason.user_stack)
    if not frames:
        return why
    # Dynamo's own frames come last: they only tell how it stumbled.
    last = next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line or ''} ({why})"
