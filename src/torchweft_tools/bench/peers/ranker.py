"""A recommender in one process: its blocks compute, and read features from a store.

    x + mlp(x) + project(read_rows(ids))        ids are known from the start, as requests bring them

The store is simulated: it answers after `LATENCY_S` and `ROW_S` a row, in which its caller waits
and nobody computes. What it answers is right: rows of a table.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from torchweft_tools.bench.peers.models import Mlp, Sizes, weight

LATENCY_S, ROW_S = 4e-3, 1e-5
NUM_ROWS = 512


@torch.library.custom_op("weft_bench::read_rows", mutates_args=())
def read_rows(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table in a store."""
    time.sleep(LATENCY_S + ROW_S * ids.numel())
    return table[ids]


@read_rows.register_fake
def _(table: Tensor, ids: Tensor) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[-1])


class StoreBlock(nn.Module):
    """A block that reads features of its own."""

    def __init__(self, sizes: Sizes, generator: torch.Generator) -> None:
        super().__init__()
        self.mlp = Mlp(sizes, sizes.wide, generator)
        self.table = weight(NUM_ROWS, sizes.hidden, generator)
        self.project = weight(sizes.hidden, sizes.hidden, generator)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        features = read_rows(self.table, ids)
        return x + self.mlp(x) + features @ self.project


class StoreRanker(nn.Module):
    """A stack of such blocks."""

    def __init__(self, sizes: Sizes, *, rank: int, num_ranks: int, seed: int = 0) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1000 * seed + 1 + rank)
        self.blocks = nn.ModuleList(StoreBlock(sizes, own) for _ in range(sizes.num_layers))

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[..., 0].abs() * 1000).long() % NUM_ROWS
        for block in self.blocks:
            x = block(x, ids)
        return x
