"""The `Meter`: copied bytes and live bytes of one call, seen from outside by a dispatch mode.

    with Meter() as meter:
        model(x)
    meter.copied_bytes, meter.peak_bytes

The mode sees every operator that torch runs in this thread, whoever called it. A copy ends in one
of a few operators. A storage counts from the operator that makes it until it is freed; storages
that an operator reads before any has made them (inputs, weights) existed before and never count.

The mode does not see compiled kernels, nor what is allocated for them. `Allocations` takes live
bytes from torch's allocator, through its profiler; these include scratch inside operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ATEN = ("copy_", "copy", "clone", "_to_copy", "cat", "stack", "_reshape_copy")
COPIES = frozenset({f"aten::{name}" for name in ATEN})
# These make a copy of their input inside, and reduce it there.
COPIES |= {"_c10d_functional::all_reduce", "_c10d_functional::broadcast"}


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copied_bytes = self.live_bytes = self.peak_bytes = 0
        self.seen: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as usual while it is metered."""
        return True

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not all(kind in PLAIN for kind in types):
            return NotImplemented  # a subclass shows what it does to plain tensors itself
        for tensor in _tensors((args, kwargs)):
            self._see(tensor.untyped_storage(), counts=False)
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._see(tensor.untyped_storage(), counts=True)
        if func._schema.name in COPIES:
            self.copied_bytes += sum(tensor.nbytes for tensor in _tensors(made))
        return made

    def _see(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        num_bytes = storage.nbytes() if counts else 0
        self.seen[key] = weakref.ref(storage, lambda _: self._gone(key, num_bytes))
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        del self.seen[key]
        self.live_bytes -= num_bytes


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if type(leaf) in PLAIN]


PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Allocations:
    """The most bytes that torch's CPU allocator gave to this thread at once, while entered."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._profile: Any = profile(profile_memory=True)

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._profile.__exit__(*raised)
        results = self._profile.kineto_results
        assert results is not None, "the profiler has ended"
        live_bytes = 0
        for _, num_bytes in sorted(_allocations(results.experimental_event_tree())):
            live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, live_bytes)


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """When and how many bytes were allocated (or, if negative, freed)."""
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.alloc_size
        yield from _allocations(event.children)
