"""The `Body`: what an op runs. Reads come in, makes go out, sizes are filled in per run.

    body(x, weight, env={"s0": 3})  ->  (y,)

A body is a small FX module. Its tensors are arguments (weights too), and so are the sizes it
needs, computed from `env` for the rows at hand: a part sees its own number of rows and never
that of the whole. Equal stretches of a graph have equal keys and share one module.

The calls of a small body are also written as lines of a program, which then runs them without it:

    l0 = k0(v3, v1)         a function is a constant of the program; reads are its variables
    v4 = l0.relu()          the last name is that of the make
    l0 = None               nothing is kept longer than the body itself would

To call a body costs a frame, a tuple, and a look-up for every name in it. Where ops are tiny that
is most of what a call costs beyond its kernels. Functions, types and texts become constants:
nothing of a graph is read as source but the names of methods and of keyword arguments.
"""

from __future__ import annotations

import hashlib
import keyword
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.graph import magic_methods

from torchweft.capture.marks import target_name
from torchweft.capture.ops.units import source_of, state_name, storages
from torchweft.capture.rows.axes import SYMBOLIC, Order, size_of
from torchweft.capture.rows.rows import INLINED, is_size
from torchweft.errors import CaptureError, SizeError
from torchweft.plan.graph import Batch
from torchweft.plan.sizes import ONE, Size
from torchweft.private.core import HigherOrderOperator, exit_autocast, set_grad_enabled_, tree_map

if TYPE_CHECKING:
    from torchweft.capture.ops.assembly import Assembly

NAME = re.compile(r"\{?\w+\}?|z\[\d+\]")
MAX_CALLS = 8  # beside more, one for the body is not seen, and the source stays short
Function = Callable[..., Any]


@dataclass(frozen=True)
class ResultBytes:
    """Bytes for one result: shape, dtype, device, where its rows are, its dims from outermost.

    views: for each make of the body that shows these bytes, by number, the function
    (room, *sizes) -> make, or None if it is the room itself. `made_by` is the maker's operator,
    `call` the function of the user's call that it is a part of.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    batch: Batch
    order: Order
    views: Mapping[int, Function | None]
    made_by: Any = None
    call: Any = None

    @property
    def has_gaps(self) -> bool:
        """Whether the rows of a part are not next to each other in memory."""
        outside = self.order[: self.order.index(self.batch.dim)]
        return any(self.shape[dim] != ONE for dim in outside)


@dataclass(frozen=True)
class Into:
    """The form of a body that writes where it is told.

    function(*reads, *sizes, *slices) -> makes       slices: a part's rows of each room

    `code` is its graph, equal for equal keys.
    """

    function: Function
    sizes: tuple[Size, ...]
    rooms: tuple[ResultBytes, ...]
    code: fx.GraphModule | None = None
    key: str = ""

    @property
    def placed(self) -> set[int]:
        """The makes that lie in rooms, by number."""
        return {number for room in self.rooms for number in room.views}


@dataclass(frozen=True)
class Body:
    """What an op runs, in its forms.

    body(*reads, env=env)          makes, with sizes taken from `env`
    body.function(*reads, *sizes)  the same, for a caller that has evaluated `sizes` itself
    body.issue(*reads, *sizes) -> handle, body.complete(handle) -> makes     for a collective
    body.into.function(...)        makes, written where it is told; see `outs`

    graph: whether a device graph may hold it. `examples` are its reads as fake tensors, `orders` is
    how each of its makes lies in memory, where that is known; `inner` is the inner compiler that a
    mark asks for. What that made runs in the place of `code`: `compiled`, and `by` are the
    structures that Inductor compiles, form by form.
    """

    key: str
    code: fx.GraphModule
    sizes: tuple[Size, ...] = ()
    switches_grad: bool = False
    issue: Function | None = None
    complete: Function | None = None
    graph: bool = True
    into: Into | None = None
    examples: tuple[Any, ...] = ()
    orders: tuple[Order | None, ...] = ()
    inner: str | None = None
    compiled: Function | None = None
    by: tuple[Any, ...] = ()

    def __call__(self, *reads: Any, env: Mapping[str, int] | None = None) -> tuple[Any, ...]:
        """Run on whole values or on the values of a part; `env` gives each symbol its number."""
        sizes = [size.evaluate(env or {}) for size in self.sizes]
        made: tuple[Any, ...] = self.function(*reads, *sizes)
        return made

    @property
    def function(self) -> Function:
        """The plain function of reads and sizes."""
        issue, complete, forward = self.issue, self.complete, self.code.forward
        if self.compiled is not None:
            return self.compiled
        if issue is not None and complete is not None:
            return lambda *arguments: complete(issue(*arguments))
        if not self.switches_grad:
            return forward

        def restoring(*arguments: Any) -> Any:
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                return forward(*arguments)

        return restoring

    def write_calls(
        self, arguments: Sequence[str], targets: Sequence[str], constant: Callable[[Any], str]
    ) -> list[str] | None:
        """What it does as lines of a program; None if the program must call it."""
        if self.issue is not None or self.switches_grad or self.compiled is not None:
            return None
        return write_calls(self.code.graph, arguments, targets, constant)


# This Python function refuses a part of one row, for the sake of training; its kernel does not.
UNCHECKED: Mapping[Any, Any] = MappingProxyType({torch.nn.functional.group_norm: torch.group_norm})
COPIES_OR_NOT = ("reshape", "reshape_as", "flatten", "ravel", "contiguous")
Modes = tuple[tuple[fx.Node, ...], bool | None]


def laid_out(tensor: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    """The tensor itself if it has these strides, else a copy that has."""
    if list(tensor.stride()) == stride:
        return tensor
    empty = torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def modes_of(graph: fx.Graph) -> dict[fx.Node, Modes]:
    """For each node the autocast switches it stands under, and the grad mode if it was set."""
    stack: list[fx.Node] = []
    grad: bool | None = None
    modes: dict[fx.Node, Modes] = {}
    for node in graph.nodes:
        match state_name(node):
            case "_enter_autocast":
                stack.append(node)
            case "_exit_autocast":
                stack = [enter for enter in stack if enter is not node.args[0]]
            case "_set_grad_enabled":
                grad = bool(node.args[0])
        modes[node] = (tuple(stack), grad)
    return modes


class BodyWriter:
    """Copies calls of a graph into a new one, with everything from outside as an argument."""

    def __init__(self, built: Assembly) -> None:
        self.built, self.gm, self.rows = built, built.gm, built.rows
        self.graph = fx.Graph()
        self.local: dict[fx.Node, Any] = {}
        self.reads: dict[fx.Node, fx.Node] = {}
        self.sizes: dict[Size, fx.Node] = {}
        self.entered: list[tuple[fx.Node, fx.Node]] = []
        self.grad: bool | None = None
        self.switches_grad = False

    def write(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self._copy(node)

    def finish(
        self,
        makes: Iterable[fx.Node],
        codes: dict[str, fx.GraphModule],
        more: Iterable[fx.Node] = (),
    ) -> tuple[fx.GraphModule, tuple[Size, ...], str]:
        """The module, its sizes and its key. Equal bodies share one module: `codes`, by key.

        It takes reads first, sizes after them, then more.
        """
        self._switch(((), self.grad))
        self.graph.output(tuple(self.local[node] for node in makes))
        for node in reversed([*self.reads.values(), *self.sizes.values(), *more]):
            first = next(iter(self.graph.nodes))
            if node is not first:
                first.prepend(node)
        sizes = tuple(self.sizes)
        key = key_of(self.gm, self.graph, sizes)
        if key not in codes:
            codes[key] = fx.GraphModule(self.gm, self.graph, class_name="Body")
        return codes[key], sizes, key

    def _copy(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        self._switch(self.built.modes[node])
        if target_name(node).split(".")[-1] == "as_strided":
            args = (self._laid_out(node.args[0], args[0]), *args[1:])
        if isinstance(node.target, HigherOrderOperator) and str(node.target) in INLINED:
            module = next(arg for arg in args if isinstance(arg, fx.Node) and arg.op == "get_attr")
            operands = [arg for arg in args if arg is not module and not isinstance(arg, str)]
            new = self.graph.call_module(str(module.target), tuple(operands))
        else:
            target = UNCHECKED.get(node.target, node.target)
            new = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
        if self._may_turn_into_view(node):
            new = self.graph.call_method("clone", (new,))
        self.local[node] = new
        return new

    def _laid_out(self, old: Any, new: Any) -> fx.Node:
        """The argument of `as_strided`, whose meaning hangs on strides, laid out as in eager."""
        tensor = self.rows.value(old)
        shape, stride = (
            [self._size(size) for size in sizes] for sizes in (tensor.shape, tensor.stride())
        )
        return self.graph.call_function(laid_out, (new, shape, stride))

    def _may_turn_into_view(self, node: fx.Node) -> bool:
        """Whether a call that copies the whole could be a mere view of a part with one row, and
        the copy is written: the write must not reach what the view would show."""
        if target_name(node).split(".")[-1] not in COPIES_OR_NOT:
            return False
        made = storages(self.rows.value(node))
        given = storages([self.rows.value(used) for used in node.all_input_nodes])
        return bool(made & self.built.written) and not made & given

    def _switch(self, wanted: Modes) -> None:
        """Enter and leave autocast, and set grad mode, as the next call needs it."""
        enters, grad = wanted
        kept = 0
        while kept < min(len(self.entered), len(enters)) and self.entered[kept][0] is enters[kept]:
            kept += 1
        for _, emitted in reversed(self.entered[kept:]):
            self.graph.call_function(exit_autocast, (emitted,))
        del self.entered[kept:]
        for enter in enters[kept:]:
            emitted = self.graph.call_function(enter.target, enter.args, dict(enter.kwargs))  # type: ignore[arg-type]
            self.entered.append((enter, emitted))
        if grad is not None and grad != self.grad:
            self.graph.call_function(set_grad_enabled_, (grad,))
            self.grad, self.switches_grad = grad, True

    def _argument(self, node: fx.Node) -> Any:
        """What stands for `node` in the new graph: a copy, a size, a constant or an argument."""
        if node in self.local:
            return self.local[node]
        node = self.built.canonical[node]
        if node in self.local:
            return self.local[node]
        value = self.rows.value(node)
        if node.op == "get_attr" and not isinstance(value, torch.Tensor):
            self.local[node] = self.graph.get_attr(str(node.target))
            return self.local[node]
        if self.built.is_copied(node):
            try:
                return tree_map(self._size, value) if is_size(value) else self._copy(node)
            except SizeError:
                return self._copy(node)
        if isinstance(value, list | tuple | dict):
            raise CaptureError(
                f"capture: {target_name(node)} hands a whole {type(value).__name__} to another op. "
                f"At {source_of(node)}.",
                rule="tuple",
                source=source_of(node),
            )
        if node not in self.reads:
            self.reads[node] = self.graph.placeholder(f"read{len(self.reads)}")
        return self.reads[node]

    def _size(self, leaf: Any) -> Any:
        if not isinstance(leaf, SYMBOLIC):
            return leaf
        size = size_of(self.rows.symbols.expr(leaf))
        if size.constant is not None:
            return size.constant
        if size not in self.sizes:
            self.sizes[size] = self.graph.placeholder(f"size{len(self.sizes)}")
        return self.sizes[size]


def key_of(gm: fx.GraphModule, graph: fx.Graph, sizes: tuple[Size, ...]) -> str:
    """16 hex digits for what a graph computes, whatever its nodes are called."""
    numbers: dict[fx.Node, tuple[str, int]] = {}
    lines = [str(list(map(str, sizes)))]
    for number, node in enumerate(graph.nodes):
        numbers[node] = ("node", number)
        shown = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
        target = "" if node.op == "placeholder" else target_name(node)
        if node.op in ("get_attr", "call_module"):
            target = str(getattr(gm.get_submodule(str(node.target)), "code", node.target))
        lines.append(f"{node.op} {target} {shown}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class WriteError(Exception):
    """There is something in a body that cannot stand in a program's source."""


def write_calls(
    graph: fx.Graph,
    arguments: Sequence[str],
    targets: Sequence[str],
    constant: Callable[[Any], str],
) -> list[str] | None:
    """The lines that do what a body does; None if there are many, or if they cannot be written.

    arguments: what the body is given. Each is written as often as it is used, so it must be a name.
    targets: the names of the body's makes. constant: the name of a constant in the program.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    makes: Any = graph.output_node().args[0]
    made_here = len(set(makes)) == len(makes) and set(makes) <= set(nodes)
    if len(nodes) > MAX_CALLS or not made_here or not all(map(NAME.fullmatch, arguments)):
        return None
    given = [node for node in graph.nodes if node.op == "placeholder"]
    names = {node: f"l{number}" for number, node in enumerate(nodes)}
    names |= dict(zip([*given, *makes], [*arguments, *targets], strict=True))
    last = {used: node for node in nodes for used in (node, *node.all_input_nodes)}
    printer = _CallPrinter(names, constant)
    lines = []
    try:
        for node in nodes:
            ends = [used for used in nodes if last[used] is node and used not in makes]
            call = f"{names[node]} = {printer.call(node)}"
            lines.append("; ".join([call, *(f"{names[used]} = None" for used in ends)]))
    except WriteError:
        return None
    return lines


@dataclass(frozen=True)
class _CallPrinter:
    """Prints calls as Python; `names` are those of nodes, `constant` names a constant."""

    names: Mapping[fx.Node, str]
    constant: Callable[[Any], str]

    def call(self, node: fx.Node) -> str:
        """A call as source. Raises `WriteError`."""
        args = [self._text(arg) for arg in node.args]
        named = [f"{_checked(key)}={self._text(arg)}" for key, arg in node.kwargs.items()]
        target: Any = node.target
        if node.op == "call_method":
            return f"{args[0]}.{_checked(target)}({', '.join(args[1:] + named)})"
        if node.op != "call_function":
            raise WriteError
        name = getattr(target, "__name__", "")
        if name in magic_methods and target is getattr(operator, name, None):
            return magic_methods[name].format(*args)
        return f"{self.constant(target)}({', '.join(args + named)})"

    def _text(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, list):
            return f"[{', '.join(map(self._text, arg))}]"
        if isinstance(arg, dict):
            raise WriteError
        if isinstance(arg, tuple) and _holds_nodes(arg):
            return f"({', '.join(map(self._text, arg))},)"
        if isinstance(arg, slice) and _holds_nodes(arg):
            return f"slice({', '.join(map(self._text, (arg.start, arg.stop, arg.step)))})"
        if arg is None or type(arg) is bool or (type(arg) is int and arg >= 0):
            return repr(arg)
        return self.constant(arg)


def _checked(name: str) -> str:
    """A name of the graph that may stand in source."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise WriteError
    return name


def _holds_nodes(arg: Any) -> bool:
    nodes: list[fx.Node] = []
    fx.map_arg(arg, nodes.append)
    return bool(nodes)
