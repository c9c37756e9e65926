"""DynPartition's own execution of a tree, node by node, as its repository has it (async form).

    for every node, children first: (leaf or composer) and then the output module, each a callable
    in a dependency graph; the callables run one after another in the event loop's thread

Its `aiocells.async_compute_concurrent` calls plain functions serially, in the order in which they
become ready: that is what `run_ready` does here. A node's inputs are moved to its device before
each call (`Tensor.to`, blocking, nothing cached), words are looked up one by one, and rows have a
batch of one. The model is `BinaryTreeLSTM` of `dynamic_models`, with the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torchweft_tools.bench.models.dynamic_models import BinaryTreeLSTM, Tree

Node = Callable[[], None]


class _NodeRun:
    """One tree under way: the states and outputs of its nodes."""

    def __init__(self, model: BinaryTreeLSTM, words: list[int], device: torch.device) -> None:
        self.model, self.words, self.device = model, words, device
        self.state: dict[int, tuple[Tensor, Tensor]] = {}
        self.output: dict[int, Tensor] = {}

    def leaf(self, node: Tree) -> None:
        value = torch.tensor(self.words[node.word]).to(self.device)
        x = torch.unsqueeze(self.model.embedding(value), 1).T
        self.state[id(node)] = self.model.leaf.forward(x)

    def inner(self, node: Tree) -> None:
        states = sum([self.state[id(child)] for child in node.children], ())
        moved = [each.to(self.device) for each in states]
        self.state[id(node)] = self.model.composer.forward(*moved)

    def out(self, node: Tree) -> None:
        state = [each.to(self.device) for each in self.state[id(node)]]
        self.output[id(node)] = self.model.output.forward(state[1])


async def run_ready(nodes: list[Node], before: dict[Node, list[Node]]) -> None:
    """Run callables one after another, each as soon as those before it have ended."""
    missing = {node: len(before.get(node, ())) for node in nodes}
    after: dict[Node, list[Node]] = {node: [] for node in nodes}
    for node, needed in before.items():
        for each in needed:
            after[each].append(node)
    ready = {node for node in nodes if not missing[node]}
    while ready:
        node = ready.pop()
        node()
        for each in after[node]:
            missing[each] -= 1
            if not missing[each]:
                ready.add(each)


@torch.no_grad()
def per_node(model: BinaryTreeLSTM, tree: Tree, words: list[int]) -> Tensor:
    """[nodes, classes], children before parents, as `BinaryTreeLSTM.forward` gives them."""
    run = _NodeRun(model, words, torch.device("cpu"))
    nodes: list[Node] = []
    before: dict[Node, list[Node]] = {}
    state_of: dict[int, Node] = {}
    order = tree.nodes()
    for node in order:
        state = partial(run.inner if node.children else run.leaf, node)
        output = partial(run.out, node)
        state_of[id(node)] = state
        nodes += [state, output]
        before[output] = [state]
        before[state] = [state_of[id(child)] for child in node.children]
    asyncio.run(run_ready(nodes, before))
    return torch.cat([run.output[id(node)] for node in order])
