"""The `Guards` of a graph: what Dynamo took for granted about its sizes.

A part is a smaller batch, and it goes through code that was traced for the whole one. So each part
must satisfy what holds for the whole: at least two rows where Dynamo assumed it, a multiple of four
where the model's own code looked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
from torch import fx

from torchweft.private.core import PythonPrinter, int_oo


@dataclass(frozen=True)
class Guards:
    """Conditions on symbols that a call, and each of its parts, must meet."""

    conditions: tuple[Any, ...] = ()

    def refuse(self, env: Mapping[str, int]) -> str:
        """The first condition that these sizes break, as text; empty if they break none."""
        for text, names, holds in self._checks:
            if names <= env.keys() and not holds(env):
                return text
        return ""

    @cached_property
    def _checks(self) -> list[tuple[str, frozenset[str], Callable[[Mapping[str, int]], bool]]]:
        """Each condition as text, with its symbols, and as a function of their numbers."""
        return [(str(c), frozenset(map(str, c.free_symbols)), _check(c)) for c in self.conditions]


def _check(condition: Any) -> Callable[[Mapping[str, int]], bool]:
    """A condition as Python: sympy itself would take longer than the call that it guards."""
    symbols = sorted(condition.free_symbols, key=str)
    names = {symbol: f"env[{str(symbol)!r}]" for symbol in symbols}
    text = _GuardPrinter(names).doprint(condition)
    found: Callable[[Mapping[str, int]], bool] = eval(f"lambda env: {text}", {"math": math})
    return found


class _GuardPrinter(PythonPrinter):
    """Prints expressions with other names for their symbols."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        super().__init__()
        self.names = names

    def _print_Symbol(self, symbol: Any) -> str:  # noqa: N802
        return self.names[symbol]


def guards_of(gm: fx.GraphModule, batch: str | None, same: Sequence[str] = ()) -> Guards:
    """The guards of a captured graph that speak of its batch; `same` are other names for it."""
    env = _shape_env(gm)
    if env is None or batch is None:
        return Guards()
    known = {str(symbol): symbol for symbol in env.var_to_range}
    other = {known[name]: known[batch] for name in same if name in known}
    found: list[Any] = []
    for symbol, span in env.var_to_range.items():
        if str(symbol) in (batch, *same):
            found.append(sympy.Ge(known[batch], span.lower))
            found += [sympy.Le(known[batch], span.upper)] if span.upper != int_oo else []
    for guard in env.guards:
        condition = guard.expr.xreplace(other)
        if batch in map(str, getattr(condition, "free_symbols", ())):
            found.append(condition)
    return Guards(tuple(c for c in dict.fromkeys(found) if c not in (sympy.true, sympy.false)))


def _shape_env(gm: fx.GraphModule) -> Any:
    for node in gm.graph.nodes:
        fake = getattr(node.meta.get("example_value"), "fake_mode", None)
        if fake is not None and fake.shape_env is not None:
            return fake.shape_env
    return None
