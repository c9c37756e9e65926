"""Inlining: each call of a block gives way to what the block calls.

    block0 = [head, all_reduce, tail]      ->      head  all_reduce  tail head  all_reduce  tail
    block1 = [head, all_reduce, tail]                                ^^^^^^^^^ one op

Dynamo has traced the block once, `twins` tells what is known of the later calls from the first, and
ops of equal structure share one body, whatever layers their calls come from.

What a block does behind its last collective joins what the next one does before its first, as it
would without blocks: an op of its own at the border would run on all parts, and so wait for the
last of them, before the next block begins. Where nobody waits for other ranks, or for a disk, ops
end at the borders of blocks: else a stack would be a single op, and no two layers would share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from torchweft.capture.blocks.blocks import INVOKE, BlockError
from torchweft.capture.blocks.twins import CALLS, InlinedCall
from torchweft.capture.marks import MarkRule, marks_of
from torchweft.capture.ops.units import BLOCK, is_collective
from torchweft.capture.rows.rows import AGAIN, is_getitem

SLOW = ("network", "io")


def inline(gm: fx.GraphModule, rules: Sequence[MarkRule] = ()) -> None:
    """Put what blocks call into the graph itself, with a note where ops end at their borders.

    Raises `BlockError` for a block that is marked otherwise than the first of its kind.
    """
    first: dict[str, fx.Node] = {}
    inlined: dict[str, list[InlinedCall]] = {}
    calls = gm.graph.find_nodes(op="call_function", target=INVOKE)
    open_borders = _near_slow(gm, calls, rules)
    for call in calls:
        name = _name(call)
        if first.setdefault(name, call) is call:
            _drop_sizes(_code(gm, call).graph)
        elif call.meta.get("custom") != first[name].meta.get("custom"):
            raise BlockError(f"block: {call} is marked otherwise than {first[name]}.")
        one = _inline(gm, call, first[name])
        inlined.setdefault(name, []).append(one)
        for node in one.nodes if call not in open_borders else ():
            node.meta[BLOCK] = call.name
    gm.meta[CALLS] = list(inlined.values())
    gm.graph.lint()
    gm.recompile()


def _near_slow(
    gm: fx.GraphModule, calls: Sequence[fx.Node], rules: Sequence[MarkRule]
) -> set[fx.Node]:
    """The calls of blocks that are slow, or that nothing but something slow parts from another."""
    code = {_name(call): _code(gm, call) for call in calls}
    slow = {name for name in code if _slow(code[name].graph, rules)}
    chosen = {call for call in calls if _name(call) in slow}
    outside = _slow(gm.graph, rules)
    last: list[fx.Node] = []
    waits = False
    for node in gm.graph.nodes:
        if node in outside:
            waits = True
        elif node in calls or node.op == "output":
            chosen.update([*last, node] if waits else [])
            last, waits = [node], False
    return chosen


def _slow(graph: fx.Graph, rules: Sequence[MarkRule]) -> set[fx.Node]:
    """Calls that talk to other ranks, or that lean on the network or a disk as a mark says."""
    marks, _ = marks_of(graph, rules)
    talks = {node for node in graph.nodes if is_collective(node)}
    marked = {node for node, (mark, _) in marks.items() if mark.uses in SLOW}
    return {node for node in talks | marked if node.target is not INVOKE}


def _drop_sizes(graph: fx.Graph) -> None:
    """Forget sizes that were asked for and are not used."""
    for node in reversed(graph.nodes):
        if not node.users and (is_getitem(node) or node.target == "size"):
            graph.erase_node(node)


def _inline(gm: fx.GraphModule, call: fx.Node, first: fx.Node) -> InlinedCall:
    """Put what a block calls in the place of its call."""
    operands, inner = call.args[2:], list(_code(gm, call).graph.nodes)
    placeholders = [node for node in inner if node.op == "placeholder"]
    known: dict[fx.Node, Any] = dict(zip(placeholders, operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in inner[len(placeholders) : -1]:
            known[node] = gm.graph.node_copy(node, known.__getitem__)
            if node.op in ("get_attr", "call_module"):
                known[node].target = f"{_name(call)}.{node.target}"
            known[node].meta["nn_module_stack"] = _stack(node, call, first)
            if call is not first:
                known[node].meta[AGAIN] = True
    made: Any = fx.map_arg(inner[-1].args[0], known.__getitem__)
    for taker in list(call.users):
        if not is_getitem(taker):
            raise BlockError(f"block: what {call} makes is handed on as a whole.")
        taker.replace_all_uses_with(made[taker.args[1]])
        gm.graph.erase_node(taker)
    gm.graph.erase_node(call)
    return InlinedCall(operands, tuple(known[node] for node in inner[len(placeholders) : -1]))


def _stack(node: fx.Node, call: fx.Node, first: fx.Node) -> dict[str, Any]:
    """The modules that a node of a block is called by, as part of the block that is called."""
    above, here = (each.meta["nn_module_stack"] for each in (first, call))
    (old, _), (path, _) = (list(stack.values())[-1] for stack in (above, here))
    inside = {k: v for k, v in node.meta.get("nn_module_stack", {}).items() if k not in above}
    moved = {f"{k}@{call}": (p.replace(old, path, 1), kind) for k, (p, kind) in inside.items()}
    return {**here, **moved}


def _name(call: fx.Node) -> str:
    """The name of the block's graph."""
    return str(getattr(call.args[0], "target", ""))


def _code(gm: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    code = gm.get_submodule(_name(call))
    assert isinstance(code, fx.GraphModule), "a region is a graph"
    return code
