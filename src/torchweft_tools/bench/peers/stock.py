"""What torch itself offers: Inductor, alone and with its reordering of communication.

    stock(model)                        torch.compile and nothing else
    reordered(model, num_parts=2)       one graph of all parts; Inductor's passes move the waits

The passes split nothing, and if the parts follow one another they overlap almost nothing. So the
source here is in the best order, each half of a layer on all parts before the next, with a wait
after every collective; `sink_waits` moves each wait down to where its value is needed. The code
that Inductor writes shows: fusion joins the residual sums of all parts in one kernel, and all waits
come before it, so overlap ends with each half. With one part nothing can move.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol

from torchweft_tools.bench.peers.models import Dense
from torchweft_tools.bench.peers.overlap_by_hand import halves_of

Call = Callable[[Tensor], Tensor]

PASSES = ("sink_waits",)


def stock(model: nn.Module) -> Call:
    """The model under Inductor, as everyone has it."""
    return torch.compile(copy.copy(model))


def reordered(model: nn.Module, num_parts: int) -> Call:
    """All parts in one graph under Inductor with its passes for overlap."""
    dense, halves, group = isinstance(model, Dense), halves_of(model), dist.group.WORLD

    def collect(send: Tensor) -> Tensor:
        if dense:
            return funcol.all_reduce(send, "sum", group)
        return funcol.all_to_all_single(send, None, None, group)

    def call(x: Tensor) -> Tensor:
        xs = list(x.chunk(num_parts))
        received: list[Tensor | None] = [None] * num_parts
        for half in halves:
            for i in range(num_parts):
                xs[i], send = half(xs[i], received[i])
                received[i] = collect(send)
        grown = received if dense else [each.sum(0) for each in received]
        return torch.cat([x + each for x, each in zip(xs, grown, strict=True)])

    options = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": list(PASSES),
    }
    return torch.compile(call, options=options)
