"""Models of which each rank has a share of the positions, or of the layers, and what people write
for them by hand.

    Ulysses     all_to_all gives each rank all positions for a share of the heads, and back
    Pipelined   the first rank has the first layers and sends what they make to the last

x is [sequences, positions, hidden]; of `Ulysses` the positions are those of the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from torchweft_tools.bench.peers.models import Mlp, Norm, Sizes, weight

Call = Callable[[Tensor], Tensor]


class UlyssesBlock(nn.Module):
    """A sequence-parallel layer in the layout of DeepSpeed's."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        self.heads, self.head = sizes.hidden // sizes.head, sizes.head
        self.norm = Norm(sizes.hidden)
        self.qkv = weight(3 * sizes.hidden, sizes.hidden, generator)
        self.out = weight(sizes.hidden, sizes.hidden, generator)
        self.mlp = Mlp(sizes, sizes.wide, generator)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unbind(2)
        q, k, v = (gather_positions(each) for each in (q, k, v))
        mixed = attend(q, k, v)
        return self.finish(x, gather_heads(mixed))

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values: [b, s/ranks, 3, heads, head]."""
        made = F.linear(self.norm(x), self.qkv)
        return made.view(*x.shape[:2], 3, self.heads, self.head)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + F.linear(mixed.flatten(2), self.out)
        grown: Tensor = self.mlp(x)
        return x + grown

    def by_hand(self, x: Tensor, groups: int) -> Tensor:
        """The same in groups of heads: each is sent at once, and sent back while the next is
        attended to."""
        ranks, (b, s, _) = dist.get_world_size(), x.shape
        qkv = self.project(x).view(b, s, 3, ranks, -1, self.head).permute(3, 0, 1, 2, 4, 5)
        here = self.heads // ranks
        bounds = sorted({here * number // groups for number in range(groups + 1)})
        sent = [start(qkv[..., first:last, :]) for first, last in pairwise(bounds)]
        back = []
        for work, _, taken in sent:
            work.wait()
            q, k, v = taken.permute(3, 1, 0, 2, 4, 5).flatten(2, 3).unbind(0)
            mixed = attend(q, k, v).view(b, ranks, s, -1, self.head).transpose(0, 1)
            back.append(start(mixed))
        for work, _, _ in back:
            work.wait()
        whole = torch.cat([taken for _, _, taken in back], 3).permute(1, 2, 0, 3, 4)
        return self.finish(x, whole.reshape(b, s, self.heads, self.head))


def start(x: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Begin an exchange along dim 0: its work, what it sends and what it fills."""
    given = x.contiguous()
    taken = torch.empty_like(given)
    work: Any = dist.all_to_all_single(taken, given, async_op=True)
    return work, given, taken


def gather_positions(x: Tensor) -> Tensor:
    """[b, s/ranks, heads, d] -> [b, s, heads/ranks, d]"""
    ranks, (b, s, heads, d) = dist.get_world_size(), x.shape
    given = x.reshape(b, s, ranks, heads // ranks, d).permute(2, 0, 1, 3, 4).contiguous()
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    return taken.transpose(0, 1).reshape(b, ranks * s, heads // ranks, d)


def gather_heads(x: Tensor) -> Tensor:
    """[b, s, heads/ranks, d] -> [b, s/ranks, heads, d]"""
    ranks, (b, s, heads, d) = dist.get_world_size(), x.shape
    given = x.reshape(b, ranks, s // ranks, heads, d).transpose(0, 1).contiguous()
    taken = torch.empty_like(given)
    dist.all_to_all_single(taken, given)
    return taken.permute(1, 2, 0, 3, 4).reshape(b, s // ranks, ranks * heads, d)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over [b, s, heads, d]."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


class Ulysses(nn.Module):
    """A stack of layers with equal weights on all ranks; each has positions of its own."""

    own_rows = True

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        shared = torch.Generator().manual_seed(1000 * seed + 999)
        blocks = [UlyssesBlock(sizes, shared) for _ in range(sizes.num_layers)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def by_hand(self, x: Tensor, groups: int) -> Tensor:
        """What an expert would write: exchanges in groups of heads, beside attention."""
        for block in self.blocks:
            assert isinstance(block, UlyssesBlock), "all of them are"
            x = block.by_hand(x, groups)
        return x


class Pipelined(nn.Module):
    """Half of a stack of layers; only the last rank has the result, others give what they took."""

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1000 * seed + 1 + rank)
        self.is_last, self.peer = rank == num_ranks - 1, num_ranks - 1 - rank
        layers = [Mlp(sizes, 4 * sizes.wide, own) for _ in range(sizes.num_layers)]
        self.stage = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_last:
            taken = torch.empty_like(x)
            came: Any = dist.irecv(taken, self.peer)
            came.wait()
            made: Tensor = self.stage(taken)
            return made
        sent: Any = dist.isend(self.stage(x), self.peer)
        sent.wait()
        return x * 1

    def by_torch(self, parts: int) -> Call:
        """The forward of torch's own GPipe; few rows are one part."""
        schedules: dict[int, Any] = {}

        def call(x: Tensor) -> Tensor:
            count = min(parts, len(x))
            if count not in schedules:
                rank, ranks = dist.get_rank(), dist.get_world_size()
                stage = PipelineStage(self.stage, rank, ranks, torch.device("cpu"))
                schedules[count] = ScheduleGPipe(stage, count)
            if not self.is_last:
                schedules[count].step(x)
                return x
            made: Tensor = schedules[count].step()
            return made

        return call


def split_hands(model: nn.Module) -> dict[str, Call]:
    """What an expert writes by hand for a model; empty for one that is not of this file."""
    if isinstance(model, Ulysses):
        return {f"by_hand_{groups}": partial(model.by_hand, groups=groups) for groups in (2, 4)}
    return {"torch_gpipe": model.by_torch(4)} if isinstance(model, Pipelined) else {}
