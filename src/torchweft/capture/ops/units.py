"""The `Unit`: calls of an FX graph that can only be cut together.

    split -> getitem, getitem          one unit: several results and who takes them out
    all_reduce -> wait_tensor (-> copy_)   one unit, a network op in two phases
    vmap begins ... vmap ends              one unit (and so for torch.func.grad)

A unit has the worst kind of its calls. Calls that only compute sizes, and calls that switch
autocast or grad mode, are no units: they are put wherever they are needed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx

from torchweft.capture.marks import FRAME, Mark, MarkRule, target_name, told_of
from torchweft.capture.rows.axes import SYMBOLIC, bind, overload_of, tensors_in
from torchweft.capture.rows.rows import ORDER, SWITCHES, Rows, id_of, is_getitem, is_size
from torchweft.capture.rows.table import NAMESPACES
from torchweft.capture.splitters import STATE
from torchweft.private.core import tree_leaves

BLOCK = "weft_block"  # of a node: the call of a block at whose borders ops end
PIECE = "weft_piece"  # of a node: which piece it is of what a rewrite has cut, such as "2of4"
ROOM = ("empty", "zeros", "ones", "full")
FUSED = "weft_fused"  # of a node: the op that it is to be part of, as a rewrite has asked for
SMALL_BYTES, SMALL_FLOPS = 1 << 16, 1 << 20
COPYING = frozenset(
    {torch.ops.aten._to_copy, torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten.cat}
)
TORCH = str(Path(torch.__file__).parent)


@dataclass
class Unit:
    """Calls that stay together; `reads` and `writes` are storages, by number.

    `cause` is the call that a message about it names, `block` the call of a block that it stands
    in, if ops end at the borders of that, `states` the side state that its calls touch.
    """

    nodes: list[fx.Node]
    kind: str
    reason: str
    cause: fx.Node
    mark: Mark | None = None
    key: object = None
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    collective: fx.Node | None = None
    cheap: bool = False
    draws: bool = False
    block: str | None = None
    states: SideState = field(default_factory=dict)


def find_units(
    graph: fx.Graph,
    rows: Rows,
    marks: Mapping[fx.Node, tuple[Mark, object]],
    states: Mapping[fx.Node, SideState],
) -> list[Unit]:
    """The units in program order; `states`: the side state that calls touch."""
    taken: set[fx.Node] = set()
    units: list[Unit] = []
    nested: list[fx.Node] = []
    depth = 0
    for node in graph.nodes:
        name = target_name(node)  # a transform of torch.func (vmap, grad, jvp) begins or ends
        depth += name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
        if depth or nested:
            nested.append(node)
            if depth:
                continue
            nodes, nested = nested, []
        elif node in taken or not is_work(rows, node):
            continue
        else:
            nodes = [node, *_followers(node, rows)]
        taken.update(nodes)
        units.append(_unit(nodes, rows, marks))
    numbers: dict[str, int] = {}
    for unit in units:  # side state counts as written: bytes that no value shows
        for node in unit.nodes:
            unit.states = {**unit.states, **states.get(node, {})}
        unit.writes |= {numbers.setdefault(name, -1 - len(numbers)) for name in unit.states}
    return _alive(units)


def _alive(units: list[Unit]) -> list[Unit]:
    """The units whose results somebody uses, or that do something else."""
    dead: set[fx.Node] = set()
    alive: list[Unit] = []
    for unit in reversed(units):
        acts = unit.writes or unit.draws or unit.collective or is_nested(unit)
        acts = acts or any(map(asserts, unit.nodes))
        users = {user for node in unit.nodes for user in node.users} - set(unit.nodes) - dead
        if acts or users:
            alive.append(unit)
        else:
            dead.update(unit.nodes)
    return alive[::-1]


def is_nested(unit: Unit) -> bool:
    """Whether a unit is a transform of torch.func, whose tensors are not what they seem."""
    return any("nesting" in target_name(node) for node in unit.nodes)


def is_work(rows: Rows, node: fx.Node) -> bool:
    """Whether a call is to be run as part of an op (and is no mere size, input or switch)."""
    call = rows.calls[node]
    if node.op in ("placeholder", "get_attr", "output") or state_name(node):
        return False
    if is_size(call.value):
        exprs = map(rows.symbols.expr, tree_leaves(call.value))
        return not all(expr.free_symbols <= rows.bound for expr in exprs)
    return bool(tensors_in(call.value) or call.written or node.users) or asserts(node)


def state_name(node: fx.Node) -> str:
    """The name of a call that switches a mode of torch, or nothing."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if name in SWITCHES else ""


def asserts(node: fx.Node) -> bool:
    """Whether a call checks something, and so has to run."""
    return "_assert" in target_name(node)


def _followers(node: fx.Node, rows: Rows) -> Iterator[fx.Node]:
    """Calls that belong to `node`: takers of its several results, the end of a collective."""
    if is_collective(node):
        takers = [user for user in node.users if is_getitem(user)]
        waits = [user for maker in (node, *takers) for user in maker.users if is_wait(user)]
        yield from (*takers, *waits)
        if len(waits) == 1 and not takers:
            yield from _copy_back(node, waits[0], rows)
        return
    for user in node.users:
        if is_getitem(user) and user.args[0] is node and isinstance(user.args[1], int | str):
            if isinstance(node.meta.get("example_value"), torch.Tensor):
                continue
            yield user
            yield from _followers(user, rows)


def _copy_back(issue: fx.Node, wait: fx.Node, rows: Rows) -> Iterator[fx.Node]:
    """The copy that makes a collective work in place, if nobody sees the difference: the result
    goes nowhere else, and nobody touches the target between the start and the copy."""
    copy = next(iter(wait.users)) if len(wait.users) == 1 else None
    if copy is None or not is_copy(copy) or copy.args[1] is not wait:
        return
    out, made = rows.value(copy.args[0]), rows.value(wait)  # type: ignore[arg-type]
    if out.dtype != made.dtype or rows.symbols.shape(out) != rows.symbols.shape(made):
        return
    if not isinstance(issue.args[0], fx.Node):
        return
    target, given = storages(out), storages(rows.value(issue.args[0]))
    if target & given and copy.args[0] is not issue.args[0]:
        return
    node = issue.next
    while node is not copy:
        touched = storages([rows.value(used) for used in node.all_input_nodes])
        if (touched | storages(rows.value(node))) & target:
            return
        node = node.next
    yield copy


def is_wait(node: fx.Node) -> bool:
    return "wait_tensor" in target_name(node)


def is_copy(node: fx.Node) -> bool:
    by_name = node.op == "call_method" and node.target == "copy_"
    return (by_name or node.target is torch.ops.aten.copy_.default) and len(node.args) == 2


def is_collective(node: fx.Node) -> bool:
    """Whether a call starts a talk between ranks."""
    name = target_name(node)
    talks = name.split(".")[0] in NAMESPACES or name.startswith("_dtensor.shard_dim_alltoall")
    return talks and not is_wait(node)


def _unit(nodes: list[fx.Node], rows: Rows, marks: Mapping[fx.Node, tuple[Mark, object]]) -> Unit:
    calls = [rows.calls[node] for node in nodes]
    worst = max(calls, key=lambda call: ORDER.index(call.kind))
    cause = worst.node if worst.reason else nodes[0]
    mark, key = marks.get(nodes[0], (None, None))
    if (piece := nodes[0].meta.get(PIECE)) is not None:
        key = ("piece", key, piece)
    if (fused := nodes[0].meta.get(FUSED)) is not None:
        key = ("fused", fused)
    unit = Unit(nodes, worst.kind, worst.reason, cause, mark, key)
    unit.draws, unit.block = any(call.draws for call in calls), nodes[0].meta.get(BLOCK)
    for call in calls:
        unit.writes |= {id_of(tensor) for tensor in call.written}
        for used in call.node.all_input_nodes:
            unit.reads |= storages(rows.value(used))
    if is_collective(nodes[0]):
        unit.collective, unit.key = nodes[0], ("collective", nodes[0].name)
    return unit


def storages(value: Any) -> set[int]:
    """The numbers of all bytes that a result holds."""
    tensors = [value] if isinstance(value, torch.Tensor) else tensors_in(value)
    return {id_of(t) for t in tensors if type(t).__name__ in ("FakeTensor", "Parameter")}


def mark_cheap(units: list[Unit], rows: Rows, noticed: set[int]) -> None:
    """Find the calls that every op that needs them may compute for itself.

    These are numbers of rows, batch-free views, small batch-free results that a single call needs,
    and views of bytes that are written, given or handed out twice (`noticed`): made anew from the
    whole or the part at hand, such a view is never a stale copy.
    """
    written = set().union(*(unit.writes for unit in units)) if units else set()
    home = {node: unit for unit in units for node in unit.nodes}
    shown = Counter(id(call.value) for call in rows.calls.values())
    first = {id(call.value): node for node, call in reversed(rows.calls.items())}
    handed = handed_out(rows)
    readers: dict[int, set[int]] = {}
    for unit in reversed(units):
        users = [home[user] for node in unit.nodes for user in node.users if user in home]
        others = [user for user in users if user is not unit]
        read_by = [readers[id(user)] if user.cheap else {id(user)} for user in others]
        readers[id(unit)] = set().union(*read_by)
        if any(map(rows.is_number, unit.nodes)):
            unit.cheap = True
            continue
        results = [(node, id(rows.value(node))) for node in unit.nodes]
        if any(number in handed for _, number in results):
            continue
        if _is_view(unit, rows, noticed):
            unit.cheap = all(first[number] is node for node, number in results)
        elif all(shown[number] == 1 for _, number in results) and _is_pure(unit, rows, written):
            alone = len(readers[id(unit)]) == 1
            # What is sent is made by an op of its own, as it is on a rank with more rows.
            sent = any(user.collective is not None for user in others) and _computes(unit, rows)
            small = _bytes(rows.value(unit.nodes[0])) <= SMALL_BYTES
            unit.cheap = alone and small and not sent


def handed_out(rows: Rows) -> set[int]:
    """The ids of the results that the caller gets, whichever name they have there."""
    outputs = (call.value for node, call in rows.calls.items() if node.op == "output")
    return {id(leaf) for value in outputs for leaf in tree_leaves(value)}


def _is_view(unit: Unit, rows: Rows, noticed: set[int]) -> bool:
    """Whether a unit only gives another look at bytes that are there, wherever it is run."""
    if unit.kind not in ("batch-free", "row-wise") or unit.mark is not None or unit.draws:
        return False
    if not only_views(unit, rows) or any(map(asserts, unit.nodes)):
        return False
    shown = storages([rows.value(node) for node in unit.nodes])
    return bool(shown) and (unit.kind == "batch-free" or shown <= noticed)


def only_views(unit: Unit, rows: Rows) -> bool:
    """Whether no call of a unit makes bytes of its own."""
    return all(rows.calls[node].only_views for node in unit.nodes)


def _is_pure(unit: Unit, rows: Rows, written: set[int]) -> bool:
    """Whether computing a call again, elsewhere, gives the same and does no harm."""
    if unit.kind != "batch-free" or unit.mark is not None or unit.collective is not None:
        return False
    if len(unit.nodes) > 1 or unit.writes or unit.draws or asserts(unit.nodes[0]):
        return False
    if PIECE in unit.nodes[0].meta:
        return False  # it was cut to run by itself, beside others
    made = rows.calls[unit.nodes[0]]
    if any(call.func.overloadpacket in COPYING for call in made.atens):
        return False  # what copies is not done once more for each part
    if any(call.func.namespace not in ("aten", "prims") for call in made.atens):
        return False  # nobody knows how long a custom operator takes
    if not str(made.flops).isdigit() or int(made.flops) > SMALL_FLOPS:
        return False
    return not (unit.reads | storages(rows.value(unit.nodes[0]))) & written


def _computes(unit: Unit, rows: Rows) -> bool:
    """Whether the calls of a unit make numbers of others, and not just room for some."""
    calls = [call for node in unit.nodes for call in rows.calls[node].atens]
    return not all(call.name.removeprefix("new_").startswith(ROOM) for call in calls)


def _bytes(value: Any) -> int:
    total = 0
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            return SMALL_BYTES + 1
        hints = [size.node.hint if isinstance(size, SYMBOLIC) else size for size in leaf.shape]
        counts = [SMALL_BYTES + 1 if hint is None else int(hint) for hint in hints]
        total += prod(counts) * leaf.element_size()
    return total


def source_of(node: fx.Node) -> str | None:
    """The user's line that a call comes from: `file:line in function: code`."""
    text = str(node.meta.get("stack_trace") or "")
    frames = list(FRAME.finditer(text))
    if not frames:
        return None
    last = next((frame for frame in reversed(frames) if is_users(frame["file"])), frames[-1])
    code = re.sub(r"[\s^~]+$", "", text[last.end() :].strip("\n")).strip().split("\n")[0].strip()
    return f"{last['file']}:{last['line']} in {last['name']}: {code}".strip()


def is_users(file: str) -> bool:
    """Whether a file is not torch's own."""
    return not file.startswith(TORCH)


SideState = Mapping[str, bool]
"""Names of values that stand for side state; whether one op may touch each several times."""


def states_of(graph: fx.Graph, rules: Sequence[MarkRule]) -> dict[fx.Node, SideState]:
    """For each call that touches side state the names of values that stand for it.

        attend(x, layer="0"), attend(y, layer="1")     ->   state.forward.0, state.forward.1
        attend(x), attend(y)                           ->   state.forward, state.forward

    An op that touches side state mutates its value, which all parts share: its parts run in order,
    and the ops that touch one value run one after another. Two calls that touch one value are never
    in one op, or a part would come to the second before the others come to the first. Calls that an
    argument tells apart are: within an op they touch one thing once, as the write and the read of
    one cache.
    """
    known: dict[tuple[str, Any], str] = {}
    touched: dict[fx.Node, SideState] = {}
    for node in graph.nodes:
        names: dict[str, bool] = {}
        for rule in told_of(node, rules, "state"):
            name, func = rule.mark.name, overload_of(node.target)
            given = bind(func, node.args, node.kwargs) if rule.by and func is not None else {}
            key = given.get(rule.by)
            number = sum(other == name for other, _ in known)
            plain = f"{STATE}{name}"
            names[known.setdefault((name, key), f"{plain}.{number}" if key else plain)] = bool(key)
        if names:
            touched[node] = names
    return touched
