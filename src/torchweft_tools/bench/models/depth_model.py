"""A model like Llama, of any depth, small enough that its layers cost next to nothing to run."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

HIDDEN, HEADS, KV_HEADS, INNER, VOCABULARY = 64, 4, 2, 128, 128
HEAD_DIM = HIDDEN // HEADS


class DepthNorm(nn.Module):
    """Root mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(HIDDEN)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class DepthAttention(nn.Module):
    """Grouped queries, rotary positions, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, HEAD_DIM)
        query = _rotate(self.query(x).view(shape).transpose(1, 2), cos, sin)
        key = _rotate(self.key(x).view(shape).transpose(1, 2), cos, sin)
        value = self.value(x).view(shape).transpose(1, 2)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class DepthMlp(nn.Module):
    """A gated pair of products, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class DepthLayer(nn.Module):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = DepthNorm(), DepthAttention()
        self.norm_mlp, self.mlp = DepthNorm(), DepthMlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), cos, sin)
        return x + self.mlp(self.norm_mlp(x))  # type: ignore[no-any-return]


class DepthModel(nn.Module):
    """Tokens in, logits out."""

    frequency: Tensor

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(DepthLayer() for _ in range(num_layers))
        self.norm, self.head = DepthNorm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        steps = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        self.register_buffer("frequency", 10_000.0**-steps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        angle = torch.arange(tokens.shape[1])[:, None] * self.frequency.repeat(2)
        cos, sin = angle.cos(), angle.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin
