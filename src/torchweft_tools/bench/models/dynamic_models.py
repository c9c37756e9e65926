"""Dynamic models to try: ordinary PyTorch whose graph depends on the input.

BinaryTreeLSTM   (Tai et al. 2015), as in DynPartition: leaf, composer, an output at every node
ChildSumTreeLSTM (Tai et al. 2015): any number of children
LatticeLSTM      a DAG: each node joins all its predecessors
RecursiveNet     (Socher et al. 2011): one product per pair, no modules in between
EarlyExit        a transformer that stops where it is sure
RoutedExperts    a mixture of experts, one chosen per token
LoraPerRequest   each request brings the number of its own low-rank adapter
CondConv         (Yang et al. 2019): the kernel is a mixture, weighed by the input
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional


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
        self.ilh, self.irh = nn.Linear(mem_dim, mem_dim), nn.Linear(mem_dim, mem_dim)
        self.lflh, self.lfrh = nn.Linear(mem_dim, mem_dim), nn.Linear(mem_dim, mem_dim)
        self.rflh, self.rfrh = nn.Linear(mem_dim, mem_dim), nn.Linear(mem_dim, mem_dim)
        self.ulh, self.urh = nn.Linear(mem_dim, mem_dim), nn.Linear(mem_dim, mem_dim)

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
        return functional.log_softmax(self.l1(h), dim=-1)


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


class ChildSumTreeLSTM(nn.Module):
    """A state for every node of a tree with any number of children."""

    def __init__(self, num_words: int = 100, in_dim: int = 16, mem_dim: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, in_dim)
        self.inputs = nn.Linear(in_dim, 3 * mem_dim)
        self.forget_x, self.forget_h = nn.Linear(in_dim, mem_dim), nn.Linear(mem_dim, mem_dim)
        self.states = nn.Linear(mem_dim, 3 * mem_dim)
        self.mem_dim = mem_dim

    def forward(self, tree: Tree, words: Tensor) -> Tensor:
        """The state of the root."""
        return self.visit(tree, self.embedding(words))[1]

    def visit(self, tree: Tree, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """(c, h) of a node; every node has a word."""
        x = vectors[tree.word]
        states = [self.visit(child, vectors) for child in tree.children]
        total = torch.zeros(self.mem_dim)
        for _, h in states:
            total = total + h
        i, o, u = (self.inputs(x) + self.states(total)).chunk(3)
        c = torch.sigmoid(i) * torch.tanh(u)
        for child_c, child_h in states:
            c = c + torch.sigmoid(self.forget_x(x) + self.forget_h(child_h)) * child_c
        return c, torch.sigmoid(o) * torch.tanh(c)


class Join(nn.Module):
    """States of any number of predecessors and one input become a state."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gates, self.update = nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
        """The joined state."""
        before = torch.stack(states).mean(0)
        keep, write = torch.sigmoid(self.gates(torch.cat([x, before]))).chunk(2)
        return keep * before + write * torch.tanh(self.update(torch.cat([x, before])))


class LatticeLSTM(nn.Module):
    """A recurrent net over a DAG: `before[n]` lists the predecessors of node n."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.start, self.join = nn.Parameter(torch.zeros(dim)), Join(dim)

    def forward(self, xs: Tensor, before: Sequence[Sequence[int]]) -> Tensor:
        """The state of the last node."""
        states: list[Tensor] = []
        for number, nodes in enumerate(before):
            given = [states[node] for node in nodes] or [self.start]
            states.append(self.join(xs[number], given))
        return states[-1]


class RecursiveNet(nn.Module):
    """One product per pair of children, with parameters used by hand."""

    def __init__(self, num_words: int = 100, dim: int = 10) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(num_words, dim))
        self.weight = nn.Parameter(torch.randn(dim, 2 * dim) / dim)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, tree: Tree, words: Tensor) -> Tensor:
        """The vector of the root."""
        return self.visit(tree, functional.embedding(words, self.words))

    def visit(self, tree: Tree, vectors: Tensor) -> Tensor:
        """The vector of a node."""
        if not tree.children:
            return vectors[tree.word]
        both = torch.cat([self.visit(child, vectors) for child in tree.children])
        return torch.tanh(self.weight @ both + self.bias)


class SequenceLayer(nn.Module):
    """A transformer layer over one sequence."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, dim] -> [tokens, dim]."""
        heads = self.qkv(self.norm1(x)).view(len(x), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(mixed.transpose(0, 1).reshape(len(x), -1))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class EarlyExit(nn.Module):
    """A transformer that asks after every layer whether it is sure, and stops if it is."""

    def __init__(
        self, dim: int = 16, num_layers: int = 4, num_classes: int = 5, sure: float = 0.5
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SequenceLayer(dim, 2) for _ in range(num_layers))
        self.heads = nn.ModuleList(nn.Linear(dim, num_classes) for _ in range(num_layers))
        self.sure = sure

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        """The classes, and how many layers it took."""
        number = 0
        for block, head in zip(self.blocks, self.heads, strict=True):
            x, number = block(x), number + 1
            scores = torch.softmax(head(x.mean(0)), -1)
            if scores.max() > self.sure:
                break
        return scores, number


class RoutedExperts(nn.Module):
    """A mixture of experts: each token goes to the one that its router likes best."""

    def __init__(self, dim: int = 12, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
            for _ in range(num_experts)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """[tokens, dim] -> [tokens, dim]."""
        made = []
        for token in tokens:
            weights = torch.softmax(self.router(token), -1)
            best = int(weights.argmax())
            made.append(weights[best] * self.experts[best](token))
        return torch.stack(made)


class LoraPerRequest(nn.Module):
    """One base layer for all; each request adds its own low-rank adapter."""

    def __init__(self, dim: int = 16, rank: int = 2, num_adapters: int = 8) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.down = nn.Parameter(torch.randn(num_adapters, rank, dim) / dim)
        self.up = nn.Parameter(torch.randn(num_adapters, dim, rank))

    def forward(self, x: Tensor, adapter: int) -> Tensor:
        """[dim] -> [dim] with the request's adapter."""
        hidden = self.base(x) + self.up[adapter] @ (self.down[adapter] @ x)
        return self.head(torch.relu(hidden))  # type: ignore[no-any-return]


class CondConv(nn.Module):
    """A convolution whose kernel is a mixture of kernels, weighed by the input."""

    def __init__(self, channels: int = 4, num_kernels: int = 3) -> None:
        super().__init__()
        self.kernels = nn.Parameter(torch.randn(num_kernels, channels, channels, 3, 3) / 6)
        self.route = nn.Linear(channels, num_kernels)

    def forward(self, image: Tensor) -> Tensor:
        """[channels, height, width] -> the same."""
        weights = torch.sigmoid(self.route(image.mean((1, 2))))
        kernel = torch.einsum("k,kabcd->abcd", weights, self.kernels)
        return functional.conv2d(image[None], kernel, padding=1)[0]
