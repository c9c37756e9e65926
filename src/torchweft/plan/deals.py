"""`beside`: what dealt rows are computed with, which must not matter to which rank; `Alike`.

    r0 (dealt) --norm0(r0, scale)--> n0    scale = once0(weight)    {"tp": norm0, once0; weight}

Parts deal other rows to a rank than the whole batch does. So what meets dealt rows must be the same
on all ranks: inputs that ranks can compare, and what is made of those alone. A result that differs
between ranks by its nature (a draw, a reduce_scatter, anything made of rows) is none of that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torchweft.plan.graph import Op, Value

ALIKE = ("all_reduce", "all_gather_into_tensor", "broadcast")
"""Collectives that give all ranks the same."""


class Alike(NamedTuple):
    """What the ranks of a communicator must be given alike, for each computes a share for all of
    them: inputs, by name, and calls, as text."""

    communicator: str
    names: frozenset[str]
    code: str = ""


class Beside(NamedTuple):
    """What the ranks of a communicator must have in common for the sake of dealt rows.

    ops: those that touch shares and those that make what these meet. inputs: what they depend on.
    """

    ops: tuple[str, ...]
    inputs: frozenset[str]


def beside(
    ops: Sequence[Op], values: Mapping[str, Value], draws: Callable[[Op], bool] | None = None
) -> tuple[dict[str, Beside], str]:
    """For each communicator what dealt rows are computed with; and why some of that differs
    between ranks, empty if nothing does.

    draws: whether an op draws random numbers.
    """
    makers: dict[str, list[Op]] = defaultdict(list)
    meets: dict[str, dict[str, Op]] = defaultdict(dict)
    for op in ops:
        for name in (*op.makes, *op.mutates):
            makers[_root(values, name)].append(op)
        for name in (*op.touched, *op.makes):
            if (batch := values[name].batch) is not None and batch.deal is not None:
                meets[batch.deal.communicator][op.name] = op
    made = {name for op in ops for name in op.makes}
    common: dict[str, Beside] = {}
    for communicator, met in meets.items():
        waiting, seen = [name for op in met.values() for name in op.touched], set[str]()
        while waiting:
            name = _root(values, waiting.pop())
            if name in seen or values[name].batch is not None:
                continue
            seen.add(name)
            for op in makers[name]:
                if _gives_all_the_same(op, communicator):
                    continue
                if op.collective is not None or (draws is not None and draws(op)):
                    return {}, f"{name!r}, which meets shares, is another on each rank"
                if any(values[read].batch is not None for read in op.touched):
                    return {}, f"{name!r}, which meets shares, is made of rows"
                met[op.name] = op
                waiting += op.touched
            if name not in made and values[name].dtype == "opaque":
                return {}, f"{name!r}, which meets shares, cannot be compared between ranks"
        common[communicator] = Beside(tuple(sorted(met)), frozenset(seen - made))
    return common, ""


def _gives_all_the_same(op: Op, communicator: str) -> bool:
    talk = op.collective
    if talk is None or talk.communicator != communicator:
        return False
    return talk.kind.removesuffix("_coalesced") in ALIKE


def _root(values: Mapping[str, Value], name: str) -> str:
    """The value whose bytes a value shares."""
    while (alias := values[name].alias_of) is not None:
        name = alias
    return name
