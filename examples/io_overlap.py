"""A model that waits for a store beside its matmuls: the wait and the compute run side by side.

    python examples/io_overlap.py

The model stays as it is. A rule says from outside which op waits (`uses="io"`), and the strategy
`branches` runs what does not need each other on lanes of its own.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

import torchweft as weft

STORE_S = 0.05  # what the store takes to answer; a sleep stands in for it


@torch.library.custom_op("shop::read_rows", mutates_args=())
def read_rows(ids: Tensor) -> Tensor:
    """Features that live in a store, a row for each id."""
    time.sleep(STORE_S)
    return torch.ones(len(ids), 512)


@read_rows.register_fake
def _(ids: Tensor) -> Tensor:
    return torch.empty(len(ids), 512)


class Ranker(nn.Module):
    """A tower of matmuls, and features from the store; both meet in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(*(nn.Linear(512, 512) for _ in range(30)))
        self.head = nn.Linear(512, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        """A score for each row."""
        return self.head(self.tower(x) + read_rows(ids))


def seconds(call: Callable[..., Tensor], *inputs: Tensor) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call(*inputs)
    return time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    """Run the model as it is and by a plan, in turn, and draw what happened."""
    torch.set_num_threads(1)
    model, inputs = Ranker().eval(), (torch.randn(256, 512), torch.arange(256))
    wanted = model(*inputs)
    weft.compile(model, "branches", rules=[weft.mark_op("read_rows", "read_rows", uses="io")])
    assert torch.equal(model(*inputs), wanted), "the same bits"
    ratios = [seconds(model.forward, *inputs) / seconds(model, *inputs) for _ in range(11)]
    print(weft.trace(model, *inputs).to_text(80))
    print(f"{median(ratios):.2f} times as fast as eager (median of 11 pairs), bit-equal")


if __name__ == "__main__":
    main()
