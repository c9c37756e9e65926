"""The `Meter`: copied bytes and live bytes of one call, seen from outside by a dispatch mode.

    with Meter() as meter:
        model(x)
    meter.copied_bytes, meter.peak_bytes

Every operator that torch runs in this thread passes by, whoever called it. A copy ends in one of a
few operators. A storage counts from the operator that first shows it until it dies; those that the
caller held before (inputs, weights) are told to it and never count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = frozenset({"copy_", "copy", "clone", "_to_copy", "cat", "stack", "_reshape_copy"})


class Meter(TorchDispatchMode):
    """Counts while it is entered; `known` are tensors that were there before."""

    def __init__(self, known: Iterable[Any] = ()) -> None:
        super().__init__()
        self.copied_bytes = self.live_bytes = self.peak_bytes = 0
        self.seen: dict[int, weakref.ref[Any]] = {}
        self.known = {_storage(item)._cdata for item in known if _is_plain(item)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What was compiled runs as ever while it is metered."""
        return True

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        for item in given:  # what an operator reads without anybody having made it was there before
            if _is_plain(item) and _storage(item)._cdata not in self.seen:
                self.known.add(_storage(item)._cdata)
        made = func(*args, **(kwargs or {}))
        for item in tree_leaves(made):
            if _is_plain(item):
                self._see(_storage(item))
        if func.overloadpacket.__name__ in COPIES:
            self.copied_bytes += sum(t.nbytes for t in tree_leaves(made) if _is_plain(t))
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.known or key in self.seen:
            return
        num_bytes = storage.nbytes()
        self.seen[key] = weakref.ref(storage, lambda _: self._gone(key, num_bytes))
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        del self.seen[key]
        self.live_bytes -= num_bytes


def _is_plain(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and type(item) in PLAIN


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
