"""Ulysses attention, as people write it: the layouts of xDiT, DeepSpeed and diffusers, and others.

    x [b, s/ranks, hidden] -> q, k, v -> all_to_all -> attention of some heads -> all_to_all -> out

Each rank has a share of the positions and all heads; in between all positions and a share of heads.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F


def exchange(x):
    """A flat all_to_all, as diffusers and xDiT have it."""
    flat = funcol.all_to_all_single(x.flatten(), None, None, dist.group.WORLD)
    return flat.reshape(x.shape)


def in_place(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


class Xdit:
    """[b, h, s, d], heads first on the wire: what each rank gets lies in whole rows."""

    @staticmethod
    def to_heads(x):
        ranks, x = dist.get_world_size(), x.transpose(1, 2)
        b, h, _, d = x.shape
        x = exchange(x.permute(1, 0, 2, 3).contiguous())
        x = x.reshape(ranks, h // ranks, b, -1, d).permute(2, 1, 0, 3, 4)
        return x.reshape(b, h // ranks, -1, d)

    @staticmethod
    def to_rows(x):
        ranks, (b, _, s, d) = dist.get_world_size(), x.shape
        x = exchange(x.permute(2, 0, 1, 3).contiguous())
        x = x.reshape(ranks, s // ranks, b, -1, d).permute(2, 0, 3, 1, 4)
        return x.reshape(b, -1, s // ranks, d).transpose(1, 2)


class Deepspeed:
    """[b, s, h, d], through a buffer and `dist.all_to_all_single`."""

    @staticmethod
    def to_heads(x):
        ranks, (b, s, h, d) = dist.get_world_size(), x.shape
        x = in_place(x.reshape(b, s, ranks, h // ranks, d).permute(2, 0, 1, 3, 4).contiguous())
        x = x.permute(1, 0, 2, 3, 4).contiguous()
        return x.reshape(b, ranks * s, h // ranks, d).contiguous().transpose(1, 2)

    @staticmethod
    def to_rows(x):
        ranks, x = dist.get_world_size(), x.transpose(1, 2)
        b, s, h, d = x.shape
        x = x.reshape(b, ranks, s // ranks, h, d).contiguous()
        x = in_place(x.permute(1, 0, 2, 3, 4).contiguous())
        return x.permute(1, 2, 0, 3, 4).contiguous().reshape(b, s // ranks, ranks * h, d)


class Diffusers:
    """[b, s, h, d], flat on the wire, positions before heads on the way there."""

    @staticmethod
    def to_heads(x):
        ranks, (b, s, h, d) = dist.get_world_size(), x.shape
        x = exchange(x.reshape(b, s, ranks, h // ranks, d).permute(2, 1, 0, 3, 4).contiguous())
        return x.flatten(0, 1).permute(1, 2, 0, 3)

    @staticmethod
    def to_rows(x):
        ranks, (b, h, s, d) = dist.get_world_size(), x.shape
        x = x.transpose(1, 2).reshape(b, ranks, s // ranks, h, d)
        x = exchange(x.permute(1, 3, 0, 2, 4).contiguous())
        return x.flatten(0, 1).permute(1, 2, 0, 3).contiguous()


class Unflat(Diffusers):
    """The same with `unflatten` and `movedim`, and no copy before the wire."""

    @staticmethod
    def to_heads(x):
        ranks = dist.get_world_size()
        x = x.unflatten(2, (ranks, -1)).movedim(2, 0)
        x = funcol.all_to_all_single(x, None, None, dist.group.WORLD)
        return x.movedim(0, 1).flatten(1, 2).transpose(1, 2)


STYLES = {each.__name__.lower(): each for each in (Xdit, Deepspeed, Diffusers, Unflat)}


def flash(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def repeated(q, k, v, mask=None):
    k, v = (over(t, q.shape[1] // t.shape[1]) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask)


def by_hand(q, k, v, mask=None):
    k, v = (over(t, q.shape[1] // t.shape[1]) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores + mask
    return torch.softmax(scores, -1) @ v


def by_einsum(q, k, v, mask=None):
    k, v = (over(t, q.shape[1] // t.shape[1]) for t in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores + mask
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def over(x, times):
    """Each head of keys several times in a row."""
    b, h, s, d = x.shape
    return x if times == 1 else x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


class Layer(nn.Module):
    """keys: heads of keys. bias: a number for each head of this rank, added to its scores.
    turned: whether positions are told to queries and keys behind the exchange."""

    def __init__(self, style, attend=flash, *, heads=8, keys=None, head=6, bias=False, turned=False,
                 stacked=False):  # fmt: skip
        super().__init__()
        self.style, self.attend, self.stacked, self.turned = STYLES[style], attend, stacked, turned
        self.shape, self.keys = (heads, head), (keys or heads, head)
        wide, own = heads * head, (keys or heads) * head
        self.q, self.k, self.v = nn.Linear(wide, wide), nn.Linear(wide, own), nn.Linear(wide, own)
        self.out = nn.Linear(wide, wide)
        here = heads // dist.get_world_size()
        self.bias = nn.Parameter(torch.randn(here, 1, 1) * 3) if bias else None

    def exchanged(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q.unflatten(-1, self.shape)
        k, v = k.unflatten(-1, self.keys), v.unflatten(-1, self.keys)
        if not self.stacked:
            return [self.style.to_heads(t) for t in (q, k, v)]
        b, s, (h, d), ranks = x.shape[0], x.shape[1], self.shape, dist.get_world_size()
        qkv = torch.stack([q, k, v]).view(3, b, s, ranks, h // ranks, d)
        qkv = in_place(qkv.permute(3, 0, 1, 2, 4, 5).contiguous())
        return qkv.permute(1, 2, 4, 0, 3, 5).reshape(3, b, h // ranks, ranks * s, d).unbind(0)

    def forward(self, x):
        q, k, v = self.exchanged(x)
        if self.turned:
            angles = torch.arange(q.shape[2])[:, None] * torch.ones(self.shape[1])
            q, k = (t * angles.cos() + turn(t) * angles.sin() for t in (q, k))
        mask = None if self.bias is None else self.bias * torch.ones(q.shape[2], q.shape[2]).tril()
        y = self.style.to_rows(self.attend(q, k, v, mask))
        return x + self.out(y.flatten(2))


def turn(x):
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


class Model(nn.Module):
    def __init__(self, *how, layers=2, make=Layer, **more):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(make(*how, **more) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def given(rows, positions=5, wide=48):
    """This rank's share of the positions."""
    count = rows * positions * wide
    return (torch.arange(count).view(rows, positions, wide) * (1.0 + dist.get_rank())).sin()
