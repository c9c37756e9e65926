"""Weft's own plans on a device, steady calls behind the mark: woven.py KIND,..."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import torchweft as weft
from torchweft_tools.dryrun import mark

size = int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))


class Branches(nn.Module):
    """Two halves that do not need each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with weft.mark("left"):
            left = self.left(x).relu()
        with weft.mark("right"):
            right = self.right(x).tanh()
        return left + right


class Parallel(nn.Module):
    """Layers whose results are summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x).relu()
            dist.all_reduce(y)
            x = x + y
        return x


STRATEGIES = {
    "sequential": weft.sequential(),
    "overlap": weft.overlap(parts=2, min_tokens=1),
    "branches": weft.branches(),
}


def weave(kind: str) -> None:
    """Warm up, then three steady calls between two marks."""
    name, _, graphs = kind.partition("-")
    model = (Parallel() if size > 1 else Branches()).cuda()
    woven = weft.compile(
        model,
        STRATEGIES[name],
        machine=weft.accelerator(2),
        graphs=bool(graphs),
        fallback="error",
        inner="eager",
    )
    x = torch.ones(32, 64, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            woven(x)
        mark(f"steady {kind}")
        for _ in range(3):
            woven(x)
        mark(f"end {kind}")


def train() -> None:
    """A step of training by a plan: forward, backward, optimizer."""
    model = weft.compile(Branches().cuda(), "branches", machine=weft.accelerator(2), inner="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(32, 64, device="cuda")
    for step in range(4):
        if step == 3:
            mark("steady train")
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    mark("end train")


for kind in sys.argv[1].split(","):
    train() if kind == "train" else weave(kind)
if size > 1:
    dist.destroy_process_group()
