"""A rig: one rank of the self-test, its device and groups, and small models of unlike kinds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft
from torchweft.plan.machine import Machine

TIMEOUT = timedelta(minutes=3)
WIDE = 64


class CheckError(Exception):
    """A check failed; the text says what was expected and what happened."""


class Skip(Exception):  # noqa: N818 - an outcome, not an error
    """A check cannot run here; the text says why."""


@dataclass(frozen=True)
class Rig:
    """This rank: where it computes, and `side`, a gloo group for what ranks tell each other."""

    device: torch.device
    rank: int
    num_ranks: int
    side: dist.ProcessGroup
    dtypes: tuple[torch.dtype, ...]
    num_pairs: int

    @property
    def machine(self) -> Machine:
        """Two lanes of the device and a network."""
        return weft.cpu(2) if self.device.type == "cpu" else weft.accelerator(2)

    def tensor(self, *shape: int) -> Tensor:
        """Random numbers, equal on all ranks."""
        return torch.randn(*shape, generator=torch.Generator().manual_seed(7)).to(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def open_rig(device: str, *, dtypes: list[str], num_pairs: int) -> Rig:
    """Join the other ranks: over gloo for CPUs, over NCCL for CUDA."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if device == "cpu":
        place = torch.device("cpu")
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        place = torch.device(device, rank % max(1, torch.accelerator.device_count()))
        torch.accelerator.set_device_index(place.index)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=place)
    side = dist.new_group(backend="gloo", timeout=TIMEOUT)
    return Rig(
        place, rank, num_ranks, side, tuple(getattr(torch, name) for name in dtypes), num_pairs
    )


class Branches(nn.Module):
    """Two halves that do not need each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        """Both halves, added."""
        with weft.mark("left"):
            left = self.left(x).relu()
        with weft.mark("right"):
            right = self.right(x).tanh()
        total: Tensor = left + right
        return total


class Parallel(nn.Module):
    """Layers whose results are summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """A residual for each layer."""
        for layer in self.layers:
            y = layer(x).relu()
            dist.all_reduce(y)
            x = x + y
        return x


class Vision(nn.Module):
    """Convolutions, group norm and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each picture."""
        scores: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return scores


class Recommender(nn.Module):
    """Embeddings, a gate over experts, a sorted output."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(50, WIDE), nn.Linear(WIDE, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        """The mixture of all experts, its values in order."""
        x = self.table(ids).mean(1)
        gates = self.gate(x).softmax(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], -1) @ gates.unsqueeze(-1)
        ordered: Tensor = mixed.squeeze(-1).sort(-1).values
        return ordered


def attention() -> nn.Module:
    """One layer of an encoder."""
    return nn.TransformerEncoderLayer(WIDE, 4, 96, dropout=0.0, batch_first=True)


def mlp() -> nn.Module:
    """A plain stack with a norm."""
    return nn.Sequential(nn.Linear(WIDE, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, WIDE))


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[Rig], Any]]] = {
    "mlp": (mlp, lambda rig: rig.tensor(9, WIDE)),
    "vision": (Vision, lambda rig: rig.tensor(9, 3, 12, 12)),
    "attention": (attention, lambda rig: rig.tensor(9, 7, WIDE)),
    "recommender": (Recommender, lambda rig: rig.tensor(9, 5).mul(9).long().remainder(50)),
}
"""Models of unlike kinds, each with an input of nine rows."""
