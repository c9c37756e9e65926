"""Side state in a graph: which calls touch what, as names of values that stand for it.

    attend(x, layer="0"), attend(y, layer="1")     ->   state.forward.0, state.forward.1
    attend(x), attend(y)                           ->   state.forward, state.forward

An op that touches side state mutates its value, which all parts share: its parts run in order, and
the ops that touch one value run one after another. Two calls that touch one value are never in one
op, or a part would come to the second before the others come to the first. Calls that an argument
tells apart are: within an op they touch one thing once, as the write and the read of one cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from torchweft.capture.marks import MarkRule, told_of
from torchweft.capture.rows.aten_call import bind, overload_of
from torchweft.capture.splitters import STATE

Touched = Mapping[str, bool]
"""Names of values that stand for side state; whether one op may touch each several times."""


def states_of(graph: fx.Graph, rules: Sequence[MarkRule]) -> dict[fx.Node, Touched]:
    """For each call that touches side state the names of what it touches."""
    known: dict[tuple[str, Any], str] = {}
    found: dict[fx.Node, Touched] = {}
    for node in graph.nodes:
        names: dict[str, bool] = {}
        for rule in told_of(node, rules, "state"):
            name, key = rule.mark.name, _argument(node, rule.by)
            number = sum(other == name for other, _ in known)
            plain = f"{STATE}{name}"
            names[known.setdefault((name, key), f"{plain}.{number}" if key else plain)] = bool(key)
        if names:
            found[node] = names
    return found


def _argument(node: fx.Node, name: str) -> Any:
    """The argument of a call by its name in the schema; None if it has no such argument."""
    func = overload_of(node.target)
    return bind(func, node.args, node.kwargs).get(name) if name and func is not None else None
