"""Tracing: a function over tensors and weights becomes a `Cell`, or is refused with the reason.

1. run it once under vmap on fake tensors, and note every ATen call
2. refuse what a cell cannot be: random numbers, changes in place, shapes that depend on data
3. join products of one argument into one, and of several added up into one
4. what depends on weights only goes first, to be computed once
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from torchweft.dynamic.joining import is_linear, join_products, ordered
from torchweft.errors import CaptureError
from torchweft.private.core import FakeTensorMode, OpOverload, is_batchedtensor
from torchweft.run.workers.cell import Call, Cell, Spec, encode, spec_of

EXAMPLE_ROWS = 7
aten = torch.ops.aten


class _Linears(TorchFunctionMode):
    """Keeps `linear` one call: under vmap it would fall into products, views and sums."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.nn.functional.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    shared = not any(is_batchedtensor(item) for item in (weight, bias) if item is not None)
    if shared and input.dim() > 0:
        made: Tensor = torch.ops.weft.linear(input, weight, bias)
        return made
    return torch.nn.functional.linear(input, weight, bias)


@torch.library.custom_op("weft::linear", mutates_args=())
def _linear_op(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.nn.functional.linear(input, weight, bias)


@_linear_op.register_fake
def _linear_fake(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


@_linear_op.register_vmap
def _linear_rows(
    info: Any, dims: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    assert dims[1] is None and (bias is None or dims[2] is None), "weights are shared by all rows"
    rows = input if dims[0] == 0 else input.movedim(dims[0], 0)
    return torch.ops.weft.linear(rows, weight, bias), 0


def trace(
    name: str,
    function: Callable[[Mapping[str, Tensor], Sequence[Tensor]], Sequence[Tensor]],
    specs: Sequence[Spec],
    weights: Mapping[str, Tensor],
) -> Cell:
    """The cell of `function(weights, arguments)`, which gives a flat list of tensors.

    Raises `CaptureError` with the reason if it cannot run over many rows at once.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    num_rows: Any = mode.from_tensor(torch.empty(EXAMPLE_ROWS), symbolic_context=dynamic).shape[0]
    fakes = [mode.from_tensor(each.detach(), static_shapes=True) for each in weights.values()]
    device = fakes[0].device if fakes else torch.device("cpu")
    with mode:
        rows = [torch.empty(num_rows, *s.shape, dtype=s.dtype, device=device) for s in specs]

    def call(shared: list[Tensor], *given: Tensor) -> list[Tensor]:
        with _Linears():
            return list(function(dict(zip(weights, shared, strict=True)), given))

    dims = (None, *(0 for _ in rows))
    try:
        over_rows = torch.vmap(call, in_dims=dims, randomness="error")
        with torch.no_grad():
            module = make_fx(over_rows, _error_on_data_dependent_ops=True)(fakes, *rows)
    except Exception as cause:
        reason = str(cause).strip().splitlines() or [type(cause).__name__]
        raise CaptureError(f"cell: {name} cannot run over many rows: {reason[0]}") from cause
    if num_rows.node.maybe_as_int() is not None:  # such as a convolution with a kernel for each row
        raise CaptureError(f"cell: {name} cannot run over many rows: it needs a fixed number.")
    join_products(module.graph)
    return _cell(name, module.graph, tuple(specs), tuple(weights))


def _cell(name: str, graph: fx.Graph, specs: tuple[Spec, ...], weights: tuple[str, ...]) -> Cell:
    """The graph as a cell: calls on weights only come first."""
    calls_in_order, given = ordered(graph), list(graph.find_nodes(op="placeholder"))
    used = {
        node for call in (*calls_in_order, graph.output_node()) for node in call.all_input_nodes
    }
    shared = [pair for pair in zip(given, weights, strict=False) if pair[0] in used]
    weights = tuple(weight for _, weight in shared)
    places = {node: place for place, (node, _) in enumerate(shared)}
    constant = set(places)
    for node in given[len(given) - len(specs) :]:
        places[node] = len(places)
    first: list[fx.Node] = []
    rest: list[fx.Node] = []
    for node in calls_in_order:
        if node.op == "get_attr":
            raise CaptureError(f"cell: {name} makes a tensor from Python data at each call.")
        if node.all_input_nodes and constant.issuperset(node.all_input_nodes):
            constant.add(node)
            first.append(node)
        else:
            rest.append(node)
    for node in (*first, *rest):
        places[node] = len(places)
    given_back: Any = graph.output_node().args[0]
    results = list(given_back) if isinstance(given_back, (list, tuple)) else [given_back]
    if any(not isinstance(node, fx.Node) for node in results):
        raise CaptureError(f"cell: {name} gives something else than tensors.")
    values = [node.meta["val"] for node in results]
    makes = tuple(spec_of([int(dim) for dim in v.shape[1:]], v.dtype) for v in values)
    calls = tuple(_call(node, places) for node in (*first, *rest))
    outputs = tuple(places[node] for node in results)
    return Cell(name, specs, makes, weights, calls, outputs, num_prepared=len(first))


def _call(node: fx.Node, places: Mapping[fx.Node, int]) -> Call:
    def place(each: fx.Node) -> dict[str, int]:
        return {"v": places[each]}

    target: Any = node.target
    if isinstance(target, OpOverload):
        name = "weft.linear" if is_linear(node) else str(target)
    elif getattr(operator, word := getattr(target, "__name__", ""), None) is target:
        name = f"operator.{word}"
    else:
        raise CaptureError(f"cell: {target} is not an operator that a cell can call.")
    args = encode(fx.map_arg(list(node.args), place))
    options = {key: encode(value) for key, value in fx.map_arg(node.kwargs, place).items()}
    return name, args, options, places[node]
