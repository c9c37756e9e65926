"""The `Calls` of a body: what it does, call by call, so that a program can do it without the body.

    l0 = k0(v3, v1)         a function is a constant of the program; reads are its variables
    v4 = l0.relu()          the last name is that of the make
    l0 = None               nothing is kept longer than the body itself would

To call a body costs a frame, a tuple, and a look-up for every name in it. Where ops are tiny that
is most of what a call costs beyond its kernels. Functions, types and texts become constants:
nothing of a graph is read as source but the names of methods and of keyword arguments.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.graph import magic_methods

NAME = re.compile(r"\{?\w+\}?|z\[\d+\]")


@dataclass(frozen=True)
class Calls:
    """Lines in which `{0}` is an argument of the body, `{k0}` a constant, `{l0}` what is made.

    makes: what the body's makes are called in the lines.
    """

    lines: tuple[str, ...]
    constants: tuple[Any, ...]
    makes: tuple[str, ...]

    def write(
        self,
        arguments: Sequence[str],
        targets: Sequence[str],
        constant: Callable[[Any], str],
    ) -> list[str] | None:
        """The lines of a program, where makes go to the targets; None if it must call the body.

        An argument is written as often as it is used, so it has to be a name. constant: the name
        of a constant in the program.
        """
        if not all(NAME.fullmatch(argument) for argument in arguments):
            return None
        names = {f"l{number}": f"l{number}" for number in range(len(self.lines))}
        names |= {f"k{number}": constant(value) for number, value in enumerate(self.constants)}
        names |= dict(zip(self.makes, targets, strict=True))
        return [line.format(*arguments, **names) for line in self.lines]


MAX_CALLS = 8  # beside more, one for the body is not seen, and the source stays short


class WriteError(Exception):
    """There is something in a body that cannot stand in a program's source."""


def calls_of(graph: fx.Graph) -> Calls | None:
    """The calls of a body; None if there are many, or if they cannot be written down."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if len(nodes) > MAX_CALLS:
        return None
    try:
        return _CallPrinter(graph, nodes).calls()
    except WriteError:
        return None


class _CallPrinter:
    """Prints calls as lines of Python."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        given = [node for node in graph.nodes if node.op == "placeholder"]
        self.names = {node: f"{{{number}}}" for number, node in enumerate(given)}
        self.names |= {node: f"{{l{number}}}" for number, node in enumerate(nodes)}
        output: Any = graph.output_node().args[0]
        self.makes: tuple[fx.Node, ...] = tuple(output)
        self.constants: list[Any] = []
        self.last = {used: node for node in nodes for used in (node, *node.all_input_nodes)}

    def calls(self) -> Calls:
        """The finished lines. Raises `WriteError`."""
        if len(set(self.makes)) < len(self.makes) or not set(self.makes) <= set(self.nodes):
            raise WriteError
        lines = tuple(self._line(node) for node in self.nodes)
        makes = tuple(self.names[node].strip("{}") for node in self.makes)
        return Calls(lines, tuple(self.constants), makes)

    def _line(self, node: fx.Node) -> str:
        """A call, and the end of what nobody uses after it."""
        ends = [used for used in self.nodes if self.last[used] is node and used not in self.makes]
        call = f"{self.names[node]} = {self._call(node)}"
        return "; ".join([call, *(f"{self.names[used]} = None" for used in ends)])

    def _call(self, node: fx.Node) -> str:
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
        return f"{self._constant(target)}({', '.join(args + named)})"

    def _text(self, arg: Any) -> str:
        """An argument as source."""
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, list):
            return f"[{', '.join(map(self._text, arg))}]"
        if isinstance(arg, dict):
            raise WriteError
        if isinstance(arg, tuple | slice) and _holds_nodes(arg):
            if isinstance(arg, slice):
                return f"slice({', '.join(map(self._text, (arg.start, arg.stop, arg.step)))})"
            return f"({', '.join(map(self._text, arg))},)"
        if arg is None or type(arg) is bool or (type(arg) is int and arg >= 0):
            return repr(arg)
        return self._constant(arg)

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"{{k{len(self.constants) - 1}}}"


def _checked(name: str) -> str:
    """A name of the graph that may stand in source."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise WriteError
    return name


def _holds_nodes(arg: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(arg, found.append)
    return bool(found)
