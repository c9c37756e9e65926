"""What an expert writes by hand: the batch in parts; one part is sent while another computes.

    for each layer, for each half of it, for each part:
        wait for the part's pending collective, add its result, compute, send without waiting

    call = by_hand(model, num_parts=2)      call(x): same weights, same result as model(x)

Each half takes (x, received) and gives (x, what to send). Parts are views of the input, the last
sums are written straight into the result, all_reduce works in place: nothing is copied that the
sequential model does not copy. With `compile` each half runs under Inductor, once for all parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchweft_tools.bench.peers.models import Dense, DenseBlock, ExpertBlock, MoE

Half = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
Pending = tuple[dist.Work, Tensor, Tensor]
"""A collective in flight: its handle, its result, and what it reads meanwhile."""


def dense_halves(block: DenseBlock) -> list[Half]:
    """Attention and MLP; what is received is the reduced output of the half before."""

    def attend(x: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        if received is not None:
            x = x + received
        return x, block.attention(x)

    def grow(x: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        x = x + received
        return x, block.mlp(x)

    return [attend, grow]


def expert_halves(block: ExpertBlock) -> list[Half]:
    """Attention up to the dispatch, then the experts; received are sums, then tokens."""

    def attend(x: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        if received is not None:
            x = x + received.sum(0)
        x = x + block.attention(x)
        return x, block.norm(x).expand(block.num_ranks, *x.shape).contiguous()

    def serve(x: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        return x, block.experts(received)

    return [attend, serve]


def halves_of(model: nn.Module) -> list[Half]:
    """The halves of all layers, in order."""
    assert isinstance(model, Dense | MoE), f"no halves are written for {type(model).__name__}"
    halves = dense_halves if isinstance(model, Dense) else expert_halves
    return [half for block in model.blocks for half in halves(block)]


def reduce(send: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start an all_reduce, in place."""
    return dist.all_reduce(send, group=group, async_op=True), send, send


def exchange(send: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start an all_to_all over the first dim."""
    received = torch.empty_like(send)
    work = dist.all_to_all_single(received, send, group=group, async_op=True)
    return work, received, send


def by_hand(
    model: nn.Module,
    num_parts: int,
    *,
    compile: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Callable[[Tensor], Tensor]:
    """The model's forward in parts."""
    dense = isinstance(model, Dense)
    start = reduce if dense else exchange
    halves = halves_of(model)
    if compile:
        halves = [torch.compile(half, dynamic=True) for half in halves]

    def call(x: Tensor) -> Tensor:
        xs = list(x.chunk(num_parts))
        pending: list[Pending | None] = [None] * len(xs)
        for half in halves:
            for i, owed in enumerate(pending):
                received = None
                if owed is not None:
                    owed[0].wait()
                    received = owed[1]
                xs[i], send = half(xs[i], received)
                pending[i] = start(send, group)
        out = torch.empty_like(x)
        for part, owed, into in zip(xs, pending, out.chunk(num_parts), strict=True):
            owed[0].wait()
            torch.add(part, owed[1] if dense else owed[1].sum(0), out=into)
        return out

    return call
