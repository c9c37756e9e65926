"""A `Tracer`: a Dynamo backend that captures every graph of a model and runs the reference.

tracer = Tracer(rules=...)
compiled = tracer.compile(model)          # torch.compile with the settings that capture needs
compiled(x)                               # equal to model(x)
tracer.captures                           # one `Captured` a graph (graph breaks make several)
tracer.cut = lambda rows: (0, 1, rows)    # from now on row-wise ops run part by part
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental import _config as fx_config
from torch.utils._pytree import tree_leaves

from torchweft.capture.blocks import Blocks
from torchweft.capture.breaks import breaks_since, num_breaks
from torchweft.capture.dynamo import Captured, capture, mark_batch
from torchweft.capture.reference import run_reference
from torchweft.capture.units import TORCH
from torchweft.marks import MarkRule, require_matched

PLAIN = (str, bytes, int, float, bool, type, type(None), torch.nn.Module)
MAX_DEPTH = 4
MAX_HELD = 10_000
RECOMPILE_LIMIT = 128


_calling: ContextVar[tuple[Watch, Any] | None] = ContextVar("weft calling", default=None)


class Watch:
    """Sees to it that Dynamo compiles the calls of a model as capture needs it.

    A call that Dynamo knows already pays for nothing but being announced: settings and marks are
    made when Dynamo starts to compile, and taken back at its end.
    """

    def __init__(self, dim: int = 0, blocks: Blocks | None = None) -> None:
        self.dim, self.blocks = dim, blocks
        self.news = True
        self.breaks: list[str] = []
        self._settings = contextlib.ExitStack()
        self._num_breaks = 0

    def __call__(self, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what `torch.compile` made."""
        if _begin not in callback_handler.start_callbacks:  # torch._dynamo.reset forgets them
            callback_handler.register_start_callback(_begin)
            callback_handler.register_end_callback(_end)
        token = _calling.set((self, (args, kwargs)))
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if self.blocks is None or not self.blocks.refuse(error):
                raise
            return compiled(*args, **kwargs)
        finally:
            _calling.reset(token)

    def begin(self, inputs: Any) -> None:
        """Dynamo starts to compile: dims of equal size stay apart, the batch gets a symbol."""
        self.news = True
        self._num_breaks = num_breaks()
        self._settings.enter_context(fx_config.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        seen = {"specialize_float": True, "skip_nnmodule_hook_guards": False}
        self._settings.enter_context(torch._dynamo.config.patch(seen))
        make_dynamic(inputs, self.dim)
        if self.blocks is not None:
            self.blocks.wrap(at_start=_is_start())

    def end(self) -> None:
        """Dynamo has compiled, or failed to."""
        if self.blocks is not None:
            self.blocks.unwrap()
        self.breaks += breaks_since(self._num_breaks)
        self._settings.close()


def _begin(_: CallbackArgs) -> None:
    if (calling := _calling.get()) is not None:
        calling[0].begin(calling[1])


def _end(_: CallbackArgs) -> None:
    if (calling := _calling.get()) is not None:
        calling[0].end()


def _is_start() -> bool:
    """Whether Dynamo compiles what the user called, and not something that this has come to."""
    frame = sys._getframe()
    while frame.f_code is not Watch.__call__.__code__:
        if not frame.f_code.co_filename.startswith((TORCH, __file__, contextlib.__file__)):
            return False
        assert frame.f_back is not None, "only a watched call is compiled here"
        frame = frame.f_back
    return True


def compile_by(
    backend: Callable[..., Any], model: Callable[..., Any], *, fullgraph: bool = False
) -> Callable[..., Any]:
    """The model under a backend of ours; each is its own, but models of a class share a cache."""
    compiled: Callable[..., Any] = torch.compile(  # type: ignore[call-overload]
        model, backend=backend, fullgraph=fullgraph, recompile_limit=RECOMPILE_LIMIT
    )
    return compiled


def make_dynamic(inputs: Any, dim: int = 0) -> None:
    """Ask Dynamo for a symbol where the batch of each tensor is (and not for its other dims).

    Tensors inside objects (a KV cache) count if they have as many rows as the plain inputs.
    """
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    batches = {leaf.shape[dim] for leaf in tensors if leaf.dim() > dim}
    for leaf in tensors + _held(inputs, batches, dim):
        if leaf.dim() > dim and leaf.shape[dim] > 1:
            mark_batch(leaf, dim)


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
        compiled = compile_by(self, model, fullgraph=fullgraph)
        watch = Watch(self.batch if isinstance(self.batch, int) else 0)
        return lambda *args, **kwargs: watch(compiled, args, kwargs)

    def require_matched(self) -> None:
        """Raise `CaptureError` if a rule matched nothing in any captured graph."""
        matched = [rule for captured in self.captures for rule in captured.matched]
        names = [op.mark for captured in self.captures for op in captured.graph.ops if op.mark]
        require_matched(self.rules, matched, names)
