"""Models in which ops that lean on memory stand beside ops that lean on compute.

gather       bags of rows of a large table     beside a stack of products
recommender  the bags of four tables           beside the bottom MLP; then the top MLP
phases       attention of decode requests      beside the products of prefill tokens
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

TABLE, TINY_TABLE, WIDE, BAG = 400_000, 1000, 64, 32


class GatherModel(nn.Module):
    """Bags of rows of a table, and products that do not need them."""

    def __init__(self, rows: int, *, quick: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(TINY_TABLE if quick else TABLE, WIDE))
        self.products = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self.head = nn.Linear(256, WIDE)
        self.ids = torch.randint(len(self.table), (rows, BAG))
        self.x = torch.randn(rows, 256)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.ids, self.x

    def remember(self, ids: Tensor, x: Tensor) -> Tensor:
        return F.embedding_bag(ids, self.table, mode="sum")

    def think(self, ids: Tensor, x: Tensor) -> Tensor:
        thought: Tensor = self.head(self.products(x))
        return thought

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.remember(ids, x) + self.think(ids, x)


class RecommenderModel(nn.Module):
    """Tables of sparse features beside an MLP of dense ones, as in DLRM (arXiv 1906.00091)."""

    def __init__(self, rows: int, *, quick: bool) -> None:
        super().__init__()
        tables = (torch.randn(TINY_TABLE if quick else TABLE, WIDE) for _ in range(4))
        self.tables = nn.ParameterList(tables)
        sizes = [13, 512, 256, WIDE]
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
        self.bottom = nn.Sequential(*(part for layer in layers for part in layer))
        self.top = nn.Sequential(nn.Linear(5 * WIDE, 256), nn.ReLU(), nn.Linear(256, 1))
        self.ids = torch.randint(len(self.tables[0]), (rows, 4, BAG))
        self.x = torch.randn(rows, 13)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.ids, self.x

    def remember(self, ids: Tensor, x: Tensor) -> Tensor:
        bags = [
            F.embedding_bag(ids[:, number], table, mode="sum")
            for number, table in enumerate(self.tables)
        ]
        return torch.cat(bags, dim=1)

    def think(self, ids: Tensor, x: Tensor) -> Tensor:
        thought: Tensor = self.bottom(x)
        return thought

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        both = torch.cat([self.remember(ids, x), self.think(ids, x)], dim=1)
        score: Tensor = self.top(both)
        return score


class PhasesModel(nn.Module):
    """One token of each decode request over its cache, and the products of prefill tokens."""

    def __init__(self, rows: int, *, quick: bool) -> None:
        super().__init__()
        past = 16 if quick else 1024
        self.q = torch.randn(rows, 4, 1, 64)
        self.cache = torch.randn(2, rows, 4, past, 64)
        self.x = torch.randn(rows, 4, 512)
        self.products = nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512))

    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.cache[0], self.cache[1], self.x

    def remember(self, q: Tensor, keys: Tensor, values: Tensor, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values)

    def think(self, q: Tensor, keys: Tensor, values: Tensor, x: Tensor) -> Tensor:
        thought: Tensor = self.products(x)
        return thought

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.remember(q, keys, values, x), self.think(q, keys, values, x)


MODELS = {"gather": GatherModel, "recommender": RecommenderModel, "phases": PhasesModel}
MEMORY_CALLS = r"embedding_bag|scaled_dot_product_attention"
