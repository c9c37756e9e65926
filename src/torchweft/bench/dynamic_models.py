"""Dynamic models to try: ordinary PyTorch whose graph depends on the input.

BinaryTreeLSTM   (Tai et al. 2015), as in DynPartition: a leaf cell, a composer, an output at every node
ChildSumTreeLSTM (Tai et al. 2015): any number of children
LatticeLSTM      a DAG: each node joins all its predecessors
RecursiveNet     (Socher et al. 2011): one product per pair, no modules in between
EarlyExit        a transformer that stops where it is sure
Routed           a mixture of experts, one chosen per token
LoraPerRequest   each request brings the number of its own low-rank adapter
CondConv         (Yang et al. 2019): the kernel is a mixture, weighed by the input
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(eq=False)
class Tree:
    """A node with its children; a leaf holds the number of its word among the words."""

    children: list[Tree] = field(default_factory=list)
    word: int = -1

    def nodes(self) -> list[Tree]:
        """All nodes, children first."""
        return [node for child in self.children for node in child.nodes()] + [self]


class Leaf(nn.Module):
    """A word's vector becomes a state."""

    def __init__(self, in_dim: int, mem_dim: int) -> None:
        super().__init__()
        self.cx, self.ox = nn.Linear(in_dim, mem_dim), nn.Linear(in_dim, mem_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(c, h) of one word."""
        c = self.cx(x)
        return c, torch.sigmoid(self.ox(x)) * torch.tanh(c)


class Composer(nn.Module):
    """Two states become one."""

    def __init__(self, mem_dim: int) -> None:
        super().__init__()
        for name in ("ilh", "irh", "lflh", "lfrh", "rflh", "rfrh", "ulh", "urh"):
            setattr(self, name, nn.Linear(mem_dim, mem_dim))

    def forward(self, lc: Tensor, lh: Tensor, rc: Tensor, rh: Tensor) -> tuple[Tensor, Tensor]:
        """(c, h) of a node with two children."""
        i = torch.sigmoid(self.ilh(lh) + self.irh(rh))
        lf = torch.sigmoid(self.lflh(lh) + self.lfrh(rh))
        rf = torch.sigmoid(self.rflh(lh) + self.rfrh(rh))
        update = torch.tanh(self.ulh(lh) + self.urh(rh))
        c = i * update + lf * lc + rf * rc
        return c, torch.tanh(c)


class Output(nn.Module):
    """Log-probabilities of a node's classes."""

    def __init__(self, mem_dim: int, num_classes: int) -> None:
        super().__init__()
        self.l1 = nn.Linear(mem_dim, num_classes)

    def forward(self, h: Tensor) -> Tensor:
        """One row of classes."""
        return F.log_softmax(self.l1(h), dim=-1)


class BinaryTreeLSTM(nn.Module):
    """A state for every node of a binary tree, and its classes."""

    def __init__(
        self, num_words: int = 1000, in_dim: int = 300, mem_dim: int = 150, num_classes: int = 3
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, in_dim)
        self.leaf, self.composer = Leaf(in_dim, mem_dim), Composer(mem_dim)
        self.output = Output(mem_dim, num_classes)

    def forward(self, tree: Tree, words: Tensor) -> Tensor:
        """[nodes, classes], children before parents; `words` are the leaves' words."""
        outputs: list[Tensor] = []
        self.visit(tree, self.embedding(words), outputs)
        return torch.stack(outputs)

    def visit(self, tree: Tree, vectors: Tensor, outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The state of a node; what it says goes to `outputs`."""
        if tree.children:
            left, right = tree.children
            state = self.composer(
                *self.visit(left, vectors, outputs), *self.visit(right, vectors, outputs)
            )
        else:
            state = self.leaf(vectors[tree.word])
        outputs.append(self.output(state[1]))
        return state  # type: ignore[no-any-return]
