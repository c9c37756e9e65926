"""Two models on several ranks, written the ordinary way, without overlap.

    Dense:    x + all_reduce(attention(x)), x + all_reduce(mlp(x))      tensor parallel, as Llama
    Experts:  x + attention(x), all_to_all, experts, all_to_all, sum    expert parallel, as Mixtral

x is [sequences, positions, hidden]. In `Dense` each rank holds half of every matrix and sees the
same x; in `Experts` each rank holds half of the experts and sees its own sequences. Every token is
sent to every rank, so shapes do not depend on the data; the router is on every rank, so no gate is
sent. Weights are drawn from a seed and the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """What a model measures; `wide` is the inner size of the MLP, of one expert in `Experts`."""

    num_layers: int = 3
    hidden: int = 1024
    wide: int = 2048
    head: int = 64
    num_experts: int = 8
    num_chosen: int = 2
    num_positions: int = 128


def weight(rows: int, columns: int, generator: torch.Generator) -> nn.Parameter:
    """A random matrix with the spread that Llama starts from."""
    values = 0.02 * torch.randn(rows, columns, generator=generator)
    return nn.Parameter(values, requires_grad=False)


class Norm(nn.Module):
    """Root mean square norm with a learnt scale."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.scale.shape, self.scale, 1e-5)


class Attention(nn.Module):
    """Causal attention with rotary positions over this rank's heads."""

    def __init__(self, sizes: Sizes, num_heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.num_heads, self.head = num_heads, sizes.head
        self.norm = Norm(sizes.hidden)
        inner = num_heads * sizes.head
        self.qkv = weight(3 * inner, sizes.hidden, generator)
        self.out = weight(sizes.hidden, inner, generator)
        cos, sin = rotary(sizes.num_positions, sizes.head)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, x: Tensor) -> Tensor:
        num_sequences, num_positions, _ = x.shape
        qkv = F.linear(self.norm(x), self.qkv)
        qkv = qkv.view(num_sequences, num_positions, 3, self.num_heads, self.head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.rotate(q), self.rotate(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(num_sequences, num_positions, -1)
        return F.linear(mixed, self.out)

    def rotate(self, x: Tensor) -> Tensor:
        num_positions = x.shape[2]
        left, right = x.chunk(2, dim=-1)
        turned = torch.cat((-right, left), dim=-1)
        return x * self.cos[:num_positions] + turned * self.sin[:num_positions]


def rotary(num_positions: int, head: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angle of each position and dim."""
    speeds = 10_000.0 ** (-torch.arange(0, head, 2) / head)
    angles = torch.arange(num_positions)[:, None] * speeds
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Mlp(nn.Module):
    """SwiGLU over this rank's part of the inner size."""

    def __init__(self, sizes: Sizes, wide: int, generator: torch.Generator) -> None:
        super().__init__()
        self.norm = Norm(sizes.hidden)
        self.gate_up = weight(2 * wide, sizes.hidden, generator)
        self.down = weight(sizes.hidden, wide, generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(self.norm(x), self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class DenseBlock(nn.Module):
    """One tensor-parallel layer."""

    def __init__(self, sizes: Sizes, num_ranks: int, generator: torch.Generator) -> None:
        super().__init__()
        num_heads = sizes.hidden // sizes.head
        self.attention = Attention(sizes, num_heads // num_ranks, generator)
        self.mlp = Mlp(sizes, sizes.wide // num_ranks, generator)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(x)
        dist.all_reduce(mixed)
        x = x + mixed
        grown = self.mlp(x)
        dist.all_reduce(grown)
        return x + grown


class Dense(nn.Module):
    """A stack of tensor-parallel layers."""

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1000 * seed + 1 + rank)
        blocks = [DenseBlock(sizes, num_ranks, own) for _ in range(sizes.num_layers)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Experts(nn.Module):
    """This rank's experts, as two wide matmuls: a gate of nought silences an expert."""

    def __init__(
        self, sizes: Sizes, rank: int, num_ranks: int, own: torch.Generator, shared: torch.Generator
    ) -> None:
        super().__init__()
        self.num_local, self.num_chosen = sizes.num_experts // num_ranks, sizes.num_chosen
        self.first = rank * self.num_local
        self.router = weight(sizes.num_experts, sizes.hidden, shared)
        inner = self.num_local * sizes.wide
        self.gate_up = weight(2 * inner, sizes.hidden, own)
        self.down = weight(sizes.hidden, inner, own)

    def forward(self, tokens: Tensor) -> Tensor:
        gate, up = F.linear(tokens, self.gate_up).chunk(2, dim=-1)
        inner = (F.silu(gate) * up).unflatten(-1, (self.num_local, -1))
        inner = inner * self.gates(tokens).unsqueeze(-1)
        return F.linear(inner.flatten(-2), self.down)

    def gates(self, tokens: Tensor) -> Tensor:
        """How much each local expert counts for each token: nought unless among the chosen."""
        chances = F.linear(tokens, self.router).softmax(-1)
        best, which = chances.topk(self.num_chosen, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        gates = torch.zeros_like(chances).scatter(-1, which, best)
        return gates[..., self.first : self.first + self.num_local]


class ExpertBlock(nn.Module):
    """One expert-parallel layer: attention at home, experts wherever they live."""

    def __init__(
        self, sizes: Sizes, rank: int, num_ranks: int, own: torch.Generator, shared: torch.Generator
    ) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self.attention = Attention(sizes, sizes.hidden // sizes.head, shared)
        self.norm = Norm(sizes.hidden)
        self.experts = Experts(sizes, rank, num_ranks, own, shared)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.exchange(x)

    def exchange(self, x: Tensor) -> Tensor:
        """What the experts of all ranks make of this rank's tokens."""
        outward = self.norm(x).expand(self.num_ranks, *x.shape).contiguous()
        tokens = torch.empty_like(outward)
        dist.all_to_all_single(tokens, outward)
        homeward = self.experts(tokens)
        grown = torch.empty_like(homeward)
        dist.all_to_all_single(grown, homeward)
        return grown.sum(0)


class MoE(nn.Module):
    """A stack of expert-parallel layers."""

    block = ExpertBlock
    own_rows = True

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1000 * seed + 1 + rank)
        shared = torch.Generator().manual_seed(1000 * seed + 999)
        self.blocks = nn.ModuleList(
            self.block(sizes, rank, num_ranks, own, shared) for _ in range(sizes.num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def inputs(
    model: nn.Module, num_sequences: int, num_positions: int, hidden: int, *, rank: int
) -> Tensor:
    """A batch: the same on every rank for `Dense`, each rank's own for `MoE` and its like."""
    seed = 7 + (rank if getattr(model, "own_rows", False) else 0)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_sequences, num_positions, hidden, generator=generator)
