"""The `CellBook` of a model: the cell of every kind of call, traced when such a call comes first.

Calls of one callee with equal *patterns* are ops of one cell. A pattern is what stays of the
arguments of a call when its tensors are taken out:

    (x, [h, 2], flag=True)   ->   (tuple, (spec of x, (list, (spec of h, (int, 2))))), ...

Tracing: a function over tensors and weights becomes a `Cell`, or is refused with the reason.

1. run it once under vmap on fake tensors, and note every ATen call
2. refuse what a cell cannot be: random numbers, changes in place, shapes that depend on data
3. join products of one argument into one, and of several added up into one
4. what depends on weights only goes first, to be computed once
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.passes.tools_common import stable_topological_sort
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torchweft.dynamic.lazy import Lazy
from torchweft.errors import CaptureError
from torchweft.private.core import FakeTensorMode, OpOverload, is_batchedtensor, pytree
from torchweft.run.workers.cell import Call, Cell, Spec, encode, spec_of, unpack_cell

EXAMPLE_ROWS = 7
aten = torch.ops.aten
PLAIN = (int, float, bool, str, type(None), complex, torch.dtype, torch.device, type(Ellipsis))
Pause = Callable[[], AbstractContextManager[None]]


class CellEntry:
    """A cell with its pending ops: of each the first value it makes, and the values it reads."""

    __slots__ = ("cell", "ops", "unflatten")

    def __init__(self, cell: Cell, unflatten: Callable[[list[Lazy]], Any] | None = None) -> None:
        self.cell = cell
        self.unflatten = unflatten
        self.ops: list[int] = []


class Callee(NamedTuple):
    """What is called, a module or a torch function: `call(weights, arguments, options)`.

    lookup: it looks words up one by one, if it has so many arguments. learn: gets the entry of each
    call on lazy values alone; of a lookup, also the words' dtype.
    """

    key: Any
    name: str
    call: Callable[..., Any]
    module: nn.Module | None = None
    lookup: int = 0
    learn: Callable[[CellEntry, torch.dtype | None], None] | None = None


class CellBook:
    """Entries by callee and pattern, and the weights that cells share. reasons: why calls have no
    cell, and how often they came."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.names = {id(weight): name for name, weight in weights.items()}
        self.entries: dict[Any, CellEntry | str] = {}
        self.reasons: Counter[str] = Counter()
        self.functions: dict[Any, Callee] = {}
        self.numbers = count()  # of cells: their names are unique

    def function(self, function: Any) -> Callee:
        """A torch function as a callee."""
        callee = self.functions.get(function)
        if callee is None:
            name = getattr(function, "__name__", "function")
            lookup = 2 if function is functional.embedding else 0
            callee = Callee(
                function, name, lambda _, args, options: function(*args, **options), lookup=lookup
            )
            self.functions[function] = callee
        return callee

    def replace(self, name: str, new: Tensor) -> None:
        """The model has another tensor for a weight; one of another kind needs other cells."""
        old = self.weights[name]
        if new.shape != old.shape or new.dtype != old.dtype:
            self.entries.clear()
        del self.names[id(old)]
        self.weights[name], self.names[id(new)] = new, name

    def unpack(self, spec: Spec) -> CellEntry:
        """The entry of taking values of a spec apart."""
        entry = self.entries.setdefault(spec, CellEntry(unpack_cell(spec)))
        assert isinstance(entry, CellEntry), "it is never refused"
        return entry

    def entry(
        self, callee: Callee, pattern: Any, values: Sequence[Lazy], pause: Pause
    ) -> CellEntry | None:
        """The entry of a call on these values, or None if it cannot be an op. pause: nothing is
        recorded inside."""
        key = callee.key, pattern, torch.is_autocast_enabled("cpu")
        entry = self.entries.get(key)
        if entry is None:
            try:
                with pause():
                    entry = self._trace(callee, pattern, [value.spec for value in values])
            except CaptureError as error:
                entry = f"{callee.name}: {str(error).partition(': ')[2]}"
            self.entries[key] = entry
        if isinstance(entry, str):
            self.reasons[entry] += 1
            return None
        return entry

    def _trace(self, callee: Callee, pattern: Any, specs: Sequence[Spec]) -> CellEntry:
        module = callee.module
        if module is not None:
            shared = dict((*module.named_parameters(), *module.named_buffers()))
        else:
            shared = {name: self.weights[name] for name in sorted(set(_weights_in(pattern)))}
        outer: list[Any] = []

        def function(given: Mapping[str, Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
            args, options = _fill(pattern, iter(rows), given)
            leaves, tree = pytree.tree_flatten(callee.call(given, args, options))
            outer[:] = [tree]
            if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise CaptureError("it gives something else than tensors.")
            return leaves

        cell = trace(f"{_word(callee.name)}.{next(self.numbers)}", function, specs, shared)
        weights = tuple(self.names[id(shared[name])] for name in cell.weights)
        cell, tree = replace(cell, weights=weights), outer[0]
        if tree.is_leaf():
            return CellEntry(cell)
        if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
            return CellEntry(cell, tuple)
        return CellEntry(cell, lambda made: pytree.tree_unflatten(made, tree))


class Weight:
    """Marks the name of a weight in a pattern."""


def _weights_in(pattern: Any) -> Iterator[str]:
    if isinstance(pattern, tuple):
        if pattern and pattern[0] is Weight:
            yield pattern[1]
        elif pattern and pattern[0] in (list, tuple, dict):
            for each in pattern[1]:
                yield from _weights_in(each[1] if pattern[0] is dict else each)


def _fill(pattern: Any, rows: Iterator[Tensor], weights: Mapping[str, Tensor]) -> Any:
    """The arguments of a pattern with tensors in the place of specs."""
    if isinstance(pattern, Spec):
        return next(rows)
    kind, *rest = pattern
    if kind is Weight:
        return weights[rest[0]]
    if kind is dict:
        return {key: _fill(each, rows, weights) for key, each in rest[0]}
    if kind in (list, tuple):
        return kind(_fill(each, rows, weights) for each in rest[0])
    return slice(*rest) if kind is slice else rest[0]


def _word(name: str) -> str:
    """A name as it may stand in a graph."""
    kept = re.sub(r"[^A-Za-z0-9_.]", "_", name)
    return kept if re.match(r"[A-Za-z_]", kept) else f"_{kept}"


class _Linears(TorchFunctionMode):
    """Keeps `linear` one call: under vmap it would fall into products, views and sums."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    shared = not any(is_batchedtensor(item) for item in (weight, bias) if item is not None)
    if shared and input.dim() > 0:
        made: Tensor = torch.ops.weft.linear(input, weight, bias)
        return made
    return functional.linear(input, weight, bias)


@torch.library.custom_op("weft::linear", mutates_args=())
def _linear_op(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(input, weight, bias)


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
    schemas = [getattr(node.target, "_schema", None) for node in module.graph.nodes]
    if not any(schema and schema.is_mutable for schema in schemas):  # else their order must be kept
        join_products(module.graph)
        stable_topological_sort(module)
        module.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return _cell(name, module.graph, tuple(specs), tuple(weights))


def _cell(name: str, graph: fx.Graph, specs: tuple[Spec, ...], weights: tuple[str, ...]) -> Cell:
    """The graph as a cell: calls on weights only come first."""
    given = list(graph.find_nodes(op="placeholder"))
    shared = [pair for pair in zip(given, weights, strict=False) if pair[0].users]
    weights = tuple(weight for _, weight in shared)
    places = {node: place for place, (node, _) in enumerate(shared)}
    constant = set(places)
    for node in given[len(given) - len(specs) :]:
        places[node] = len(places)
    first: list[fx.Node] = []
    rest: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
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


def join_products(graph: fx.Graph) -> None:
    """Linears of a cell that could be one become one, in place.

        linear(a, U, b) + linear(c, V, d)   ->  linear(cat(a, c), cat(U, V), b + d)
        linear(a, U, b), linear(a, V, d)    ->  parts of linear(a, cat(U, V), cat(b, d))

    The joined weights depend on weights only, so they are computed once. Sums are added up in
    another order, so results differ in the last bits. New nodes go to the end of the graph, which
    has to be sorted.
    """
    for node in list(graph.nodes):
        if node.target is aten.add.Tensor and not node.kwargs and len(node.args) == 2:
            left, right = node.args
            _add_up(graph, left, right, node)
    by_argument: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if is_linear(node) and node.users:
            by_argument.setdefault((node.args[0], _bias(node) is None), []).append(node)
    for (argument, _), nodes in by_argument.items():
        if len(nodes) > 1:
            _side_by_side(graph, argument, nodes)


def is_linear(node: Any) -> bool:
    """Whether a node is a linear whose weights are shared by all rows."""
    return isinstance(node, fx.Node) and str(node.target).startswith("weft.linear")


def _bias(node: fx.Node) -> Any:
    return node.args[2] if len(node.args) > 2 else None


def _make(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda each: each.meta["val"]))
    return node


def _add_up(graph: fx.Graph, left: Any, right: Any, add: fx.Node) -> None:
    """A sum of two linears becomes a linear of both arguments side by side."""
    if not is_linear(left) or not is_linear(right) or len(left.users) + len(right.users) > 2:
        return
    one, other = left.args[0], right.args[0]
    shape, other_shape = one.meta["val"].shape, other.meta["val"].shape
    if left is right or one is other or shape[:-1] != other_shape[:-1]:
        return
    both = [one, other], len(shape) - 1
    known = (u for u in one.users if u.target is aten.cat.default and u.args == both)
    argument = next(known, None) or _make(graph, aten.cat.default, *both)
    weight = _make(graph, aten.cat.default, [left.args[1], right.args[1]], 1)
    biases = [bias for bias in (_bias(left), _bias(right)) if bias is not None]
    bias = _make(graph, aten.add.Tensor, *biases) if len(biases) == 2 else (*biases, None)[0]
    joined = _make(graph, torch.ops.weft.linear.default, argument, weight, bias)
    add.replace_all_uses_with(joined)


def _side_by_side(graph: fx.Graph, argument: fx.Node, nodes: list[fx.Node]) -> None:
    """Linears of one argument become one, and its result is cut into theirs."""
    weight = _make(graph, aten.cat.default, [node.args[1] for node in nodes], 0)
    bias = None
    if _bias(nodes[0]) is not None:
        bias = _make(graph, aten.cat.default, [_bias(node) for node in nodes], 0)
    joined = _make(graph, torch.ops.weft.linear.default, argument, weight, bias)
    start, dim = 0, joined.meta["val"].dim() - 1
    for node in nodes:
        stop = start + int(node.meta["val"].shape[-1])
        piece = _make(graph, aten.slice.Tensor, joined, dim, start, stop)
        node.replace_all_uses_with(piece)
        start = stop
