"""Inlining: each call of a block gives way to what the block calls.

    block0 = [head, all_reduce, tail]      ->      head  all_reduce  tail head  all_reduce  tail
    block1 = [head, all_reduce, tail]                                ^^^^^^^^^ one op

Dynamo has traced the block once, `Twins` tells what is known of the later calls from the first, and
ops of equal structure share one body, whatever layers their calls come from.

What a block does behind its last collective joins what the next one does before its first, as it
would without blocks: an op of its own at the border would run on all parts, and so wait for the
last of them, before the next block begins. Where nobody waits for other ranks, or for a disk, ops
end at the borders of blocks: else a stack would be a single op, and no two layers would share one.

    layer 0      each call is looked at, on fake tensors (`rows`): about a millisecond a call
    layer 1 ..   if its operands lie alike (`Twins`): the same kinds, axes and sizes, own tensors

A twin's bytes are a number only: to make new ones would take most of the time that is saved. What
the rest of the graph uses is computed with, so that has bytes which torch knows of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torchweft.capture.blocks.blocks import INVOKE, BlockError
from torchweft.capture.marks import MarkRule, marks_of
from torchweft.capture.ops.units import BLOCK, is_collective
from torchweft.capture.rows.axes import SYMBOLIC, AtenCall
from torchweft.capture.rows.rows import AGAIN, BYTES, CallRows, Rows, id_of, is_getitem
from torchweft.private.core import FakeTensor, no_dispatch, tree_leaves, tree_map

CALLS = "weft_inlined"  # of a graph: its inlined calls, those of one block together
SLOW = ("network", "io")


@dataclass(frozen=True)
class InlinedCall:
    """One inlined call of a block: what it was given, and its nodes in the block's own order."""

    operands: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]


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
            for node in reversed(_code(gm, call).graph.nodes):  # sizes that nobody uses
                if not node.users and (is_getitem(node) or node.target == "size"):
                    node.graph.erase_node(node)
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


class Twins:
    """The inlined calls of a graph, those of one block together."""

    def __init__(self, inlined: Sequence[Sequence[InlinedCall]]) -> None:
        worked = [calls for calls in inlined if calls[0].nodes]
        self.pairs = {each.nodes[0]: (calls[0], each) for calls in worked for each in calls[1:]}
        self.plain: dict[fx.Node, bool] = {}

    def __call__(self, node: fx.Node, rows: Rows) -> bool:
        """Whether an inlined call that starts here is like the first; then all of it is known."""
        if node not in self.pairs:
            return False
        first, other = self.pairs[node]
        start, twin = first.nodes[0], _Twin(rows)
        if start not in self.plain:  # else each call of the block has symbols of its own
            leaves = tree_leaves([rows.value(node) for node in first.nodes])
            sizes = [leaf for leaf in leaves if isinstance(leaf, (Tensor, *SYMBOLIC))]
            self.plain[start] = not any(map(free_unbacked_symbols, sizes))
        if not self.plain[start] or not twin.match(first, other):
            return False
        for old, new in zip(first.nodes, other.nodes, strict=True):
            rows.calls[new] = twin.call(rows.calls[old], new)
        return True


class _Twin:
    """Tensors of one inlined call, and numbers of bytes, by those of the first."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.tensors: dict[int, Tensor] = {}
        self.bytes: dict[int, int] = {}

    def match(self, first: InlinedCall, other: InlinedCall) -> bool:
        """Whether two calls are given alike operands, and what they hand out can be told apart."""
        for old, new in self._given(first, other):
            if self.rows.symbols.laid(old) != self.rows.symbols.laid(new):
                return False
            if isinstance(old, Tensor):
                if self.rows.axis(old) != self.rows.axis(new):
                    return False
                if self.bytes.setdefault(id_of(old), id_of(new)) != id_of(new):
                    return False  # two share bytes there, and not here
                self.tensors[id(old)] = new
        if len(set(self.bytes.values())) < len(self.bytes):
            return False  # two share bytes here, and not there
        return all(map(self._make, self._shown(first, other)))

    def call(self, old: CallRows, node: fx.Node) -> CallRows:
        """What is known of a node."""
        return replace(
            old,
            node=node,
            value=tree_map(self._tensor, old.value),
            written=[self._tensor(each) for each in old.written],
            twins=cache(partial(self._atens, old)),
        )

    def _given(self, first: InlinedCall, other: InlinedCall) -> Iterator[tuple[Any, Any]]:
        """Pairs of operands, and each constant of the block with itself."""
        for pair in zip(first.operands, other.operands, strict=True):
            yield tuple(self.rows.value(n) if isinstance(n, fx.Node) else n for n in pair)
        for node in first.nodes:
            if node.op == "get_attr":
                yield self.rows.value(node), self.rows.value(node)

    def _shown(self, first: InlinedCall, other: InlinedCall) -> list[Tensor]:
        """The tensors of the first call whose like is used by other nodes of the graph."""
        inside, pairs = set(other.nodes), zip(first.nodes, other.nodes, strict=True)
        nodes = [old for old, new in pairs if not inside.issuperset(new.users)]
        leaves = tree_leaves([self.rows.value(node) for node in nodes])
        return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())

    def _make(self, old: Tensor) -> bool:
        """Make a tensor with bytes that nobody else shows; whether that is what it should be."""
        if id(old) not in self.tensors:
            if id_of(old) in self.bytes:
                return False
            options: Any = {"dtype": old.dtype, "device": old.device}
            self._keep(old, torch.empty_strided(old.shape, old.stride(), **options))
        return True

    def _tensor(self, old: Any) -> Any:
        if not isinstance(old, Tensor):
            return old
        if id(old) not in self.tensors:
            assert isinstance(old, FakeTensor), "calls are looked at on fake tensors"
            with no_dispatch():
                new = FakeTensor(old.fake_mode, Tensor.detach(old), old.device)
            setattr(new, BYTES, self.bytes.get(id_of(old), -id(new)))
            self._keep(old, new)
        return self.tensors[id(old)]

    def _keep(self, old: Tensor, new: Tensor) -> None:
        self.tensors[id(old)] = new
        self.bytes[id_of(old)] = id_of(new)
        if (axis := self.rows.axis(old)) is not None:
            self.rows.axes[new] = axis

    def _atens(self, old: CallRows) -> list[AtenCall]:
        return [
            replace(
                aten,
                given=tree_map(self._tensor, aten.given),
                args=tree_map(self._tensor, dict(aten.args)),
                results=[self._tensor(each) for each in aten.results],
            )
            for aten in old.atens
        ]
