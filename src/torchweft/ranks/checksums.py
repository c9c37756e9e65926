"""The `Checksums`: of what ranks must be given alike, for each computes a share for all of them.

    checksums.numbers(given)  ->  {group: number}      part of what ranks agree on before a call

That is what dealt rows meet, in parts, and what a rewrite such as `decompose` asks for (`Alike`).
They are taken anew when a tensor is another one, has other bytes, or was written, as PyTorch counts
it. Each rank looks for itself: whose weights have changed tells another number, so ranks notice
what only one of them has done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from torchweft.plan.deals import Alike, beside
from torchweft.plan.graph import Graph
from torchweft.ranks.speakers import number_of

_version = attrgetter("_version")


class Checksums:
    """Numbers for what ranks must be given alike, group by group."""

    def __init__(
        self, graph: Graph, alike: Sequence[Alike], group_of: Callable[[str], str]
    ) -> None:
        common, _ = beside(graph.ops, graph.value)
        dealt = [Alike(communicator, each.inputs) for communicator, each in common.items()]
        self._asked = [
            (each, [at for at, name in enumerate(graph.inputs) if name in each.names])
            for each in [*dealt, *alike]
        ]
        self._group_of = group_of
        self._dealt = len(dealt)
        self._every: list[int] | None = None  # the places of tensors, known from the first call on
        self._pick: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple
        self._seen: tuple[Any, ...] | None = None
        self._numbers: dict[bool, dict[str, int]] = {}
        self._sums: dict[int, tuple[object, int]] = {}
        self._watched: list[Any] = []

    def numbers(self, given: Sequence[Any], *, in_parts: bool) -> Mapping[str, int]:
        """A number for each group. `given`: the inputs of the graph. in_parts: whether the batch is
        cut, so that ranks have other rows than of the whole."""
        if len(self._asked) == (0 if in_parts else self._dealt):
            return {}
        if self._every is None:
            places = sorted({at for _, places in self._asked for at in places})
            self._every = [at for at in places if isinstance(given[at], Tensor)]
            some = self._every or [0]
            self._pick = itemgetter(*some, some[0])  # one more, so that it always gives a tuple
        picked = self._pick(given) if self._every else ()
        try:
            seen = (*map(id, picked), *map(_version, picked), *map(Tensor.data_ptr, picked))
        except RuntimeError:  # nobody counts what is written into tensors of inference mode
            seen = None
        if seen is None or seen != self._seen or not self._numbers:
            self._take(given)
            self._seen = seen
        return self._numbers[in_parts]

    def _take(self, given: Sequence[Any]) -> None:
        """Take the sums of what may have changed."""
        self._seen, self._watched = None, []
        for at in self._every or ():
            tensor = given[at]
            counted = not tensor.is_inference()
            state = (id(tensor), tensor._version, tensor.data_ptr()) if counted else None
            if state is None or self._sums.get(at, (None, 0))[0] != state:
                self._sums[at] = state, _sum_of(tensor)
            self._watched.append(weakref.ref(tensor, partial(self._forget, at)))
        for in_parts in (False, True):
            told: dict[str, str] = {}
            for each, places in self._asked[0 if in_parts else self._dealt :]:
                group = self._group_of(each.communicator)
                sums = [self._sums[at][1] for at in places if at in self._sums]
                told[group] = f"{told.get(group, '')}{each.code}{sums}"
            self._numbers[in_parts] = {group: number_of(text) for group, text in told.items()}

    def _forget(self, at: int, _: object) -> None:
        """A tensor is gone, and another one may stand where it stood."""
        self._seen = None
        self._sums.pop(at, None)


def _sum_of(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    return crc32(plain.cpu().numpy().data)
