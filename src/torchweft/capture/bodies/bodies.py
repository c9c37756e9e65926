"""The `Body`: what an op runs. Reads come in, makes go out, sizes are filled in per run.

    body(x, weight, env={"s0": 3})  ->  (y,)

A body is a small FX module. Its tensors are arguments (weights too), and so are the sizes it
needs, computed from `env` for the rows at hand: a part sees its own number of rows and never
that of the whole. Equal stretches of a graph have equal keys and share one module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from torchweft.capture.bodies.calls import write_calls
from torchweft.capture.bodies.outs import Into
from torchweft.capture.marks import target_name
from torchweft.capture.ops.units import source_of, state_name, storages
from torchweft.capture.rows.axes import SYMBOLIC, size_of
from torchweft.capture.rows.rows import INLINED, Rows
from torchweft.errors import CaptureError, SizeError
from torchweft.plan.sizes import Size
from torchweft.private.core import (
    HigherOrderOperator,
    exit_autocast,
    set_grad_enabled_,
    tree_leaves,
    tree_map,
)

Function = Callable[..., Any]


@dataclass(frozen=True)
class Body:
    """What an op runs, in its forms.

    body(*reads, env=env)          makes, with sizes taken from `env`
    body.function(*reads, *sizes)  the same, for a caller that has evaluated `sizes` itself
    body.issue(*reads, *sizes) -> handle, body.complete(handle) -> makes     for a collective
    body.into.function(...)        makes, written where it is told; see `outs`

    graph: whether a device graph may hold it. `examples` are its reads as fake tensors; `inner` is
    the inner compiler that a mark asks for.
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
    inner: str | None = None

    def __call__(self, *reads: Any, env: Mapping[str, int] | None = None) -> tuple[Any, ...]:
        """Run on whole values or on the values of a part; `env` gives each symbol its number."""
        sizes = [size.evaluate(env or {}) for size in self.sizes]
        made: tuple[Any, ...] = self.function(*reads, *sizes)
        return made

    @property
    def function(self) -> Function:
        """The plain function of reads and sizes."""
        issue, complete, forward = self.issue, self.complete, self.code.forward
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
        """What it does as lines of a program; None if the program must call it. See `calls`."""
        if self.issue is not None or self.switches_grad:
            return None
        return write_calls(self.code.graph, arguments, targets, constant)


# This Python function refuses a part of one row, for the sake of training; its kernel does not.
UNCHECKED: Mapping[Any, Any] = MappingProxyType(
    {torch.nn.functional.group_norm: torch.group_norm},
)
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

    def __init__(
        self,
        gm: fx.GraphModule,
        rows: Rows,
        is_copied: Callable[[fx.Node], bool],
        canonical: Mapping[fx.Node, fx.Node],
        modes: Mapping[fx.Node, Modes],
        written: set[int],
    ) -> None:
        self.gm, self.rows, self.is_copied = gm, rows, is_copied
        self.canonical, self.modes, self.written = canonical, modes, written
        self.graph = fx.Graph()
        self.local: dict[fx.Node, Any] = {}
        self.reads: dict[fx.Node, fx.Node] = {}
        self.sizes: dict[Size, fx.Node] = {}
        self.entered: list[tuple[fx.Node, fx.Node]] = []
        self.grad: bool | None = None
        self.switches_grad = False

    def write(self, nodes: Iterable[fx.Node]) -> None:
        """Copy calls, in order."""
        for node in nodes:
            self._copy(node)

    def finish(
        self, makes: Iterable[fx.Node], codes: dict[str, fx.GraphModule]
    ) -> tuple[fx.GraphModule, tuple[Size, ...], str]:
        """The module, its sizes and its key. Equal bodies share one module: `codes`, by key."""
        self._switch(((), self.grad))
        self.graph.output(tuple(self.local[node] for node in makes))
        self._order_placeholders()
        sizes = tuple(self.sizes)
        key = key_of(self.gm, self.graph, sizes)
        if key not in codes:
            codes[key] = fx.GraphModule(self.gm, self.graph, class_name="Body")
        return codes[key], sizes, key

    def _order_placeholders(self, more: Iterable[fx.Node] = ()) -> None:
        """Reads first, sizes after them, then more, calls behind all."""
        for node in reversed([*self.reads.values(), *self.sizes.values(), *more]):
            first = next(iter(self.graph.nodes))
            if node is not first:
                first.prepend(node)

    def _copy(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        self._switch(self.modes[node])
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
        return bool(made & self.written) and not made & given

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
        node = self.canonical[node]
        if node in self.local:
            return self.local[node]
        value = self.rows.value(node)
        if node.op == "get_attr" and not isinstance(value, torch.Tensor):
            self.local[node] = self.graph.get_attr(str(node.target))
            return self.local[node]
        if self.is_copied(node):
            try:
                return tree_map(self._size, value) if _is_size(value) else self._copy(node)
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


def _is_size(value: Any) -> bool:
    leaves = tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, (*SYMBOLIC, int, float)) for leaf in leaves)


def key_of(gm: fx.GraphModule, graph: fx.Graph, sizes: tuple[Size, ...]) -> str:
    """16 hex digits for what a graph computes, whatever its nodes are called."""
    numbers: dict[fx.Node, str] = {}
    lines = [str(list(map(str, sizes)))]
    for number, node in enumerate(graph.nodes):
        numbers[node] = f"%{number}"
        shown = fx.map_arg((node.args, node.kwargs), lambda used: _Name(numbers[used]))
        target = "" if node.op == "placeholder" else target_name(node)
        if node.op in ("get_attr", "call_module"):
            target = str(getattr(gm.get_submodule(str(node.target)), "code", node.target))
        lines.append(f"{node.op} {target} {shown}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


class _Name(str):
    """Text that shows itself without quotes."""

    def __repr__(self) -> str:
        return str(self)
