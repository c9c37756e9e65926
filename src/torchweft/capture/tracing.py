"""A `Tracer`: a Dynamo backend that captures every graph of a model and runs the reference.

tracer = Tracer(rules=...)
compiled = tracer.compile(model)          # torch.compile with the settings that capture needs
compiled(x)                               # equal to model(x)
tracer.captures                           # one `Captured` a graph (graph breaks make several)
tracer.cut = lambda rows: (0, 1, rows)    # from now on row-wise ops run part by part
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental import _config as fx_config
from torch.utils._pytree import tree_leaves

from torchweft.capture.dynamo import Captured, capture
from torchweft.capture.reference import run_reference
from torchweft.marks import MarkRule, require_matched

PLAIN = (str, bytes, int, float, bool, type, type(None), torch.nn.Module)
MAX_DEPTH = 4
MAX_HELD = 10_000


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Settings of Dynamo under which the batch can be told from other dims of the same size."""
    with (
        fx_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        # Each compiled model is a backend of its own; models of one class share Dynamo's cache.
        torch._dynamo.config.patch(specialize_float=True, recompile_limit=128),
    ):
        yield


def make_dynamic(inputs: Any, dim: int = 0) -> None:
    """Ask Dynamo for a symbol where the batch of each tensor is (and not for its other dims).

    Tensors inside objects (a KV cache) count if they have as many rows as the plain inputs.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    batches = {leaf.shape[dim] for leaf in tensors if leaf.dim() > dim}
    for leaf in tensors + _held(inputs, batches, dim):
        if leaf.dim() > dim and leaf.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(leaf, dim)


def _held(thing: Any, batches: set[int], dim: int) -> list[torch.Tensor]:
    """Tensors of the same batch in the attributes of objects, a few levels deep."""
    found: list[torch.Tensor] = []
    waiting = [(leaf, 0) for leaf in tree_leaves(thing)]
    seen: set[int] = set()
    while waiting and len(seen) < MAX_HELD:
        item, depth = waiting.pop()
        if id(item) in seen or isinstance(item, PLAIN) or depth > MAX_DEPTH:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if depth and item.dim() > dim and item.shape[dim] in batches:
                found.append(item)
            continue
        inside = vars(item) if hasattr(item, "__dict__") else {}
        waiting += [(leaf, depth + 1) for leaf in tree_leaves([*inside.values()])]
    return found


@dataclass
class Tracer:
    """Captures, and runs what was captured by the reference."""

    rules: Sequence[MarkRule] = ()
    batch: int | str | Sequence[str] | None = None
    cut: Callable[[int], Sequence[int]] | None = None
    captures: list[Captured] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that Dynamo calls."""
        captured = capture(gm, example_inputs, rules=self.rules, batch=self.batch)
        self.captures.append(captured)

        def run(*inputs: Any) -> Any:
            _, env = captured.bind(inputs)
            rows = env.get(captured.graph.batch or "", 0)
            cuts = self.cut is not None and rows > 1 and captured.splits(env)
            bounds = self.cut(rows) if self.cut is not None and cuts else None
            return run_reference(captured, inputs, bounds)

        return run

    def compile(self, model: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]:
        """The model under this tracer; the batch is dynamic from the first call on."""
        compiled = torch.compile(model, backend=self, fullgraph=fullgraph)
        dim = self.batch if isinstance(self.batch, int) else 0

        def call(*args: Any, **kwargs: Any) -> Any:
            make_dynamic((args, kwargs), dim)
            with tracing():
                return compiled(*args, **kwargs)

        return call

    def require_matched(self) -> None:
        """Raise `CaptureError` if a rule matched nothing in any captured graph."""
        matched = [rule for captured in self.captures for rule in captured.matched]
        names = [op.mark for captured in self.captures for op in captured.graph.ops if op.mark]
        require_matched(self.rules, matched, names)
