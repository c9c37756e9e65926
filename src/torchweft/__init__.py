"""Weft: what a PyTorch model computes, apart from how and when its operators run.

    import torchweft as weft

    model = weft.compile(model, strategy="overlap")

What needs torch is loaded when it is first asked for: looking at graphs and plans needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchweft._moved import install
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
from torchweft.plan.graph import Graph
from torchweft.plan.improve import replay, searched
from torchweft.plan.kernels.kernel import kernel
from torchweft.plan.machine import Machine, accelerator, cpu
from torchweft.plan.plan import Plan
from torchweft.plan.rewrite import Rewrite, chunk, decompose, fuse
from torchweft.plan.strategies import (
    branches,
    comet,
    compose,
    dual_batch,
    multiplex,
    nanoflow,
    overlap,
    pipeline,
    prefetch,
    sequential,
    single_batch,
    tokenweave,
    ulysses,
)
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import Strategy, get_strategy, strategy, strategy_names

if TYPE_CHECKING:
    from torchweft.api import (
        check,
        compile,
        disable,
        enable,
        explain,
        plans,
        report,
        restore,
        trace,
        warmup,
    )
    from torchweft.capture.marks import (
        mark,
        mark_function,
        mark_module,
        mark_op,
        mark_path,
        row_wise,
    )
    from torchweft.capture.offload import offload
    from torchweft.capture.splitters import Splitter, by_requests, by_rows, shared
    from torchweft.run.workers.pool import Spot
    from torchweft.serve.session import context
    from torchweft_tools import lab

_MORE = ("disable", "enable", "explain")
_LAZY = {
    "api": ("check", "compile", "plans", "report", "restore", "trace", "warmup", *_MORE),
    "run.workers.pool": ("Spot",),
    "serve.session": ("context",),
    "capture.marks": ("mark", "mark_function", "mark_module", "mark_op", "mark_path", "row_wise"),
    "capture.offload": ("offload",),
    "capture.splitters": ("Splitter", "by_requests", "by_rows", "shared"),
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
    "Rewrite", "RunError",
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
    "chunk", "comet", "compile",
    "compose",
    "context",
    "cpu",
    "decompose",
    "disable",
    "dual_batch",
    "dynamic",
    "enable",
    "explain",
    "fuse",
    "get_strategy",
    "kernel",
    "lab",
    "mark",
    "mark_function",
    "mark_module",
    "mark_op",
    "mark_path",
    "multiplex",
    "nanoflow",
    "offload",
    "overlap",
    "pipeline",
    "plans",
    "prefetch",
    "replay",
    "report",
    "restore",
    "row_wise",
    "searched",
    "sequential",
    "shared",
    "single_batch",
    "strategy",
    "strategy_names",
    "tokenweave",
    "trace",
    "ulysses",
    "warmup",
]  # fmt: skip


install()

if not TYPE_CHECKING:
    from torchweft import dynamic  # the room itself can be called
else:

    def dynamic(model: Any, **options: Any) -> Any:
        """A model whose graph depends on its input; see `dynamic.model.Dynamic`."""


def __getattr__(name: str) -> Any:
    if name == "lab":
        return import_module("torchweft_tools.lab")
    for home, names in _LAZY.items():
        if name in names:
            return getattr(import_module(f"torchweft.{home}"), name)
    raise AttributeError(f"module 'torchweft' has no attribute {name!r}")
