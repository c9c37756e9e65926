"""Peeling: a last call that cannot write where it is told runs once, over all parts.

A layer norm or a convolution has no form that writes into a slice. If its result is wanted whole,
it is peeled off the stretch before it: the parts write its *input* where that belongs, and it makes
the whole result at once. Nothing is copied. Those who read it row by row wait for it, so nothing
slow (a collective, a read from disk) may stand behind them: parts overlap there.

    row  row  add  norm -> output         ->      [row row add]  [norm]
                                                   part by part   once

A view that only calls over all parts read is taken by each of them, of the whole. A second call
that counts (a product, a convolution) is never peeled off behind the first: then a copy costs less
than what is no longer done in parts.
"""

from __future__ import annotations

import torch
from torch import fx

from torchweft.capture.bodies.outs import Makers, Unfit
from torchweft.capture.ops.regions import WHOLE, is_slow
from torchweft.capture.ops.units import Unit, handed_out
from torchweft.capture.rows.rows import Rows


def peel(units: list[Unit], rows: Rows, graph: fx.Graph) -> None:
    """Make units mixing that would only make parts to be copied together."""
    if torch.is_grad_enabled() and rows.level == "torch":
        return  # nothing is written in place then, so everything is copied anyway
    home = {node: unit for unit in units for node in unit.nodes}
    makers, handed = Makers(graph, rows, units), handed_out(rows)
    heavy: dict[int, int] = {}
    slow: set[int] = set()
    for unit in reversed(units):
        users = [user for node in unit.nodes for user in _users(node, home)]
        if is_slow(unit) or any(id(user) in slow for user in users):
            slow.add(id(unit))
        plain = unit.kind == "row-wise" and unit.collective is unit.key is None
        if not plain or unit.cheap or unit.writes or unit.draws:
            continue
        whole = list(map(_is_whole, users))
        if _only_views(unit, rows) and all(whole) and _is_inside(unit, users, handed, rows):
            unit.cheap = True  # whoever needs it takes the view of the whole itself
            continue
        if not _works_before(unit, home, rows):
            continue  # nothing would be left in parts
        if not any(whole) or (id(unit) in slow and not all(whole)):
            continue
        shown = [node for node in unit.nodes if any(map(_is_whole, _users(node, home)))]
        reasons = [_reason(node, makers, home) for node in shown]
        if not any(reasons):
            continue
        counts = any(rows.calls[node].flops != 0 for node in unit.nodes)
        weight = counts + max((heavy.get(id(user), 0) for user in users), default=0)
        if weight > 1:
            continue
        heavy[id(unit)] = weight
        why = next(filter(None, reasons))
        unit.kind, unit.reason = "mixing", f"its result is needed whole, and {why}"


def _is_inside(unit: Unit, users: list[Unit | None], handed: set[int], rows: Rows) -> bool:
    """Whether only ops read a result, and not the caller, not even by another name."""
    if not users or None in users:
        return False
    return not any(id(rows.value(node)) in handed for node in unit.nodes)


def _only_views(unit: Unit, rows: Rows) -> bool:
    return all(rows.calls[node].only_views for node in unit.nodes)


def _works_before(unit: Unit, home: dict[fx.Node, Unit], rows: Rows) -> bool:
    """Whether row-wise work, and not only views, leads to a unit."""
    seen, waiting = {id(unit)}, [unit]
    while waiting:
        used = [used for node in waiting.pop().nodes for used in node.all_input_nodes]
        for other in (home[node] for node in used if node in home):
            if id(other) in seen or other.kind != "row-wise":
                continue
            if not _only_views(other, rows):
                return True
            seen.add(id(other))
            waiting.append(other)
    return False


def _is_whole(user: Unit | None) -> bool:
    return user is None or user.kind in WHOLE


def _reason(node: fx.Node, makers: Makers, home: dict[fx.Node, Unit]) -> str:
    """Why a result cannot be written by parts where it belongs; empty if it can."""
    try:
        maker = makers.maker(node)
    except Unfit as unfit:
        return str(unfit)
    unit = home.get(maker.node)
    return "" if unit is not None and unit.kind == "row-wise" else "what it shows is whole already"


def _users(node: fx.Node, home: dict[fx.Node, Unit]) -> list[Unit | None]:
    """The units that read a result; None stands for the caller. Cheap ones pass it on."""
    readers: list[Unit | None] = []
    for user in node.users:
        unit = home.get(user)
        if user.op == "output":
            readers.append(None)
        elif unit is not None and unit.cheap:
            readers += _users(user, home)
        elif unit is not None and unit is not home.get(node):
            readers.append(unit)
    return readers
