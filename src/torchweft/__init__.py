"""Weft: what a PyTorch model computes, apart from how and when its operators run.

    import torchweft as weft

    model = weft.compile(model, strategy="overlap")

What needs torch is loaded when it is first asked for: looking at graphs and plans needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# These modules share their name with a function of ours: the module comes first, then the function.
import torchweft.context
import torchweft.dynamic
import torchweft.strategy
import torchweft.trace  # noqa: F401
from torchweft.errors import (
    CaptureError,
    GraphError,
    MachineError,
    MemoryPlanError,
    PlacementError,
    PlanError,
    RefusedError,
    RunError,
    SizeError,
    StateError,
    StrategyError,
    WeftError,
)
from torchweft.graph import Graph
from torchweft.machine import Machine, accelerator, cpu
from torchweft.plan import Plan
from torchweft.strategies import branches, overlap, sequential
from torchweft.strategy import Strategy, get_strategy, strategy, strategy_names
from torchweft.trace import Trace

if TYPE_CHECKING:
    from torchweft import lab
    from torchweft.api import check, compile, plans, report, warmup
    from torchweft.dynamic.pool import Spot
    from torchweft.marks import mark, mark_function, mark_module, mark_op, mark_path, row_wise
    from torchweft.splitters import Splitter, by_requests, by_rows, shared

_LAZY = {
    "api": ("check", "compile", "plans", "report", "warmup"),
    "dynamic.pool": ("Spot",),
    "marks": ("mark", "mark_function", "mark_module", "mark_op", "mark_path", "row_wise"),
    "splitters": ("Splitter", "by_requests", "by_rows", "shared"),
}
__all__ = [
    "CaptureError",
    "Graph",
    "GraphError",
    "Machine",
    "MachineError",
    "MemoryPlanError",
    "PlacementError",
    "Plan",
    "PlanError",
    "RefusedError",
    "RunError",
    "SizeError",
    "Splitter",
    "Spot",
    "StateError",
    "Strategy",
    "StrategyError",
    "Trace",
    "WeftError",
    "accelerator",
    "branches",
    "by_requests",
    "by_rows",
    "check",
    "compile",
    "context",
    "cpu",
    "dynamic",
    "get_strategy",
    "lab",
    "mark",
    "mark_function",
    "mark_module",
    "mark_op", "mark_path",
    "overlap",
    "plans",
    "report",
    "row_wise",
    "sequential",
    "shared",
    "strategy",
    "strategy_names",
    "trace",
    "warmup",
]  # fmt: skip


def context(**told: Any) -> Any:
    """What the host knows of the calls inside, beyond their shapes; see `session.context`."""
    return import_module("torchweft.session").context(**told)


def dynamic(model: Any, **options: Any) -> Any:
    """A model whose graph depends on its input, batched and placed; see `dynamic.model.Dynamic`."""
    return import_module("torchweft.dynamic.model").Dynamic(model, **options)


def trace(model: Any, *args: Any, **kwargs: Any) -> Trace:
    """Run one call and tell what happened when, on which lane; see `api.trace`."""
    found: Trace = import_module("torchweft.api").trace(model, *args, **kwargs)
    return found


def __getattr__(name: str) -> Any:
    if name == "lab":
        return import_module("torchweft.lab")
    for home, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"torchweft.{home}"), name)
    raise AttributeError(f"module 'torchweft' has no attribute {name!r}")
