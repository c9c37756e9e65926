"""The `HeadStretch`: calls that are cut by heads; how a group of heads goes through them, and the
proof that groups do not meet.

    write_call   a call for some heads: sizes in views, and what goes to each rank, are theirs
    prove        the calls on fake tensors for `heads` heads, a symbol: the row rules look at each
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from torchweft.capture.ops.units import is_collective
from torchweft.capture.rewrites.chunk import RESHAPES, sizes_of
from torchweft.capture.rewrites.head_axes import called
from torchweft.capture.rewrites.rewriting import CannotError
from torchweft.capture.rows.axes import SYMBOLIC, Axis, Symbols, tensors_in, wrap
from torchweft.capture.rows.rows import FAILURES, Rows, find_rows
from torchweft.private.core import FakeTensorMode, tree_leaves, tree_map
from torchweft.private.dynamo import ConstantSource

EXCHANGE = "all_to_all_single"
ANY = 127  # heads in the proof: no size that was forgotten fits it
Made = dict[fx.Node, fx.Node]


@dataclass(frozen=True)
class HeadStretch:
    """Calls around an attention, in their order, and where heads are in what they make and read.

    units: how many groups of heads each rank has that are never cut.
    """

    rows: Rows
    attention: fx.Node
    calls: list[fx.Node]
    axes: Mapping[fx.Node, Axis]
    units: int

    @property
    def what(self) -> str:
        count = sum(map(is_collective, self.calls))
        return f"{called(self.attention)} with {count} {EXCHANGE}"

    def rank(self, node: fx.Node) -> int:
        """How many dims a result has."""
        return tensors_in(self.rows.value(node))[0].dim()

    @cached_property
    def given(self) -> list[fx.Node]:
        """What it reads."""
        read = (given for node in self.calls for given in node.all_input_nodes)
        return [node for node in dict.fromkeys(read) if node not in self.calls]

    @cached_property
    def ends(self) -> list[fx.Node]:
        """The calls whose result others read, behind an all_to_all: those before it may stay."""
        sent, calls = set[fx.Node](), set(self.calls)
        for node in self.calls:
            if is_collective(node) or sent.intersection(node.all_input_nodes):
                sent.add(node)
        return [node for node in self.calls if node in sent and not calls.issuperset(node.users)]

    def place(self, order: Mapping[fx.Node, int]) -> fx.Node:
        """The first node before which all is there that it reads."""
        last = max(self.given, key=order.__getitem__)
        return max(self.calls[0], last.next, key=order.__getitem__)


def write_call(
    graph: fx.Graph, stretch: HeadStretch, node: fx.Node, made: Made, heads: Any
) -> None:
    """Write a call for so many units of heads, a number or a node. Raises `CannotError`."""
    given: Any = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    args, kwargs = given
    axis, name, target = stretch.axes.get(node), called(node), node.target
    if axis is not None and name in (*RESHAPES, "expand"):
        sizes = sizes_of(args)
        if len(sizes) == stretch.rank(node):  # not a torch.Size, which some call here has made
            sizes[axis.dim] = _size(graph, axis, heads, sizes, axis.dim, spreads=name == "expand")
            args = (args[0], *sizes) if node.op == "call_method" else (args[0], sizes)
        if name.endswith("view"):  # a slice may have gaps
            by_name = node.op == "call_method"
            target = "reshape" if by_name else torch.ops.aten.reshape.default
    elif axis is not None and name == "unflatten" and isinstance(node.args[0], fx.Node):
        sizes, dim = list(args[2]), wrap(args[1], stretch.rank(node.args[0]))
        if 0 <= axis.dim - dim < len(sizes):
            sizes[axis.dim - dim] = _size(graph, axis, heads, sizes, axis.dim - dim)
        args = (args[0], dim, sizes)
    elif axis is not None and name == EXCHANGE and axis.dim == 0:
        args = (args[0], *_splits(graph, axis, heads, args), *args[3:])
    made[node] = graph.create_node(node.op, target, args, kwargs)


def _size(
    graph: fx.Graph, axis: Axis, heads: Any, sizes: Sequence[Any], at: int, *, spreads: bool = False
) -> Any:
    """The size of the dim of some heads, in a view whose sizes have it at a place."""
    others = [size for number, size in enumerate(sizes) if number != at]
    count = axis.outer * axis.inner
    if spreads or sizes[at] == -1 or (not count.is_Integer and -1 not in others):
        return -1
    if not count.is_Integer:
        raise CannotError("a view has heads beside a number of rows that it leaves open")
    return _times(graph, int(count), heads)


def _times(graph: fx.Graph, count: int, heads: Any) -> Any:
    if isinstance(heads, int):
        return count * heads
    return graph.call_function(operator.mul, (heads, count))


def _splits(graph: fx.Graph, axis: Axis, heads: Any, args: Sequence[Any]) -> list[list[Any]]:
    """How much goes to each rank and comes from it, of some heads."""
    num_ranks = len(args[1])
    if len(dict.fromkeys([*args[1], *args[2]])) > 1:
        raise CannotError("it sends unequal pieces")
    count = axis.outer * axis.inner / num_ranks
    if count.is_Integer:
        one = _times(graph, int(count), heads)
    else:
        total = graph.call_function(torch.ops.aten.sym_size.int, (args[0], 0))
        one = graph.call_function(operator.floordiv, (total, num_ranks))
    return [[one] * num_ranks] * 2


def prove(stretch: HeadStretch) -> None:
    """Raise `CannotError` unless the calls treat heads one by one, however many there are."""
    rows = stretch.rows
    fakes, graph, made = _Fakes(rows), fx.Graph(), Made()
    count = graph.placeholder("heads")
    count.meta["example_value"] = fakes.size(fakes.heads)
    axes: dict[str, Axis | None] = {}
    for node in stretch.given:
        made[node] = new = graph.placeholder(f"given_{node.name}")
        own = stretch.axes.get(node)
        axes[new.name] = own and fakes.axis(own)
        new.meta["example_value"] = fakes.value(rows.value(node), own)
    for node in stretch.calls:
        write_call(graph, stretch, node, made, count)
    graph.output([made[node] for node in stretch.ends])
    code = fx.GraphModule({}, graph)
    try:
        found = find_rows(code, Symbols(fakes.heads), level=rows.level, given=axes)
    except (AttributeError, *FAILURES) as error:
        raise CannotError(f"another number of heads does not fit its calls ({error})") from error
    for node in stretch.calls:
        call = found.calls[made[node]]
        if call.kind not in ("batch-free", "row-wise"):
            why = call.reason.replace("batch", "heads")
            raise CannotError(f"{node.name} does not treat heads one by one ({why})")
        if call.written:
            raise CannotError(f"{node.name} writes in place")
    for node in stretch.ends:
        axis = stretch.axes.get(node)
        seen = found.axis(tensors_in(found.value(made[node]))[0])
        if axis is None or seen is None or seen.uncounted() != fakes.axis(axis):
            raise CannotError(f"the heads of {node.name} are not where they seem to be")


class _Fakes:
    """Fake tensors as those of a graph, but of any number of heads."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env)
        self.symbols: dict[Any, Any] = {}
        self.hints: dict[Any, int] = {}
        self.heads = self._symbol("heads", ANY)
        placeholders = [rows.value(node) for node in rows.calls if node.op == "placeholder"]
        for leaf in tree_leaves(placeholders):
            for size in getattr(leaf, "shape", [leaf]):
                if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
                    symbol, hint = size.node.expr, size.node.hint
                    if symbol not in self.symbols and hint is not None:
                        self.symbols[symbol] = self._symbol(str(symbol), hint)

    def _symbol(self, name: str, hint: int) -> Any:
        source = ConstantSource(name)
        symbol = self.env.create_symbol(
            hint, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True
        )
        self.hints[symbol] = hint
        return symbol

    def size(self, expr: Any) -> Any:
        """A size of our symbols, as calls see it."""
        if expr.is_Integer:
            return int(expr)
        return self.env.create_symintnode(expr, hint=int(expr.xreplace(self.hints)))

    def expr(self, size: Any) -> Any:
        """A size of the graph, in our symbols."""
        expr = sympy.sympify(size.node.expr if isinstance(size, SYMBOLIC) else size)
        if expr.free_symbols - self.symbols.keys():
            raise CannotError(f"nothing that is given has {expr} entries")
        return expr.xreplace(self.symbols)

    def axis(self, axis: Axis) -> Axis:
        """An axis in our symbols."""
        outer, inner = (each.xreplace(self.symbols) for each in (axis.outer, axis.inner))
        return Axis(axis.dim, outer, inner)

    def value(self, value: Any, axis: Axis | None) -> Any:
        """What a call gives: a tensor, of any number of heads where an axis is given; sizes."""

        def anew(item: Any) -> Any:
            if isinstance(item, SYMBOLIC):
                return self.size(self.expr(item))
            if not isinstance(item, torch.Tensor):
                return item
            shape = [self.expr(size) for size in item.shape]
            if axis is not None:
                own = self.axis(axis)
                shape[own.dim] = own.outer * self.heads * own.inner
            with self.mode:
                sizes = list(map(self.size, shape))
                return torch.empty(sizes, dtype=item.dtype, device=item.device)

        return tree_map(anew, value)
