"""The `Guards` of a graph: what was taken for granted about its sizes, so that parts keep to it.

A part is a smaller batch, and it goes through code that was traced for the whole one. So each part
must satisfy what holds for the whole: a multiple of four where the model's own code looked. And no
two inputs may overlap in memory (`shared_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import sympy
from torch import Tensor, fx
from torch.nn import Buffer, Parameter

from torchweft.capture.rows.axes import Symbols
from torchweft.capture.rows.rows import fake_mode_of
from torchweft.plan.sizes import Size
from torchweft.private.core import Mod, PythonPrinter, int_oo

SMALLEST = 2  # of the sizes that Dynamo has symbols for


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
        checks = []
        for each in self.conditions:  # as Python: sympy would take longer than the call itself
            names = {s: sympy.Symbol(f"env[{str(s)!r}]", integer=True) for s in each.free_symbols}
            text = PythonPrinter().doprint(each.xreplace(names))
            holds = eval(f"lambda env: {text}", {"math": math})
            checks.append((str(each), frozenset(map(str, each.free_symbols)), holds))
        return checks


class SymbolSlot(NamedTuple):
    """Where a symbol is found: an argument that is a number (dim None), or a dim of a tensor.

    What is found there is the symbol times `factor`.
    """

    symbol: str
    argument: int
    dim: int | None
    factor: int

    def number(self, arguments: Sequence[Any]) -> int:
        """The number that the symbol stands for in a call."""
        given = arguments[self.argument]
        return int(given if self.dim is None else given.shape[self.dim]) // self.factor


def symbol_slots(sizes: Iterable[tuple[int, int | None, Size]]) -> tuple[SymbolSlot, ...]:
    """A slot for each symbol among sizes of arguments (argument, dim, size).

    The factor is 1 wherever an argument has the symbol itself; `5*s0` alone tells `s0` too.
    """
    slots: dict[str, SymbolSlot] = {}
    for argument, dim, size in sizes:
        match size.terms:
            case (((name,), factor),) if size.symbols == {name}:
                if name not in slots or factor < slots[name].factor:
                    slots[name] = SymbolSlot(name, argument, dim, factor)
    return tuple(slots.values())


def guards_of(gm: fx.GraphModule, batch: str | None, same: Sequence[str] = ()) -> Guards:
    """The guards of a captured graph that speak of its batch; `same` are other names for it.

    Dynamo takes every size that it has a symbol for to be 2 at least: it has no symbol for 0 and 1.
    That is no guard of a part, whose calls are run for its own sizes: what a call of one row would
    do otherwise than a call of several, a row rule says (`AtenCall.lone`).
    """
    env = fake_mode_of(gm).shape_env
    if env is None or batch is None:
        return Guards()
    known = {str(symbol): symbol for symbol in env.var_to_range}
    other = {known[name]: known[batch] for name in same if name in known}
    conditions: list[Any] = []
    for symbol, span in env.var_to_range.items():
        if str(symbol) in (batch, *same):
            least = 1 if span.lower == SMALLEST else span.lower
            conditions.append(sympy.Ge(known[batch], least))
            conditions += [sympy.Le(known[batch], span.upper)] if span.upper != int_oo else []
    for guard in env.guards:
        condition = guard.expr.xreplace(other)
        if batch in map(str, getattr(condition, "free_symbols", ())):
            conditions.append(condition)
    return Guards(tuple(c for c in dict.fromkeys(conditions) if c not in (sympy.true, sympy.false)))


def unit_of(gm: fx.GraphModule, symbols: Symbols) -> int:
    """What the guards of a graph say the batch is a multiple of, and with it each part."""
    env = fake_mode_of(gm).shape_env
    if env is None or symbols.batch is None:
        return 1
    known = dict.fromkeys(symbols.same, symbols.batch)
    unit = 1
    for guard in env.guards:
        match guard.expr.xreplace(known):
            case sympy.Eq(args=(Mod(args=(size, sympy.Integer() as factor)), 0)):
                times = sympy.cancel(size / symbols.batch)  # of flattened sequences `3*s0`
                if times.is_Integer:
                    unit = math.lcm(unit, int(factor) // math.gcd(int(times), int(factor)))
    return unit


def shared_bytes(inputs: Sequence[Any]) -> str:
    """Why inputs cannot be cut into rows: two of them overlap in memory; empty if none do.

    A row of one may then be another row of the other, which a write would reach too early.
    """
    spans: list[tuple[int, int]] = []
    for item in {id(item): item for item in inputs if isinstance(item, Tensor)}.values():
        if type(item) in (Tensor, Parameter, Buffer) and item.numel():
            reach = sum((n - 1) * s for n, s in zip(item.shape, item.stride(), strict=True))
            start = item.data_ptr()
            spans.append((start, start + (reach + 1) * item.element_size()))
    spans.sort()
    if any(start < end for (_, end), (start, _) in pairwise(spans)):
        return "alias: two inputs overlap in memory, and one of them may be written"
    return ""
