"""The `Rows` of an FX graph: for each call, what splitting the batch does to it, and why.

The graph is run once on fake tensors. Every call falls apart into ATen operators, seen by a
dispatch mode; the row rules say where the rows of each result are. A call takes the worst kind
of its operators:

    batch-free < row-wise < additive (at the aten level) < random < mixing

    FX call  x.flatten(1).softmax(0)          ATen: view (rows on dim 0), _softmax along dim 0
             row-wise, then mixing: "_softmax works along the batch"

Nothing is computed and nothing of the user's is touched.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.utils.weak import WeakIdKeyDictionary

from torchweft.capture.blocks.likeness import BlockError
from torchweft.capture.rows.axes import (
    FREE,
    SYMBOLIC,
    AtenCall,
    Axis,
    Mixing,
    RowRule,
    Symbols,
    bind,
    decomposition_of,
    flops_of,
    overload_of,
    tensors_in,
    written_by,
)
from torchweft.capture.rows.math import is_sum
from torchweft.capture.rows.table import HIGHER, rule_for
from torchweft.private.core import (
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    TorchDispatchMode,
    enable_python_dispatcher,
    tree_leaves,
)

BYTES = "_weft_bytes"  # of a fake tensor: the number of its bytes, if it is not its storage's
FAILURES = (NotImplementedError, TypeError, RuntimeError, AssertionError, ValueError)
AGAIN = "weft_again"  # of a node: its example is that of an earlier call of the same block
ORDER = ("batch-free", "row-wise", "additive", "random", "mixing")
QUIET = frozenset(
    {"prim::device", "prim::layout", "aten::size", "aten::stride", "aten::numel", "aten::dim"}
    | {"aten::storage_offset", "aten::sym_size", "aten::sym_stride", "aten::sym_numel"}
    | {"aten::sym_storage_offset", "aten::is_contiguous", "aten::is_strides_like_format"}
    | {"aten::is_non_overlapping_and_dense"}
)
INLINED = ("invoke_subgraph", "tag_activation_checkpoint", "wrap", "wrap_activation_checkpoint")
SILENT = logging.Logger("silent", logging.CRITICAL)
PLACES = (
    *(operator.getitem, operator.setitem),
    *(torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default),
)
SWITCHES = ("_set_grad_enabled", "_enter_autocast", "_exit_autocast")


@dataclass
class CallRows:
    """One call of the graph: its result on fake tensors and what was seen inside."""

    node: fx.Node
    value: Any = None
    kind: str = "batch-free"
    reason: str = ""
    written: list[torch.Tensor] = field(default_factory=list)
    only_views: bool = True
    draws: bool = False
    flops: Any = 0
    seen: list[AtenCall] = field(default_factory=list)
    twins: Callable[[], list[AtenCall]] | None = None

    @property
    def atens(self) -> list[AtenCall]:
        """The operators that it falls apart into; those of a twin are made when asked for."""
        return self.seen if self.twins is None else self.twins()

    def worsen(self, kind: str, reason: str = "") -> None:
        """Take a kind if it is worse than the one that it has."""
        if ORDER.index(kind) > ORDER.index(self.kind):
            self.kind, self.reason = kind, reason


@dataclass
class Rows:
    """What is known of every call, and where the rows of every fake tensor are.

    lone: why no part may have a single row; empty if it may.
    """

    symbols: Symbols
    calls: dict[fx.Node, CallRows]
    axes: MutableMapping[torch.Tensor, Axis]
    level: str = "torch"
    zeros: Any = field(default_factory=WeakIdKeyDictionary)
    lone: list[str] = field(default_factory=list)

    @cached_property
    def bound(self) -> frozenset[Any]:
        """The symbols whose value the inputs tell."""
        nodes = [node for node in self.calls if node.op == "placeholder"]
        leaves = tree_leaves(list(map(self.value, nodes)))
        sizes = [s for leaf in leaves for s in getattr(leaf, "shape", [leaf])]
        exprs = [self.symbols.expr(size) for size in sizes if isinstance(size, SYMBOLIC)]
        return frozenset[Any]().union(*(expr.free_symbols for expr in exprs))

    def axis(self, tensor: torch.Tensor) -> Axis | None:
        """Where the rows of a tensor are; None if it has no batch."""
        return self.axes.get(tensor)

    def value(self, node: fx.Node) -> Any:
        return self.calls[node].value

    def is_number(self, node: fx.Node) -> bool:
        """Whether the result of a node is the number of each row."""
        value = self.value(node)
        axis = self.axis(value) if isinstance(value, torch.Tensor) else None
        return axis is not None and bool(axis.step)


def find_rows(
    gm: fx.GraphModule,
    symbols: Symbols,
    declared: Mapping[fx.Node, str] | None = None,
    *,
    level: str = "torch",
    given: Mapping[str, Axis | None] | None = None,
    twins: Callable[[fx.Node, Rows], bool] | None = None,
) -> Rows:
    """Look at every call of a Dynamo graph. `declared` are kinds that the user vouches for.

    level: at "aten" sums over rows are additive. given: where the rows of inputs are, by name.
    twins: fills in an inlined block that is like an earlier one.
    """
    rows = Rows(symbols, {}, WeakIdKeyDictionary(), level)
    fake_mode = fake_mode_of(gm)
    watcher = _Watcher(rows)
    with contextlib.ExitStack() as stack:
        if (env := fake_mode.shape_env) is not None:
            stack.enter_context(env.ignore_fresh_unbacked_symbols())
            stack.enter_context(env.suppress_guards())
        for context in (torch.no_grad(), fake_mode, watcher, _closed_autocast()):
            stack.enter_context(context)
        _Walker(gm, rows, watcher, fake_mode, declared or {}, given or {}, twins).walk()
    return rows


def fake_mode_of(gm: fx.GraphModule) -> Any:
    """The mode of the fake tensors of a graph."""
    for node in gm.graph.nodes:
        for tensor in tensors_in(node.meta.get("example_value")):
            if hasattr(tensor, "fake_mode"):
                return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def _unguarded(mode: Any) -> Iterator[None]:
    """Fail where code takes another way by a number of rows: parts have other numbers."""
    env = getattr(mode, "shape_env", None)
    if env is None:
        yield
        return
    with patch.object(env, "log", SILENT), env.error_on_new_guards():
        yield


@contextlib.contextmanager
def _closed_autocast() -> Iterator[None]:
    """Leave autocast as it was, even if the graph is left in the middle."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    enabled = torch.is_autocast_enabled("cpu")
    try:
        yield
    finally:
        while torch.autocast_increment_nesting() - 1 > depth:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
        torch.set_autocast_enabled("cpu", enabled)


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each ATen operator, moves the axes along and writes into the current call."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self.call: CallRows | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        result = func(*args, **given[1])
        rows, name = self.rows, func._schema.name
        if self.call is not None and name not in QUIET:
            made, bound = tensors_in(result), bind(func, *given)
            bare = name.partition("::")[2]
            found = rows.symbols, rows.axis, rows.level, rows.lone
            aten = AtenCall(bare, func, given, bound, made, *found)
            self._look(aten, self.call)
        return result

    def _look(self, aten: AtenCall, call: CallRows) -> None:
        """Find the kind of one operator and the axes of its results."""
        call.seen.append(aten)
        call.written += aten.written
        made = aten.results[0] if len(aten.results) == 1 else tuple(aten.results)
        call.flops = call.flops + flops_of(aten.func, aten.given, made)
        call.only_views = call.only_views and not aten.written and is_view(aten)
        axes: list[Axis | None]
        if call.kind == "additive":
            call.worsen("mixing", "it goes on with a sum over rows")
        try:
            kind, axes = self._judge(aten)
        except Mixing as mixes:
            adds = self.rows.level == "aten" and is_sum(aten, self.rows.zeros)
            call.worsen(*(("additive", "a sum over rows") if adds else ("mixing", str(mixes))))
            axes = [_guess(aten, tensor) for tensor in aten.results]
        else:
            call.worsen(kind, "it draws random numbers" if kind == "random" else "")
            call.draws = call.draws or kind == "random"
        if aten.name == "zeros" or (aten.name == "full" and aten.args["fill_value"] == 0):
            self.rows.zeros[aten.results[0]] = True
        moves = torch.Tag.inplace_view in aten.func.tags
        old = () if moves else {id(tensor) for tensor in aten.tensors}
        for tensor, axis in zip(aten.results, axes, strict=True):
            if axis is not None and id(tensor) not in old:
                self.rows.axes[tensor] = axis

    def _judge(self, aten: AtenCall) -> tuple[str, list[Axis | None]]:
        """The kind of one operator and the axes of its results. Raises `Mixing`."""
        symbols = aten.symbols
        if _draws(aten):
            return "random", [_guess(aten, tensor) for tensor in aten.results]
        scalars = {name: arg for name, arg in aten.args.items() if symbols.inside(arg)}
        everything = aten.tensors + aten.results
        shaped = any(symbols.dims(tensor) for tensor in everything)
        if not shaped and not scalars and not any(aten.axis_of(tensor) for tensor in aten.tensors):
            return "batch-free", [None] * len(aten.results)
        if _by_data(aten):
            raise Mixing("what it makes depends on the data of the whole batch")
        if any(symbols.dims(tensor) and aten.axis_of(tensor) is None for tensor in aten.tensors):
            raise Mixing("it reads a value whose rows cannot be told apart")
        rule = rule_for(aten.func) or RowRule(self._apart, frozenset(scalars))
        if set(scalars) - rule.sizes:
            raise Mixing("its result depends on the batch size")
        if not rule.counts and any(axis and axis.step for axis in map(aten.axis_of, aten.tensors)):
            raise Mixing(f"{aten.name} reads the numbers of the rows")
        try:
            place = rule.find(aten)
        except (LookupError, *FAILURES) as error:
            raise Mixing(f"its row rule failed ({type(error).__name__}: {error})") from error
        axes = place if isinstance(place, list) else [place] * len(aten.results)
        for tensor, axis in zip(aten.results, axes, strict=True):
            if axis is FREE or (axis is None and tensor.numel() == 0):
                continue
            if axis is None or not symbols.fits(axis, tensor):
                raise Mixing("its result has no clear rows")
        return "row-wise", [None if axis is FREE else axis for axis in axes]

    def _apart(self, aten: AtenCall) -> list[Axis | None]:
        """The axes of the results of an operator without a rule, by what it is made of in PyTorch's
        own words. Raises `Mixing` if that mixes rows, or takes another way by their number."""
        assert self.call is not None, "an operator is looked at only inside a call"
        decomposed = decomposition_of(aten.func)
        if decomposed is None:
            name = aten.func._schema.name.replace("::", ".")
            raise Mixing(f"no rule says how {name} treats rows")
        inside = _Watcher(self.rows)
        inside.call = call = CallRows(self.call.node)
        mode = next((t.fake_mode for t in aten.tensors if hasattr(t, "fake_mode")), None)
        try:
            with inside, _unguarded(mode):
                made = decomposed(*aten.given[0], **aten.given[1])
        except FAILURES as error:
            raise Mixing(f"{aten.name} cannot be taken apart ({type(error).__name__})") from error
        results = tensors_in(made)
        if call.kind not in ("row-wise", "batch-free") or len(results) != len(aten.results):
            raise Mixing(f"inside of {aten.name}: {call.reason or 'it makes something else'}")
        return [self.rows.axis(result) for result in results]


def _by_data(aten: AtenCall) -> bool:
    """Whether the shape of the result, or a number, depends on data."""
    if aten.name in ("index", "_unsafe_index"):  # tagged so for the sake of masks only
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in aten.tensors[1:])
    tags = aten.func.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def _draws(aten: AtenCall) -> bool:
    """Whether it draws random numbers; attention without dropout, which could, does not."""
    if torch.Tag.nondeterministic_seeded not in aten.func.tags:
        return False
    if aten.name in ("native_dropout", "dropout", "alpha_dropout", "feature_dropout"):
        return bool(aten.args.get("train")) and aten.args.get("p") != 0
    return "dropout_p" not in aten.args or aten.args["dropout_p"] != 0.0


def _guess(aten: AtenCall, tensor: torch.Tensor) -> Axis | None:
    """Rows of what a mixing operator made: any place is right, that of an operand is best."""
    for operand in aten.tensors:
        axis = aten.axis_of(operand)
        if axis is not None and axis.dim < tensor.dim() and aten.symbols.fits(axis, tensor):
            return axis.uncounted()
    return aten.symbols.uniform(tensor)


def is_view(aten: AtenCall) -> bool:
    """Whether an operator makes no bytes of its own."""
    storages = {id_of(tensor) for tensor in aten.tensors}
    return bool(storages) and all(id_of(tensor) in storages for tensor in aten.results)


def id_of(tensor: torch.Tensor) -> int:
    """A number for the bytes of a (fake) tensor: aliases have the same."""
    known: int | None = getattr(tensor, BYTES, None)
    return int(tensor.untyped_storage()._cdata) if known is None else known


@dataclass
class _Walker:
    """Runs the graph node by node and opens a `CallRows` for each."""

    gm: fx.GraphModule
    rows: Rows
    watcher: _Watcher
    fake_mode: Any
    declared: Mapping[fx.Node, str]
    given: Mapping[str, Axis | None]
    twins: Callable[[fx.Node, Rows], bool] | None = None

    def walk(self) -> None:
        self.interpreter = fx.Interpreter(self.gm)
        for node in self.gm.graph.nodes:
            if node in self.rows.calls or (self.twins and self.twins(node, self.rows)):
                continue
            call = self.rows.calls[node] = CallRows(node)
            if node.op == "placeholder":
                call.value = node.meta.get("example_value")
                if node.name not in self.given:
                    self._tag(call.value)
                elif (axis := self.given[node.name]) and self.rows.symbols.fits(axis, call.value):
                    self.rows.axes[call.value] = axis
            elif node.op == "get_attr":
                call.value = self.interpreter.fetch_attr(str(node.target))
                if isinstance(call.value, torch.Tensor):
                    call.value = self.fake_mode.from_tensor(call.value)
            elif node.op == "output":
                call.value = self._arguments(node.args)
            else:
                self._run(call)

    def _tag(self, value: Any) -> None:
        """Put the rows of what nothing is known of where its shape says."""
        for tensor in tensors_in(value):
            if (axis := self.rows.symbols.uniform(tensor)) is not None:
                self.rows.axes[tensor] = axis

    def _arguments(self, args: Any) -> Any:
        return fx.map_arg(args, self.rows.value)

    def _run(self, call: CallRows) -> None:
        node = call.node
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            return
        self.watcher.call = call
        try:
            call.value = self._compute(call)
        except (Mixing, *FAILURES) as error:
            if AGAIN in node.meta:
                raise BlockError(f"block: {node.name} cannot be looked into.") from error
            call.value = node.meta.get("example_value")
            text = f"it cannot be looked into ({type(error).__name__})"
            call.worsen("mixing", str(error) if isinstance(error, Mixing) else text)
            call.only_views = False
            if (func := overload_of(node.target)) is not None:
                bound = bind(func, self._arguments(node.args), self._arguments(node.kwargs))
                call.written += written_by(func, bound)
            self._tag(call.value)
        if call.kind == "mixing":
            self._look_again(call)
        self.watcher.call = None
        self._hold_numbers(call)
        if any(map(self.rows.axis, tensors_in((call.value, self._arguments(node.args))))):
            call.worsen("row-wise")  # it may have done nothing at all: `x.contiguous()`
        if node in self.declared and call.kind in ("mixing", "row-wise"):
            call.kind, call.reason = self.declared[node], ""

    def _hold_numbers(self, call: CallRows) -> None:
        """Numbers of rows are counted anew by each op that reads them, whole or in parts. So they
        may be read as places, but not be handed to others."""
        for tensor in tensors_in(call.value):
            axis = self.rows.axis(tensor)
            if axis is not None and axis.step and not _only_places(call.node):
                call.worsen("mixing", "what it makes depends on the number of the row")
                self.rows.axes[tensor] = axis.uncounted()

    def _look_again(self, call: CallRows) -> None:
        """Look at a call that seems to mix rows in the words that PyTorch has for sizes which are
        not known, as Dynamo did: some operators else take the number of rows for a constant."""
        tensors = tensors_in(self._arguments((call.node.args, call.node.kwargs)))
        plain = all(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not plain or {*map(id_of, tensors)} & {*map(id_of, call.written)}:
            return  # a transform of torch.func, or a call that has written already
        self.watcher.call = again = CallRows(call.node)
        try:
            with enable_python_dispatcher(), _unguarded(self.fake_mode):
                value = self._compute(again)
        except (Mixing, *FAILURES):
            return
        if again.kind in ("row-wise", "batch-free"):
            again.value, again.seen = value, []  # these words are not those that will run
            vars(call).update(vars(again))

    def _compute(self, call: CallRows) -> Any:
        node = call.node
        args, kwargs = self._arguments(node.args), self._arguments(node.kwargs)
        if isinstance(node.target, HigherOrderOperator):
            return self._higher_order(call, args)
        return getattr(self.interpreter, node.op)(node.target, args, kwargs)

    def _higher_order(self, call: CallRows, args: Any) -> Any:
        """Look into the subgraph of an operator that only wraps calls; some others have rules."""
        name = str(call.node.target)
        graphs = [arg for arg in args if isinstance(arg, fx.GraphModule)]
        if name in INLINED and len(graphs) == 1:
            operands = [arg for arg in args if not isinstance(arg, fx.GraphModule | str)]
            return fx.Interpreter(graphs[0]).run(*operands)
        made = call.node.meta.get("example_value")
        if name not in HIGHER or self.rows.level == "aten" or call.node.kwargs or made is None:
            raise Mixing(f"{name} is run as one op over all rows")
        axes = HIGHER[name](args, self.rows.axis, self.rows.symbols, made)
        for tensor, axis in zip(tree_leaves(made), axes, strict=True):
            if axis is not None and self.rows.symbols.fits(axis, tensor):
                self.rows.axes[tensor] = axis
            elif tensor.numel() != 0:
                raise Mixing("its result has no clear rows")
        call.worsen("row-wise")
        call.only_views, call.seen = False, []
        return made


def _only_places(node: fx.Node) -> bool:
    """Whether a tensor is read only as places in others, maybe with dims of size one added."""
    for user in node.users:
        target, base = user.target, user.args[0] if user.args else None
        spread = target in ("unsqueeze", torch.unsqueeze, torch.ops.aten.unsqueeze.default)
        if target is operator.getitem and base is node:
            items = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
            spread = all(item is None or item == slice(None, None, None) for item in items)
        if spread and base is node:
            if not _only_places(user):
                return False
        elif target not in PLACES or base is node:
            return False
    return True


def is_size(value: Any) -> bool:
    """Whether a result is made of sizes only: a SymInt, a torch.Size, a number."""
    leaves = tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, (*SYMBOLIC, int, float, bool)) for leaf in leaves)


def is_getitem(node: fx.Node) -> bool:
    """Whether a node takes one result out of several."""
    return node.op == "call_function" and node.target is operator.getitem
