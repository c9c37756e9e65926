"""`fuse`: ops that stand one behind the other as one op.

    [norm] [gate] [act]      ->      [norm gate act]     one body, one step of a plan

Ops end at marks, at the borders of repeated blocks, and where something slow is waited for. Calls
of ops that are fused share a key, so they are cut as one, like those of a mark. What a strategy
could not run as one op is refused: a collective, other rows, a call in between that one waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from torch import fx

from torchweft.capture.marks import Mark
from torchweft.capture.ops.regions import is_slow
from torchweft.capture.ops.units import FUSED, state_name
from torchweft.capture.rewrites.rewriting import CannotError, Site, written_in
from torchweft.plan.graph import Op
from torchweft.plan.rewrite import Rewrite

if TYPE_CHECKING:
    from torchweft.capture.ops.assembly import Assembly


def fuse(
    built: Assembly, rewrite: Rewrite, named: Sequence[fx.Node]
) -> tuple[list[Site], list[str]]:
    """Have the ops of what is named cut as one, in each layer by themselves.

    Raises `CannotError` if there were no two such ops.
    """
    calls = set(named)
    chosen = [op for op in built.ops if calls.intersection(built.regions_of[op.name].calls)]
    sites, reasons = list[Site](), list[str]()
    for ops in _groups(chosen):
        try:
            _check(built, ops)
            together = [node for op in ops for node in built.regions_of[op.name].calls]
            _gather(built, together, f"{ops[0].name} to {ops[-1].name}")
        except CannotError as why:
            reasons.append(str(why))
            continue
        for node in together:
            node.meta[FUSED] = ops[0].name
        sites.append(Site(together, f"x {len(ops)} ops as one"))
    if not sites:
        alone = f"{', '.join(op.name for op in chosen) or 'nothing'} is one op already"
        raise CannotError(f"{'; '.join(reasons[:3]) or alone}.")
    return sites, reasons


def _groups(chosen: Sequence[Op]) -> Iterator[list[Op]]:
    """The chosen ops of each layer, if there are two at the least."""
    for _, ops in groupby(chosen, key=lambda op: op.layer):
        if len(group := list(ops)) > 1:
            yield group


def _check(built: Assembly, ops: Sequence[Op]) -> None:
    """Raise `CannotError` if ops cannot be one."""
    names = f"{ops[0].name} to {ops[-1].name}"
    for op in ops:
        region = built.regions_of[op.name]
        if op.collective is not None:
            raise CannotError(f"{names}: {op.name} is a collective, which is an op by itself")
        if any(is_slow(unit) for unit in region.units):
            raise CannotError(f"{names}: {op.name} is what others are to run beside")
        if op.rows != ops[0].rows:
            raise CannotError(f"{names}: {ops[0].name} is {ops[0].rows}, {op.name} is {op.rows}")
        if op.rows == "random":
            raise CannotError(f"{names}: {op.name} draws random numbers")
    plain = Mark("plain")
    marks = [built.regions_of[op.name].mark or plain for op in ops]
    if len({(mark.uses, mark.rows, mark.graph, mark.inner) for mark in marks}) > 1:
        raise CannotError(f"{names}: their marks do not say the same of them")
    states = [name for op in ops for name in built.regions_of[op.name].states]
    if len(set(states)) < len(states):
        raise CannotError(f"{names}: they touch one side state")


def _gather(built: Assembly, calls: Sequence[fx.Node], names: str) -> None:
    """Bring calls side by side: what they do not wait for goes before, what waits for them behind.

    Raises `CannotError` if one of them waits for such a call, or something is written in between.
    """
    order = {node: at for at, node in enumerate(built.gm.graph.nodes)}
    ends = sorted(map(order.__getitem__, calls))
    stretch = [node for node, at in order.items() if ends[0] <= at <= ends[-1]]
    # Sizes, and what each op computes for itself, may stay where they are.
    inside = {*calls, *filter(built.is_copied, stretch)}
    span, behind = [node for node in stretch if node not in inside], set[fx.Node]()
    for node in stretch:
        if node in inside and behind.intersection(node.all_input_nodes):
            between = next(used for used in node.all_input_nodes if used in behind)
            raise CannotError(
                f"{names}: {between.name} stands between them, which {node.name} needs"
            )
        if node not in inside and (inside | behind).intersection(node.all_input_nodes):
            behind.add(node)
    written = written_in(built)
    for node in (*span, *calls) if span else ():
        if node in written or built.rows.calls[node].draws or state_name(node):
            raise CannotError(
                f"{names}: {node.name} is or stands between them, and keeps its place"
            )
    first, last = stretch[0], stretch[-1]
    for node in span:
        if node in behind:
            last.append(node)
            last = node
        else:
            first.prepend(node)
