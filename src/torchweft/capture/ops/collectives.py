"""Collectives as graphs show them, and their two phases.

    functional   t = all_reduce(x);  y = wait_tensor(t)
                 issue(x) -> flight  complete(flight) -> (y,)
    in place     t = all_reduce(x);  w = wait_tensor(t);  x.copy_(w)
                 issue(x) reduces x itself, complete waits for it: no copy

Between issue and complete the tensor and its aliases belong to the collective. How c10d is talked
to says `flights`.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from torchweft.capture.bodies.bodies import Function
from torchweft.capture.marks import target_name
from torchweft.capture.ops.units import is_collective, is_copy, is_wait, state_name
from torchweft.plan.graph import Collective
from torchweft.ranks.flights import IN_PLACE, SINGLE, STARTS, Flight, land

Phases = tuple[Function | None, Function | None]


def collective_of(node: fx.Node | None) -> Collective | None:
    """What a call that starts a collective is in a graph: its kind and its communicator."""
    if node is None:
        return None
    texts = [arg for arg in [*node.args, *node.kwargs.values()] if isinstance(arg, str)]
    group = re.sub(r"\W", "_", f"group_{texts[-1] if texts else 'world'}")
    kind = kind_of(node)
    if kind in ("isend", "irecv"):
        return Collective(kind.removeprefix("i"), group, peer=int(str(node.args[1])))
    return Collective(kind, group)


def communicators_of(gm: fx.GraphModule) -> set[str]:
    """The communicators of the collectives that a graph, or one inside of it, shows."""
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    starts = [node for graph in graphs for node in graph.nodes if is_collective(node)]
    found = [collective_of(node) for node in starts]
    return {each.communicator for each in found if each is not None}


def kind_of(node: fx.Node) -> str:
    """The kind of a collective: `all_reduce`, `all_gather_into_tensor` ..."""
    return target_name(node).split(".")[1]


def two_phases(code: fx.GraphModule, *, mine: bool = False) -> Phases:
    """Issue and complete of the body of a collective op; None for forms that have no phases.

    mine: nobody else reads the input afterwards.
    """
    nodes = [node for node in code.graph.nodes if node.op != "output"]
    start = next((node for node in nodes if is_collective(node)), None)
    if start is None or kind_of(start) not in STARTS:
        return None, None
    before = [node for node in nodes[: nodes.index(start)] if not state_name(node)]
    behind = [node for node in nodes[nodes.index(start) + 1 :] if not state_name(node)]
    place = _places(start, behind)
    output = next(node for node in code.graph.nodes if node.op == "output")
    if place is None or any(made not in place for made in output.args[0]):
        return None, None
    options: dict[str, Any] = {}
    copies = [node for node in behind if is_copy(node)]
    if copies and kind_of(start) in SINGLE:
        options["out"] = copies[0].args[0]
    elif mine and kind_of(start) in IN_PLACE:
        options["mine"] = True
    return _issue(code, before, start, options), _complete([place[n] for n in output.args[0]])


def _places(start: fx.Node, behind: list[fx.Node]) -> dict[fx.Node, int] | None:
    """Which of the results each wait gives; None if something else happens behind the start."""
    taken, found = {start: 0}, dict[fx.Node, int]()
    for node in behind:
        first: Any = node.args[0] if node.args else None
        if is_wait(node) and first in taken:
            found[node] = taken[first]
        elif node.target is operator.getitem and first is start and isinstance(node.args[1], int):
            taken[node] = node.args[1]
        elif not (is_copy(node) and node.args[1] in found):
            return None
    return found


def _issue(
    code: fx.GraphModule, before: list[fx.Node], start: fx.Node, options: dict[str, Any]
) -> Function:
    """What stands before the start, and the start by our own function."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in before:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    given = (start.args, {**start.kwargs, **options})
    args, kwargs = fx.map_arg(given, copies.__getitem__)
    graph.output(graph.call_function(STARTS[kind_of(start)], args, kwargs))
    forward: Function = fx.GraphModule(code, graph, class_name="Issue").forward
    return forward


def _complete(places: list[int]) -> Function:
    def complete(flight: Flight) -> tuple[torch.Tensor, ...]:
        made = land(flight)
        return tuple([made[place] for place in places])

    return complete
