"""The `Guards` of a graph: what Dynamo took for granted about its sizes.

A part is a smaller batch, and it goes through code that was traced for the whole one. So each part
must satisfy what holds for the whole: at least two rows where Dynamo assumed it, a multiple of four
where the model's own code looked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx


@dataclass(frozen=True)
class Guards:
    """Conditions on symbols that a call, and each of its parts, must meet."""

    conditions: tuple[Any, ...] = ()

    def refuse(self, env: Mapping[str, int]) -> str:
        """The first condition that these sizes break, as text; empty if they break none."""
        for condition in self.conditions:
            values = {symbol: env.get(str(symbol)) for symbol in condition.free_symbols}
            if None in values.values():
                continue
            if condition.xreplace({s: sympy.Integer(v) for s, v in values.items()}) == sympy.false:
                return str(condition)
        return ""


def guards_of(gm: fx.GraphModule, batch: str | None) -> Guards:
    """The guards of a captured graph that speak of its batch."""
    env = _shape_env(gm)
    if env is None or batch is None:
        return Guards()
    found: list[Any] = []
    for symbol, span in env.var_to_range.items():
        if str(symbol) == batch:
            found += [sympy.Ge(symbol, span.lower), sympy.Le(symbol, span.upper)]
    for guard in env.guards:
        if batch in map(str, guard.expr.free_symbols):
            found.append(guard.expr)
    return Guards(tuple(c for c in dict.fromkeys(found) if c not in (sympy.true, sympy.false)))


def _shape_env(gm: fx.GraphModule) -> Any:
    for node in gm.graph.nodes:
        fake = getattr(node.meta.get("example_value"), "fake_mode", None)
        if fake is not None and fake.shape_env is not None:
            return fake.shape_env
    return None
