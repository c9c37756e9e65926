"""The `Waiter`: a thread that waits for one work at a time, so that its caller can be interrupted.

    error = beside(work, gives_up)      None, or what the work ended with

gloo closes the connection of a message whose wait was given up, so a message cannot be waited for
in slices; and nothing gets through a wait in one go, not even Ctrl-C.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

LOOK_S = 1.0


class Waiter(threading.Thread):
    """Waits for what comes by its queue: works, with a queue for what they end with."""

    def __init__(self) -> None:
        super().__init__(name="weft message", daemon=True)
        self.works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            work, ended = self.works.get()
            error: RuntimeError | None = None
            try:
                work.wait()
            except RuntimeError as failed:
                error = failed.with_traceback(None)
            del work  # what it holds is not to live as long as the thread
            ended.put(error)
            del error, ended


_idle: list[Waiter] = []
"""Threads that wait for nothing. One whose caller has gone ends its wait by itself, and stays."""


def beside(work: Any, gives_up: Callable[[], bool]) -> RuntimeError | None:
    """Wait for a work on another thread; what it ended with, if that was an error.

    gives_up: asked each second; raises `TimeoutError` if it is true.
    """
    waiter = _idle.pop() if _idle else Waiter()
    ended: queue.SimpleQueue[RuntimeError | None] = queue.SimpleQueue()
    waiter.works.put((work, ended))
    del work
    while True:
        try:
            error = ended.get(timeout=LOOK_S)
            break
        except queue.Empty:
            if gives_up():
                raise TimeoutError from None
    _idle.append(waiter)
    return error
