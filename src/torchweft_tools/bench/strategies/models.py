"""What published strategies are for, written the ordinary way: models on several ranks.

    SharedMoE   experts on all ranks, and a shared expert that each token takes too
    Sharded     sequence parallel: each rank holds its share of the rows between two products
    Tailed      tensor-parallel layers, then layers that every rank computes by itself
    Local       only such layers

Beside them `Dense` and `MoE` of the peers. x is [sequences, positions, hidden].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchweft_tools.bench.peers.models import (
    Attention,
    Dense,
    ExpertBlock,
    Mlp,
    MoE,
    Norm,
    Sizes,
    weight,
)
from torchweft_tools.bench.peers.overlap_by_hand import by_hand
from torchweft_tools.bench.strategies.split_models import split_hands

# Their names from torch 2.13 on, and before.
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class SharedBlock(ExpertBlock):
    """An expert-parallel layer with a shared expert behind the combine, as people write it."""

    def __init__(
        self, sizes: Sizes, rank: int, num_ranks: int, own: torch.Generator, shared: torch.Generator
    ) -> None:
        super().__init__(sizes, rank, num_ranks, own, shared)
        self.shared = Mlp(sizes, 2 * sizes.wide, shared)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        routed = self.exchange(x)
        made: Tensor = x + self.shared(x) + routed
        return made

    def by_hand(self, x: Tensor) -> Tensor:
        """The same, with the shared expert beside the dispatch."""
        x = x + self.attention(x)
        outward = self.norm(x).expand(self.num_ranks, *x.shape).contiguous()
        tokens = torch.empty_like(outward)
        work = dist.all_to_all_single(tokens, outward, async_op=True)
        extra = self.shared(x)
        work.wait()
        homeward = self.experts(tokens)
        grown = torch.empty_like(homeward)
        dist.all_to_all_single(grown, homeward)
        made: Tensor = x + extra + grown.sum(0)
        return made


class SharedMoE(MoE):
    """A stack of expert-parallel layers with a shared expert each."""

    block = SharedBlock

    def by_hand(self, x: Tensor) -> Tensor:
        """What an expert would write: no split, each shared expert beside a dispatch."""
        for block in self.blocks:
            assert isinstance(block, SharedBlock), "all of them are"
            x = block.by_hand(x)
        return x


class ShardedBlock(nn.Module):
    """One layer between whose products each rank holds its share of the rows."""

    def __init__(self, sizes: Sizes, num_ranks: int, generator: torch.Generator) -> None:
        super().__init__()
        self.norms = nn.ModuleList([Norm(sizes.hidden), Norm(sizes.hidden)])
        num_heads = sizes.hidden // sizes.head
        self.attention = Attention(sizes, num_heads // num_ranks, generator)
        self.mlp = Mlp(sizes, sizes.wide // num_ranks, generator)

    def forward(self, h: Tensor) -> Tensor:
        h = h + deal(self.attention(gather(self.norms[0](h))))
        return h + deal(self.mlp(gather(self.norms[1](h))))


class Sharded(nn.Module):
    """A stack of sequence-parallel layers; each rank embeds a part of what comes in."""

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1000 * seed + 1 + rank)
        self.embed = weight(sizes.hidden, sizes.hidden, own)
        blocks = [ShardedBlock(sizes, num_ranks, own) for _ in range(sizes.num_layers)]
        self.blocks, self.norm = nn.ModuleList(blocks), Norm(sizes.hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = deal(nn.functional.linear(x, self.embed))
        for block in self.blocks:
            h = block(h)
        return gather(self.norm(h))


def deal(x: Tensor) -> Tensor:
    """The sum over all ranks, of which each keeps its share of the rows."""
    share = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    reduce_scatter(share, x)
    return share


def gather(x: Tensor) -> Tensor:
    """The shares of all ranks, in one tensor."""
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    all_gather(whole, x)
    return whole


class LocalBlock(nn.Module):
    """A layer that needs no other rank."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        self.mlp = Mlp(sizes, 4 * sizes.wide, generator)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.mlp(x)
        return x + grown


class Tailed(nn.Module):
    """Layers with collectives first; behind them wide ones without, whose weights are read once a
    part."""

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        shared = torch.Generator().manual_seed(1000 * seed + 999)
        self.front = Dense(sizes, rank=rank, num_ranks=num_ranks, seed=seed)
        self.tail = nn.Sequential(LocalBlock(sizes, shared), LocalBlock(sizes, shared))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.tail(self.front(x))
        return made


class Local(nn.Module):
    """Wide layers that need no other rank."""

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1000 * seed + 1 + rank)
        self.blocks = nn.Sequential(*(LocalBlock(sizes, own) for _ in range(sizes.num_layers)))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.blocks(x)
        return made


def hands(model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """What an expert writes by hand for a model; empty where nothing was written."""
    if isinstance(model, SharedMoE):
        return {"by_hand": model.by_hand}
    if isinstance(model, Tailed):
        fronts = hands(model.front)
        return {name: _then(call, model.tail) for name, call in fronts.items()}
    if isinstance(model, Dense | MoE):
        return {f"by_hand_{parts}": by_hand(model, parts) for parts in (2, 4)}
    return split_hands(model)


def _then(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x))
