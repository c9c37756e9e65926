"""Collectives as graphs show them, their two phases, and the bytes that they work on.

    functional   t = all_reduce(x);  y = wait_tensor(t)
                 issue(x) -> flight  complete(flight) -> (y,)
    in place     t = all_reduce(x);  w = wait_tensor(t);  x.copy_(w)
                 issue(x) reduces x itself, complete waits for it: no copy

Between issue and complete the tensor and its aliases belong to the collective. How c10d is talked
to says `flights`. `dead_inputs` may be reduced where they are, `drop_buffers` takes
out buffers that only a collective fills, `reduce_in_phases` makes these of a host's own.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from torchweft.capture.bodies.bodies import Function
from torchweft.capture.marks import target_name
from torchweft.capture.ops.regions import Region
from torchweft.capture.ops.units import is_collective, is_copy, is_wait, state_name, storages
from torchweft.capture.rows.rows import Rows
from torchweft.capture.rows.table import communicator_of
from torchweft.plan.graph import Collective
from torchweft.private.core import OpOverload, OpOverloadPacket
from torchweft.ranks.flights import HOST, IN_PLACE, SINGLE, STARTS, Flight, land

aten = torch.ops.aten
Phases = tuple[Function | None, Function | None]
MAKERS = (
    "linear matmul mm bmm addmm baddbmm einsum embedding add sub mul div truediv relu gelu silu "
    "tanh sigmoid softmax layer_norm rms_norm sum"
)
NEW = frozenset(MAKERS.split())  # they make new bytes, however many rows there are
BARE = ("empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros")
PIECES = (operator.getitem, aten.slice.Tensor, aten.select.int)


def collective_of(node: fx.Node | None) -> Collective | None:
    """What a call that starts a collective is in a graph: its kind and its communicator."""
    if node is None:
        return None
    texts = [arg for arg in [*node.args, *node.kwargs.values()] if isinstance(arg, str)]
    group = communicator_of(texts[-1] if texts else "world")
    kind = kind_of(node)
    if kind in ("isend", "irecv"):
        peer, tag = int(str(node.args[1])), f"tag{node.args[2]}"
        return Collective(kind.removeprefix("i"), group, peer, tag)
    return Collective(kind, group)


def communicators_of(gm: fx.GraphModule) -> set[str]:
    """The communicators of the collectives that a graph, or one inside of it, shows."""
    graphs = [part.graph for part in gm.modules() if isinstance(part, fx.GraphModule)]
    starts = [node for graph in graphs for node in graph.nodes if is_collective(node)]
    collectives = [collective_of(node) for node in starts]
    return {each.communicator for each in collectives if each is not None}


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
    makes: Any = code.graph.output_node().args[0]
    if place is None or any(made not in place for made in makes):
        return None, None
    options: dict[str, Any] = {}
    copies = [node for node in behind if is_copy(node)]
    if copies and kind_of(start) in SINGLE:
        options["out"] = copies[0].args[0]
    elif mine and kind_of(start) in IN_PLACE:
        options["mine"] = True
    places = [place[made] for made in makes]

    def complete(flight: Flight) -> tuple[torch.Tensor, ...]:
        landed = land(flight)
        return tuple([landed[at] for at in places])

    return _issue(code, before, start, options), complete


def _places(start: fx.Node, behind: list[fx.Node]) -> dict[fx.Node, int] | None:
    """Which of the results each wait gives; None if something else happens behind the start."""
    taken, waits = {start: 0}, dict[fx.Node, int]()
    for node in behind:
        first: Any = node.args[0] if node.args else None
        if is_wait(node) and first in taken:
            waits[node] = taken[first]
        elif node.target is operator.getitem and first is start and isinstance(node.args[1], int):
            taken[node] = node.args[1]
        elif not (is_copy(node) and node.args[1] in waits):
            return None
    return waits


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


def dead_inputs(
    graph: fx.Graph, rows: Rows, regions: Sequence[Region], cheap: set[fx.Node]
) -> set[int]:
    """The ids of the collectives whose input nobody wants behind them: they may work in place.

        y = linear(x);  z = all_reduce(y)          nobody else touches y: reduced where it is
        y = linear(x);  z = all_reduce(y) + y      y is still wanted: a copy is reduced

    The proof: the bytes belong to no input and no output; the call that first has them always makes
    new ones (a `reshape` may be a view in a part of one row); all other calls that touch them stand
    in the op of that call, or are views that only the collective takes. So they pass from one op to
    the collective and nowhere else. A part may be a slice of them: other parts have their own.
    """
    talks = [region for region in regions if region.collective is not None]
    home = {node: region for region in regions for node in region.nodes}
    touching: dict[int, list[fx.Node]] = {}
    for node in graph.nodes if talks else ():
        for number in storages([rows.value(n) for n in (node, *node.all_input_nodes)]):
            touching.setdefault(number, []).append(node)
    dead: set[int] = set()
    for region in talks:
        given = region.calls[0].args[0]
        numbers = storages(rows.value(given)) if isinstance(given, fx.Node) else set()
        users = touching[numbers.pop()] if len(numbers) == 1 else []
        maker = home.get(users[0]) if users else None
        if maker is None or maker.collective is not None:
            continue
        names = target_name(users[0]).split(".")
        homes = [home.get(node) for node in users if node not in cheap]
        if NEW & {names[-1], *names[-2:-1]} and all(h is maker or h is region for h in homes):
            dead.add(id(region))
    return dead


def drop_buffers(gm: fx.GraphModule) -> None:
    """Let the result of a collective take the place of a buffer that nothing else fills.

        out = empty(2 * n, H)                               w = wait_tensor(all_gather(x))
        w = wait_tensor(all_gather(x))             ->       ... reads w ...
        out.copy_(w);  ... reads out ...

    So Dynamo shows `dist.all_gather_into_tensor(out, x)` and its kin, and AOTAutograd, which writes
    `copy(out, w)`. An empty buffer does not know its rows; the result does. A piece of a result
    (`dist.all_gather` fills a list) is copied as before, into a tensor of its own.
    """
    _wait_one_by_one(gm.graph)
    place = {node: number for number, node in enumerate(gm.graph.nodes)}
    for copy in list(gm.graph.nodes):
        if copy.target is aten.copy.default:
            if _fits(copy.args[0], copy.args[1]):
                _put(gm.graph, copy, copy.args[1])
        elif is_copy(copy) and _is_bare(copy, place) and _fits(copy.args[0], copy.args[1]):
            out = copy.args[0]
            made = _put(gm.graph, copy, copy.args[1])
            out.replace_all_uses_with(made)
            gm.graph.erase_node(out)
    gm.recompile()


def _wait_one_by_one(graph: fx.Graph) -> None:
    """Take apart what waits for a list of results, as torch shows them from 2.14 on:

    ws = wait_tensors([a, b]);  y = ws[0]      ->      y = wait_tensor(a)
    """
    for node in list(graph.nodes):
        if target_name(node).removesuffix(".default") != "_c10d_functional.wait_tensors":
            continue
        for taken in list(node.users):
            given: Any = node.args[0]
            if taken.target is not operator.getitem or not isinstance(given, list | tuple):
                continue
            with graph.inserting_before(taken):
                wait = torch.ops._c10d_functional.wait_tensor.default
                one = graph.call_function(wait, (given[taken.args[1]],))
            one.meta = dict(taken.meta)
            taken.replace_all_uses_with(one)
            graph.erase_node(taken)
        if not node.users:
            graph.erase_node(node)


def _put(graph: fx.Graph, copy: fx.Node, source: fx.Node) -> fx.Node:
    """Let the source, or a copy of it if it is not the whole result, stand where the copy stood."""
    made = source
    if not is_wait(source) or len(source.users) > 1:
        with graph.inserting_before(copy):
            if copy.op == "call_method":
                made = graph.call_method("clone", (source,))
            else:
                made = graph.call_function(aten.clone.default, (source,))
        made.meta = dict(copy.meta)
    copy.replace_all_uses_with(made)
    graph.erase_node(copy)
    return made


def _is_bare(copy: fx.Node, place: dict[fx.Node, int]) -> bool:
    """Whether a copy fills a buffer that nobody has touched since it was made."""
    out: Any = copy.args[0]
    if not isinstance(out, fx.Node) or target_name(out).split(".")[-1] not in BARE:
        return False
    if set(out.kwargs) & {"out", "memory_format", "requires_grad"}:
        return False
    return all(user is copy or place[user] > place[copy] for user in out.users)


def _fits(out: Any, source: Any) -> bool:
    """Whether a result, or a piece of one, has the shape and type of what it fills."""
    root = source
    while isinstance(root, fx.Node) and root.target in PIECES:
        root = root.args[0]
    if not isinstance(root, fx.Node) or not isinstance(out, fx.Node) or not is_wait(root):
        return False
    mine, theirs = out.meta.get("example_value"), source.meta.get("example_value")
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    alike = mine.dtype == theirs.dtype and mine.device == theirs.device
    return alike and list(map(str, mine.shape)) == list(map(str, theirs.shape))


def reduce_in_phases(gm: fx.GraphModule, places: Mapping[str, int], group: str) -> fx.GraphModule:
    """A copy of a graph in which a host's all_reduces are collectives of a process group.

        y = host.all_reduce(x, "tp")       ->   t = all_reduce(x, "sum", "1");  y = wait_tensor(t)
        host.reduce_in_place(handle, x)    ->   t = ...;  w = wait_tensor(t);  x.copy_(w)

    On a CPU the host's operator comes back when all is done; that of torch has two phases, and
    other parts compute in between. On an accelerator it is the host's own that starts on the stream
    of its lane, and the lane's event ends it: hosts have kernels that are faster than NCCL's.

    places: targets, such as `host.all_reduce`, and which argument is reduced. An operator without
    a result reduces it in place.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    functional = torch.ops._c10d_functional
    graph.output(graph.graph_copy(gm.graph, copies))
    for node in copies.values():
        name = target_name(node).removesuffix(".default")
        if name not in places:
            continue
        given = node.args[places[name]]
        assert isinstance(given, fx.Node), "a collective works on a tensor of the graph"
        value = given.meta["example_value"]
        start, how = functional.all_reduce.default, "sum"
        if value.device.type != "cpu" and (call := host_call(node, given)):
            start, how = torch.ops.weft.all_reduce.default, call
        with graph.inserting_before(node):
            sent = graph.call_function(start, (given, how, group))
            made = [sent, graph.call_function(functional.wait_tensor.default, (sent,))]
            if not isinstance(node.meta.get("example_value"), torch.Tensor):
                made.append(graph.call_method("copy_", (given, made[-1])))
        for new in made:
            new.meta = {**node.meta, "example_value": value}
        node.replace_all_uses_with(made[1])
        graph.erase_node(node)
    return fx.GraphModule(gm, graph)


def host_call(node: fx.Node, given: fx.Node) -> str:
    """A host's all_reduce as `flights.all_reduce` takes it; empty if it has other arguments."""
    args = ["" if arg is given else arg for arg in node.args]
    plain = all(isinstance(arg, str | int | float | bool | None) for arg in args)
    if not plain or node.kwargs or not isinstance(node.target, OpOverload | OpOverloadPacket):
        return ""
    name = str(node.target) + ".default" * isinstance(node.target, OpOverloadPacket)
    return HOST + json.dumps([name, node.args.index(given), args])
