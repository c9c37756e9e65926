"""A tensor-parallel model on two ranks over a limited link: sending hides behind compute.

    python examples/two_ranks.py                       starts its own two ranks in the link lab
    torchrun --nproc-per-node 2 examples/two_ranks.py  or under torchrun, over any network

Each rank holds half of every matrix and adds the halves up by an all_reduce. `weft.compile(model)`
finds out by itself how it runs best: parts of the batch, here, one on the wire while the next one
computes. On a busy machine the figures say little: `torchweft bench auto` measures with controls.
"""

import os
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchweft as weft


class Half(nn.Module):
    """One rank's half of a feed-forward layer."""

    def __init__(self, wide: int = 768) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(wide, wide), nn.Linear(wide, wide, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all ranks' halves, beside the input."""
        y = self.down(torch.relu(self.up(x)))
        dist.all_reduce(y)
        return x + y


def seconds(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """How long one call takes, all ranks starting together."""
    dist.barrier()
    start = time.perf_counter()
    call(x)
    return time.perf_counter() - start


@torch.no_grad()
def rank() -> None:
    """What each rank does."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model, x = nn.Sequential(*(Half() for _ in range(3))).eval(), torch.ones(1024, 768)
    wanted, stock = model(x), torch.compile(model.forward)
    weft.compile(model)
    for _ in range(80):  # the first calls try what may be fastest; answers are right all the time
        torch.testing.assert_close(model(x), wanted)
    stock(x)
    for name, call in (("written", model.forward), ("torch.compile", stock)):
        ratios = [seconds(call, x) / seconds(model, x) for _ in range(11)]
        if dist.get_rank() == 0:
            print(f"{median(ratios):.2f} times as fast as {name} (median of 11 pairs)")
    if dist.get_rank() == 0:
        print(f"over {os.environ.get('WEFT_LINK', 'a link of unknown rate')}\n{weft.report(model)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank()
    else:
        with weft.lab.spawn_ranks([sys.executable, __file__], link="1gbit") as ranks:
            print(*ranks.stdout, sep="", end="")
            sys.exit(ranks.wait())
