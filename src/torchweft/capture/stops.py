"""The `Stop`: where an eager model tells that it has come to a boundary, and who listens there.

    with listening(part):        in the thread that runs the model
        model(x)                 marks and collectives inside call part.stop(...), part.talk(...)

Nobody listens outside of such a thread: marks and collectives are then what they always are.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Stop(NamedTuple):
    """A boundary of the model: what it tells there, and whether control passes to other parts."""

    text: str
    passes: bool = True


class Listener(Protocol):
    """Who is told of the boundaries that a model comes to."""

    def stop(self, text: str, mark: Any) -> None:
        """The model enters or leaves a mark."""

    def talk(self, caught: Any) -> Any:
        """The model calls a collective; what is returned here is what it gets."""


_here = threading.local()


def listener() -> Listener | None:
    """Who listens to the model of this thread, if anybody does."""
    return getattr(_here, "listener", None)


@contextlib.contextmanager
def listening(to: Listener | None) -> Iterator[None]:
    """Tell this listener of the boundaries inside; None: tell nobody."""
    before = listener()
    _here.listener = to
    try:
        yield
    finally:
        _here.listener = before
