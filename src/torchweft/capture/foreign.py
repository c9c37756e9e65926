"""Foreign collectives: operators of a host that reduce over ranks, as those of torch.distributed.

    y = host.all_reduce(x, "tp")         ->   t = all_reduce(x, "sum", "1");  y = wait_tensor(t)
    host.reduce_in_place(handle, x)      ->   t = ...;  w = wait_tensor(t);  x.copy_(w)

A host's own operator comes back when all is done. In this form it has two phases, and other parts
compute in between.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from torchweft.capture.marks import target_name


def reduce_by_torch(gm: fx.GraphModule, places: Mapping[str, int], group: str) -> fx.GraphModule:
    """A copy of a graph whose all_reduces are those of torch.distributed, in a process group.

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
        with graph.inserting_before(node):
            sent = graph.call_function(functional.all_reduce.default, (given, "sum", group))
            made = [sent, graph.call_function(functional.wait_tensor.default, (sent,))]
            if not isinstance(node.meta.get("example_value"), torch.Tensor):
                made.append(graph.call_method("copy_", (given, made[-1])))
        for new in made:
            new.meta = {**node.meta, "example_value": given.meta["example_value"]}
        node.replace_all_uses_with(made[1])
        graph.erase_node(node)
    return fx.GraphModule(gm, graph)
