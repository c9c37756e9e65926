"""The two floors of a model on several ranks: its compute alone, and its collectives alone.

    compute_only(model)(x)      every matmul of the model, and nothing sent
    comm_only(model, x)(x)      every collective of the model, at its size, and nothing computed

No order of the same work can take less time than the larger of the two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchweft_tools.bench.peers.models import Dense

Call = Callable[[Tensor], Tensor]


def compute_only(model: nn.Module) -> Call:
    """The forward without its collectives: what would be sent is taken as received."""

    def dense(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = x + block.attention(x)
            x = x + block.mlp(x)
        return x

    def experts(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = x + block.attention(x)
            tokens = block.norm(x).expand(block.num_ranks, *x.shape).contiguous()
            x = x + block.experts(tokens).sum(0)
        return x

    return dense if isinstance(model, Dense) else experts


def comm_only(model: nn.Module, x: Tensor) -> Call:
    """The collectives one after another, on buffers made beforehand."""
    if isinstance(model, Dense):
        buffer = torch.zeros_like(x)  # noughts: sums of sums would grow without end

        def reduce(x: Tensor) -> Tensor:
            for _ in model.blocks:
                dist.all_reduce(buffer)
                dist.all_reduce(buffer)
            return x

        return reduce
    outward = torch.zeros(dist.get_world_size(), *x.shape)
    tokens = torch.empty_like(outward)

    def exchange(x: Tensor) -> Tensor:
        for _ in model.blocks:
            dist.all_to_all_single(tokens, outward)
            dist.all_to_all_single(outward, tokens)
        return x

    return exchange
