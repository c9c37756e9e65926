"""The break: why Dynamo ended a graph before the model ended, and at which line of the user's.

    y = self.up(x);  dist.broadcast(y, 0);  return self.down(y)
    ------ graph ------   a break: not captured   ----- graph -----

What Dynamo cannot capture runs as it is, between two graphs.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from torchweft.capture.ops.units import is_users
from torchweft.private.dynamo import graph_break_reasons


def break_of(gm: fx.GraphModule) -> str:
    """Where and why the graph was ended; empty if the model, or a frame of it, just ended."""
    found: Any = getattr(gm, "compile_subgraph_reason", None)
    return "" if found is None or not found.graph_break else described(found)


def num_breaks() -> int:
    """How many breaks Dynamo has had in this process."""
    return len(graph_break_reasons)


def breaks_since(number: int) -> list[str]:
    """The breaks that came behind the first `number`, those too that left no graph."""
    return [described(found) for found in graph_break_reasons[number:]]


def described(found: Any) -> str:
    """A break in one line: the user's line, and Dynamo's reason."""
    why = str(found.reason).strip().split("\n")[0]
    frames = list(found.user_stack)
    if not frames:
        return why
    # Dynamo's own frames come last: they only tell how it stumbled.
    last = next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])
    return f"{last.filename}:{last.lineno} in {last.name}: {last.line or ''} ({why})"
