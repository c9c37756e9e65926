"""The calls of a small body as lines of a program, so that it runs them without the body.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.graph import magic_methods

NAME = re.compile(r"\{?\w+\}?|z\[\d+\]")
MAX_CALLS = 8  # beside more, one for the body is not seen, and the source stays short


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
        """An argument as source."""
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
