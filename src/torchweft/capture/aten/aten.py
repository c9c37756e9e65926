"""The aten level: Dynamo's graph goes through AOTAutograd, each graph that comes out is captured.

    gm --AOTAutograd--> inference                                   no gradients wanted
                    \\-> forward --saved values--> backward          gradients wanted

Wanted where the torch level would be blind (tensor subclasses such as DTensor hide their
collectives) or would have no backward graph to cut. Forward and backward agree on the symbol of the
batch, and the backward graph takes the rows of saved values from the forward graph: the shape
`[5*s0, H]` alone does not tell them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from torchweft.capture.aten.passes import prepare
from torchweft.capture.dynamo import Capture, analyse, candidates, symbolic_sizes
from torchweft.capture.failures import break_of
from torchweft.capture.marks import MarkRule
from torchweft.capture.rows.axes import Axis, Symbols
from torchweft.capture.rows.rows import Rows
from torchweft.errors import RunError
from torchweft.private.aot import aot_autograd, make_boxed_func, min_cut_rematerialization_partition
from torchweft.private.core import is_traceable_wrapper_subclass, tree_leaves
from torchweft.private.dynamo import TracingContext

Make = Callable[[fx.GraphModule, Callable[[], Capture]], Callable[..., Any]]
"""(graph, how to capture it) -> what runs in its place."""


def level_of(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    """The level that a graph of Dynamo needs: "aten" for subclasses and gradients, else "torch"."""
    tensors = [item for item in example_inputs if isinstance(item, torch.Tensor)]
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    values = [node.meta.get("example_value") for graph in graphs for node in graph.nodes]
    if any(is_traceable_wrapper_subclass(value) for value in [*tensors, *values]):
        return "aten"
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return "aten" if wanted else "torch"


def run_aten(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    make: Make,
    *,
    rules: Sequence[MarkRule] = (),
    batch: int | str | Sequence[str] | None = None,
    name: str = "graph",
) -> Callable[..., Any]:
    """What runs in the place of a graph of Dynamo: pieces of its ATen graphs, under autograd."""
    dim = batch if isinstance(batch, int) else 0
    pair = _Pair(make, rules, candidates(gm, example_inputs, batch), dim, name, break_of(gm))
    backend = aot_autograd(
        fw_compiler=partial(pair.compile, "forward"),
        bw_compiler=partial(pair.compile, "backward"),
        inference_compiler=partial(pair.compile, "inference"),
        partition_fn=pair.partition,
        keep_inference_input_mutations=True,
    )
    run = backend(gm, example_inputs)
    return _once_differentiable(run) if pair.has_gradients else run


def _once_differentiable(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but who asks for the gradient of a gradient is told by us, and not by torch."""
    told, first = False, cast(Any, FirstGradient)

    def call(*inputs: Any) -> Any:
        nonlocal told
        outputs = run(*inputs)
        for leaf in () if told else tree_leaves(outputs):
            node = getattr(leaf, "grad_fn", None)
            while node is not None and not hasattr(node, "_forward_cls"):  # of a view
                node = node.next_functions[0][0] if node.next_functions else None
            compiled: Any = getattr(node, "_forward_cls", None)
            if stock := getattr(compiled, "_double_backward", None):
                compiled._double_backward = lambda *given: first.apply(*stock(*given))
                told = True
                break
        return outputs

    return call


class FirstGradient(torch.autograd.Function):
    """Gradients that were asked for with `create_graph=True`; they have none of their own."""

    @staticmethod
    def forward(ctx: Any, *gradients: Any) -> Any:
        """The gradients themselves."""
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raise `RunError`."""
        raise RunError(
            "backward: the gradient of a gradient was asked for, and compiled graphs have none. "
            "Call model.forward(...) there: that is the model as it is."
        )


@dataclass
class _Pair:
    """The graphs that come of one graph of Dynamo, captured as they come.

    saved: where the rows of the forward graph's results are, by name; shown: the same, by shape,
    for those that the caller gets.
    """

    make: Make
    rules: Sequence[MarkRule]
    tried: Sequence[Symbols]
    dim: int
    name: str
    broken: str
    num_outputs: int = 0
    has_gradients: bool = False
    saved: dict[str, Axis | None] = field(default_factory=dict)
    shown: list[tuple[Any, Axis | None]] = field(default_factory=list)

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """How AOTAutograd cuts forward from backward; here we learn how many outputs are asked."""
        self.num_outputs, self.has_gradients = options["num_fwd_outputs"], True
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def compile(
        self, kind: str, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """What runs in the place of a graph: inference, forward, or backward (of gradients)."""
        if kind != "inference":
            _keep_saved()
        return make_boxed_func(self.make(gm, partial(self._capture, kind, gm)))

    def _capture(self, kind: str, gm: fx.GraphModule) -> Capture:
        names, notes = prepare(gm)
        given: Mapping[str, Axis | None] | None = None if kind == "inference" else {}
        if kind == "backward":
            given = {n.name: self._rows_of(n) for n in gm.graph.nodes if n.op == "placeholder"}
        else:
            self.tried = self._known(gm)
        name = f"{self.name}.{kind}"
        captured, rows = analyse(
            gm, self.tried, rules=self.rules, name=name, level="aten", given=given
        )
        if kind == "forward":
            self._remember(gm, names, rows)
        if kind == "backward":
            return captured
        made = [slot.value or "" for slot in captured.outputs]
        shown = {"", *captured.graph.inputs, *made[: self.num_outputs]}
        saved = frozenset(made[self.num_outputs :] if kind == "forward" else ()) - shown
        return replace(captured, notes=tuple(notes), broken=self.broken, saved=saved)

    def _known(self, gm: fx.GraphModule) -> Sequence[Symbols]:
        """The symbols to try that the graph knows; a DTensor's own piece has symbols of its own."""
        sizes = [size for _, dim, size in symbolic_sizes(gm) if dim is not None]
        known = set[Any]().union(*(size.node.expr.free_symbols for size in sizes))
        tried = [symbols for symbols in self.tried if symbols.batch in known]
        return tried or candidates(gm, (), self.dim)

    def _remember(self, gm: fx.GraphModule, names: Sequence[str], rows: Rows) -> None:
        """Note the symbol of the batch, and where the rows of each output are."""
        self.tried = [rows.symbols]
        outputs: Any = gm.graph.output_node().args[0]
        for number, (item, name) in enumerate(zip(outputs, names, strict=True)):
            value = rows.value(item) if isinstance(item, fx.Node) else None
            if not isinstance(value, torch.Tensor):
                continue
            self.saved[name] = rows.axis(value)
            if number < self.num_outputs:
                self.shown.append((rows.symbols.shape(value), rows.axis(value)))

    def _rows_of(self, node: fx.Node) -> Axis | None:
        """Where the rows of an input of the backward graph are; None if that is not certain."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        if node.name in self.saved:
            return self.saved[node.name]
        symbols = self.tried[0]
        plain = symbols.uniform(value)
        if plain is not None and plain.inner == 1:
            return plain
        shape = symbols.shape(value)
        axes = {axis for shown, axis in self.shown if shown == shape}
        return axes.pop() if len(axes) == 1 else None


def _keep_saved() -> None:
    """Tell AOTAutograd that nothing writes into saved values: backward may run again.

    It asks a list that graphs of tensor subclasses share; so the list is emptied, not replaced.
    """
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        (context.fw_metadata.bw_donated_idxs or []).clear()
