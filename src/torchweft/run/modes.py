"""The `Modes` of a call: the caller's torch state, to be taken over by another thread.

    modes = Modes()          in the caller's thread
    with modes: ...          in any other: as if the caller did it

Torch keeps this state by thread: gradients, inference mode, autocast, the default device and every
other mode that sees calls, and how many threads an op may use.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import overrides

from torchweft.private.core import dispatch


class Modes:
    """The torch state of the thread that makes it. May be entered by several threads at once."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or torch.get_num_threads()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        accelerator = torch.accelerator.current_accelerator()
        devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        self.autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in devices
        ]
        self.caches = torch.is_autocast_cache_enabled()
        self.functions = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self.dispatches = dispatch._get_current_dispatch_mode_stack()
        self.local = threading.local()

    def __enter__(self) -> None:
        if torch.get_num_threads() != self.num_threads:  # asked first, or the setting is lost
            torch.set_num_threads(self.num_threads)
        self.local.entered = entered = contextlib.ExitStack()
        entered.enter_context(torch.inference_mode(self.inference))
        entered.enter_context(torch.set_grad_enabled(self.grad))
        for device, dtype, enabled in self.autocast:
            entered.enter_context(
                torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=self.caches)
            )
        for mode in self.functions:
            entered.enter_context(_pushed(mode, overrides._push_mode, overrides._pop_mode))
        for mode in self.dispatches:
            entered.enter_context(_pushed(mode, dispatch._push_mode, dispatch._pop_mode))

    def __exit__(self, *error: Any) -> None:
        self.local.entered.__exit__(*error)


@contextlib.contextmanager
def _pushed(mode: Any, push: Callable[[Any], None], pop: Callable[[], Any]) -> Iterator[None]:
    """A mode in force, put there without its own `__enter__`, which is for one thread at a time."""
    push(mode)
    try:
        yield
    finally:
        pop()
