"""`chunk(..., dim="heads")`: an attention and the all_to_all around it, in groups of heads.

    q, k, v [b, s/ranks, heads, d] --all_to_all--> attention [b, heads/ranks, s, d] --all_to_all-->

    all_to_all(q0, k0, v0)   all_to_all(q1, k1, v1)
                             y0 = attention(q0, k0, v0)   y1 = attention(q1, k1, v1)
                                                          all_to_all(y0)               ...(y1)

So Ulysses splits a sequence over ranks. A group has some heads of each rank's share. What is cut is
a `HeadStretch`: all calls from the copies that feed the first all_to_all to the views behind the
last. `HeadAxes` proposes where the heads are. The proof is that of the rows of a batch: the stretch
is run on fake tensors for any number of heads, and the row rules must find each call to treat them
one by one. What they do not vouch for is left whole, with their reason.

Groups take turns: all of them are sent first, then comes one attention after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import fx

from torchweft.capture.ops.collectives import kind_of
from torchweft.capture.ops.units import is_collective, is_wait, storages
from torchweft.capture.rewrites.chunk import Cutter
from torchweft.capture.rewrites.head_axes import MOVES, VIEWS, HeadAxes, called
from torchweft.capture.rewrites.rewriting import CALLED, CannotError, Site, copy_of
from torchweft.capture.rewrites.stretch import EXCHANGE, HeadStretch, Made, prove, write_call
from torchweft.capture.rows.axes import ONE, Axis, exact, tensors_in
from torchweft.capture.rows.rows import Rows
from torchweft.plan.rewrite import Rewrite

if TYPE_CHECKING:
    from torchweft.capture.ops.assembly import Assembly

LAYOUT = (*VIEWS, *MOVES, "contiguous", "clone")
SOFTMAX = ("softmax", "_softmax", "_safe_softmax")
Nodes = Iterable[fx.Node]


def heads(
    built: Assembly, rewrite: Rewrite, named: Sequence[fx.Node]
) -> tuple[list[Site], list[str]]:
    """Cut each attention that is named, or whose all_to_all is, with all that stands around it.

    Raises `CannotError` if nothing was cut.
    """
    cutter, sites, reasons = Cutter(built), list[Site](), list[str]()
    gone = set[fx.Node]()
    for attention in dict.fromkeys(each for node in named for each in _attentions(built, node)):
        if attention in gone:
            continue  # it was cut with another one of the same stretch
        try:
            stretch = _stretch(cutter, attention, rewrite.pieces)
            sites.append(_cut(cutter, stretch, rewrite.pieces))
            gone.update(stretch.calls)
        except CannotError as why:
            reasons.append(f"{attention.name}: {why}")
    if not sites:
        calls = ", ".join(dict.fromkeys(map(called, named)))
        none = f"no attention stands there or between its all_to_alls, only {calls}"
        raise CannotError(f"{'; '.join(reasons[:3]) or none}.")
    return sites, reasons


def _attentions(built: Assembly, node: fx.Node) -> list[fx.Node]:
    """A call if it is an attention; of an all_to_all the one that it feeds or is fed by."""

    def attends(call: fx.Node) -> bool:
        name = called(call)
        value = tensors_in(built.rows.value(call))
        wide = bool(value) and value[0].dim() > 2
        return wide and (name in SOFTMAX or "scaled_dot_product" in name)

    if attends(node):
        return [node]
    if not exchanges(node):
        return []
    for step in (_users, _inputs):
        stops = _nearest(
            built.rows, [node], step, lambda call: is_collective(call) or attends(call)
        )
        if found := [call for call in stops if attends(call)]:
            return found
    return []


def exchanges(node: fx.Node) -> bool:
    """Whether a call starts an all_to_all."""
    return is_collective(node) and kind_of(node) == EXCHANGE


def _users(node: fx.Node) -> Nodes:
    return node.users


def _inputs(node: fx.Node) -> Nodes:
    return node.all_input_nodes


def _nearest(
    rows: Rows, starts: Nodes, step: Callable[[fx.Node], Nodes], stops: Callable[[fx.Node], bool]
) -> list[fx.Node]:
    """The first calls of a kind on all ways of tensors from some calls."""
    found, seen, todo = list[fx.Node](), set(starts), list(starts)
    while todo:
        for node in step(todo.pop()):
            if node not in seen and node in rows.calls and tensors_in(rows.value(node)):
                seen.add(node)
                (found if stops(node) else todo).append(node)
    return found


def _stretch(cutter: Cutter, attention: fx.Node, pieces: int) -> HeadStretch:
    """What stands around an attention, and the proof that it can be cut. Raises `CannotError`."""
    rows, whys = cutter.built.rows, list[CannotError]()
    calls = _calls(cutter, attention)
    shape = rows.symbols.shape(tensors_in(rows.value(attention))[0])
    number, dim = int(shape[-3].as_coeff_Mul()[0]), len(shape) - 3
    for units in (each for each in range(number, 0, -1) if number % each == 0):
        axis = Axis(dim, exact(shape[-3], number), ONE * number / units)
        try:
            axes = HeadAxes(rows, calls, units).spread(attention, axis)
        except CannotError as why:
            whys.append(why)
            continue
        if units < pieces:
            what = "heads" if units == number else "heads of keys"
            raise CannotError(f"each rank has {units} {what}, fewer than {pieces} pieces")
        own = dict.fromkeys(axes)  # a key that serves all heads is sent once
        for node in calls:
            own |= dict.fromkeys([node] if own.keys() & set(node.all_input_nodes) else [])
        stretch = HeadStretch(rows, attention, [node for node in calls if node in own], axes, units)
        _check_place(cutter, stretch)
        prove(stretch)
        return stretch
    raise whys[0]


def _calls(cutter: Cutter, attention: fx.Node) -> list[fx.Node]:
    """All calls from the copies before the first all_to_all to the views behind the last."""
    rows, order = cutter.built.rows, cutter.order
    behind = list(filter(exchanges, _nearest(rows, [attention], _users, is_collective)))
    before = list(filter(exchanges, _nearest(rows, behind, _inputs, is_collective)))
    for where, found in (("behind", behind), ("before", before)):
        if not found:
            raise CannotError(f"no {EXCHANGE} comes {where} it")
    last = [user for node in behind for user in node.users if is_wait(user)]
    for node in last:  # grows
        if len(node.users) == 1 and _is_view(rows, user := next(iter(node.users))):
            last.append(user)
    sent, needed = {*before, *_copies(rows, before)}, set(last)
    start, stop = min(map(order.__getitem__, sent)), max(map(order.__getitem__, last))
    window = list(order)[start : stop + 1]
    for node in window:
        if sent.intersection(node.all_input_nodes):
            sent.add(node)
    for node in reversed(window):
        if node in needed:
            needed.update(node.all_input_nodes)
    inside = sent & needed
    if attention not in inside:
        raise CannotError("what it attends to has not come by an all_to_all_single")
    if not rows.calls.keys() >= inside:
        raise CannotError("another attention that was cut stands between its all_to_alls")
    for node in reversed(window):  # sizes that others read are of the whole
        if node in inside and not tensors_in(rows.value(node)) and node.users.keys() - inside:
            inside.discard(node)
    return sorted(inside, key=order.__getitem__)


def _is_view(rows: Rows, node: fx.Node) -> bool:
    return called(node) in LAYOUT and rows.calls[node].only_views


def _copies(rows: Rows, starts: Nodes) -> set[fx.Node]:
    """The calls that lay out what collectives send, from the first that copies: views are cheap,
    and a slice of one need not be copied once more."""
    layout, todo = dict[fx.Node, None](), list(starts)
    while todo:
        for node in todo.pop().all_input_nodes:
            known = node.op in CALLED and rows.calls.keys() >= {node, *node.all_input_nodes}
            if node not in layout and known and called(node) in LAYOUT:
                layout[node] = None
                todo.append(node)
    copies = set[fx.Node]()
    for node in (node for node in rows.calls if node in layout):
        if not rows.calls[node].only_views or copies.intersection(node.all_input_nodes):
            copies.add(node)
    return copies


def _check_place(cutter: Cutter, stretch: HeadStretch) -> None:
    """Raise `CannotError` if the calls could not stand together where the first that reads all of
    them is, or if others change what they read."""
    built, order, calls = cutter.built, cutter.order, set(stretch.calls)
    place = stretch.place(order)
    modes = [built.modes[node] for node in stretch.calls if tensors_in(built.rows.value(node))]
    if any(mode != built.modes[place.prev] for mode in modes):
        raise CannotError("autocast or gradients are switched between its all_to_alls")
    cut = [stretch.axes[node] for node in stretch.given if node in stretch.axes]
    known = all(axis.outer.is_Integer and axis.inner.is_Integer for axis in cut)
    joined = [stretch.axes[node] for node in stretch.ends if node in stretch.axes]
    if not known or not all(a.outer.is_Integer or a.inner.is_Integer for a in joined):
        raise CannotError("rows of the batch lie inside of its heads, or heads inside of rows")
    for node in stretch.ends:
        late = min(order[user] for user in node.users if user not in calls)
        if late < order[place]:
            raise CannotError(f"{node.name} is read before all that it sends is there")
        if storages(built.rows.value(node)) & built.written:
            raise CannotError(f"{node.name} is written in place")
    read = storages([built.rows.value(node) for node in stretch.given])
    node = stretch.calls[0]
    while (node := node.next) is not stretch.calls[-1]:
        if node not in calls and read & storages(built.rows.calls[node].written):
            raise CannotError("what it reads is written before its last all_to_all")


def _cut(cutter: Cutter, stretch: HeadStretch, num_groups: int) -> Site:
    """Put groups of heads in the place of a stretch."""
    site, before = Site(stretch.calls, stretch.what), set(cutter.graph.nodes)
    bounds = [stretch.units * number // num_groups for number in range(num_groups + 1)]
    calls = set(stretch.calls)
    with cutter.graph.inserting_before(stretch.place(cutter.order)):
        groups = _write_groups(cutter, stretch, bounds)
        for end in stretch.ends:
            pieces = zip([group[end] for group in groups], pairwise(bounds), strict=True)
            whole = _join(cutter, [(node, z - a) for node, (a, z) in pieces], stretch.axes[end])
            cutter.built.rows.calls[whole] = cutter.built.rows.calls[end]
            end.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in calls)
    site.new = [node for node in cutter.graph.nodes if node not in before]
    for node in site.new:
        if not node.meta:  # what joins the groups
            copy_of(stretch.ends[-1], node)
    for node in reversed(stretch.calls):
        if not node.users:
            cutter.graph.erase_node(node)
    cutter.order = {node: number for number, node in enumerate(cutter.graph.nodes)}
    return site


def _write_groups(cutter: Cutter, stretch: HeadStretch, bounds: Sequence[int]) -> list[Made]:
    """The calls of all groups of heads, by those that they stand for: up to the next wait one group
    after another."""
    stage = dict[fx.Node, int]()
    for node in stretch.calls:
        ahead = [stage[given] for given in node.all_input_nodes if given in stage]
        stage[node] = max(ahead, default=0) + is_wait(node)
    groups = [Made() for _ in bounds[1:]]
    for turn in range(max(stage.values()) + 1):
        calls = [node for node in stretch.calls if stage[node] == turn]
        for number, (made, span) in enumerate(zip(groups, pairwise(bounds), strict=True)):
            before, label = set(cutter.graph.nodes), f"{number + 1}of{len(groups)}"
            for node in calls:
                for given in node.all_input_nodes:
                    if given not in made:
                        made[given] = _slice(cutter, given, stretch.axes.get(given), *span)
                write_call(cutter.graph, stretch, node, made, span[1] - span[0])
                copy_of(node, made[node], label)
            for new in [node for node in cutter.graph.nodes if node not in before]:
                if not new.meta:
                    copy_of(calls[0], new, label)
    return groups


def _slice(cutter: Cutter, given: fx.Node, axis: Axis | None, start: int, stop: int) -> fx.Node:
    """Some units of heads of what is read; all of what is the same for all heads."""
    if axis is None:
        return given
    start, stop = start * int(axis.inner), stop * int(axis.inner)
    if axis.outer == 1:
        return cutter.slice(given, axis.dim, start, stop)
    by_rank = cutter.call("unflatten", given, axis.dim, [int(axis.outer), -1])
    return cutter.call(
        "flatten", cutter.slice(by_rank, axis.dim + 1, start, stop), axis.dim, axis.dim + 1
    )


def _join(cutter: Cutter, groups: Sequence[tuple[fx.Node, int]], axis: Axis) -> fx.Node:
    """The whole of what groups, of so many units of heads, have made."""
    dim, outer = axis.dim, axis.outer
    if outer == 1:
        return cutter.call("cat", [node for node, _ in groups], dim)
    by_rank = list[fx.Node]()
    for node, count in groups:
        sizes = [int(outer), -1] if outer.is_Integer else [-1, count * int(axis.inner)]
        by_rank.append(cutter.call("unflatten", node, dim, sizes))
    return cutter.call("flatten", cutter.call("cat", by_rank, dim + 1), dim, dim + 1)
