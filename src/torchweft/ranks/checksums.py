"""The `Checksums`: of the weights that dealt rows meet, which ranks must have in common.

    checksums.numbers(given)  ->  {group: number}      part of what ranks agree on before a call

They are taken anew when a weight is another tensor, has other bytes, or was written, as PyTorch
counts it. Each rank looks for itself: whose weights have changed tells another number, so ranks
notice what only one of them has done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from torchweft.plan.deals import beside
from torchweft.plan.graph import Graph
from torchweft.ranks.speakers import number_of

_version = attrgetter("_version")


class Checksums:
    """Numbers for what dealt rows are computed with beside themselves, group by group."""

    def __init__(self, graph: Graph, group_of: Callable[[str], str]) -> None:
        common, _ = beside(graph.ops, graph.value)
        self._places = {
            communicator: [at for at, name in enumerate(graph.inputs) if name in each.inputs]
            for communicator, each in common.items()
        }
        self._group_of = group_of
        self._every = sorted(set[int]().union(*self._places.values()))
        every = self._every or [0]
        self._pick = itemgetter(*every, every[0])  # one more, so that it always gives a tuple
        self._seen: tuple[Any, ...] | None = None
        self._numbers: dict[str, int] = {}
        self._sums: dict[int, tuple[object, int]] = {}
        self._watched: list[Any] = []

    def numbers(self, given: Sequence[Any]) -> Mapping[str, int]:
        """A number for each group. `given`: the inputs of the graph."""
        picked = self._pick(given)
        try:
            seen = (*map(id, picked), *map(_version, picked), *map(Tensor.data_ptr, picked))
        except RuntimeError:  # nobody counts what is written into tensors of inference mode
            seen = None
        if seen is None or seen != self._seen:
            self._take(given)
            self._seen = seen
        return self._numbers

    def _take(self, given: Sequence[Any]) -> None:
        """Take the sums of what may have changed."""
        self._seen, self._watched = None, []
        for at in self._every:
            tensor = given[at]
            counted = not tensor.is_inference()
            state = (id(tensor), tensor._version, tensor.data_ptr()) if counted else None
            if state is None or self._sums.get(at, (None, 0))[0] != state:
                self._sums[at] = state, _sum_of(tensor)
            self._watched.append(weakref.ref(tensor, self._forget))
        for communicator, places in self._places.items():
            told = str([self._sums[at][1] for at in places])
            self._numbers[self._group_of(communicator)] = number_of(told)

    def _forget(self, _: object) -> None:
        """A tensor is gone, and another one may stand where it stood."""
        self._seen = None
        self._sums.clear()


def _sum_of(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    return crc32(plain.cpu().numpy().data)
