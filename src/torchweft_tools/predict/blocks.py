"""The same graph in blocks: what lies between two collectives is one op, as in a captured graph
whose model has no marks.

    norm -> qkv -> rope -> attention -> o -> all_reduce      block -> all_reduce

Strategies that take an op of each part in turn overlap long ops better than short ones, and others
want to see each kernel: how fine a graph is, is a choice of marks.
"""

from __future__ import annotations

from dataclasses import replace

from torchweft.plan.graph import Op
from torchweft.plan.sizes import ZERO
from torchweft_tools.predict.model_graph import ModelGraph
from torchweft_tools.predict.work import OpWork


def in_blocks(drawn: ModelGraph) -> ModelGraph:
    """The graph with neighbours of one layer joined, up to the next collective."""
    graph = drawn.graph
    groups: list[list[Op]] = []
    for op in graph.ops:
        last = groups[-1][-1] if groups else None
        alone = {"network"} & {op.uses, last.uses if last else ""}
        if last is None or alone or op.whole or last.whole or op.layer != last.layer:
            groups.append([])
        groups[-1].append(op)
    works = dict(drawn.works)
    ops = [_joined(drawn, group, works) for group in groups]
    kept = {name for op in ops for name in (*op.reads, *op.makes)} | {*graph.inputs}
    values = tuple(value for value in graph.values if value.name in kept)
    return replace(drawn, graph=replace(graph, values=values, ops=tuple(ops)), works=works)


def _joined(drawn: ModelGraph, group: list[Op], works: dict[str, OpWork]) -> Op:
    """One op in the place of several; what it does is added to `works`."""
    if len(group) == 1:
        return group[0]
    graph, names = drawn.graph, {op.name for op in group}
    made = [name for op in group for name in op.makes]
    reads = dict.fromkeys(name for op in group for name in op.reads if name not in made)
    outside = {n for n in made if {each.name for each in graph.readers[n]} - names}
    body = "+".join(op.body for op in group)
    works[body] = OpWork("block", parts=tuple(works[op.body] for op in group))
    first = group[0]
    return replace(
        first,
        reads=tuple(reads),
        makes=tuple(name for name in made if name in outside or name in graph.outputs),
        mutates=tuple(name for op in group for name in op.mutates),
        uses="compute",
        mark="block",
        body=body,
        flops=sum((op.flops for op in group), ZERO),
        path=f"layers.{first.layer}" if first.layer is not None else "",
    )
