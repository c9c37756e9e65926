"""Taking turns: functions in threads of their own, of which exactly one runs at a time.

    each runs until it needs numbers and hands the baton on; when all wait, what they asked for
    runs once, together, and each goes on in turn

A thread takes over the caller's grad and inference modes, as lanes do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Turn(threading.Thread):
    """One function; it runs while it has the baton."""

    def __init__(
        self, function: Callable[[], Any], back: threading.Semaphore, threads: set[int]
    ) -> None:
        super().__init__(name="weft turn", daemon=True)
        self.function, self.back, self.threads = function, back, threads
        self.go = threading.Semaphore(0)
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = self.stopped = False
        self.modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.num_threads = torch.get_num_threads()

    def run(self) -> None:
        self.go.acquire()
        self.threads.add(threading.get_ident())
        if torch.get_num_threads() != self.num_threads:  # asked first, or the setting is lost
            torch.set_num_threads(self.num_threads)
        try:
            grad, inference = self.modes
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                self.result = self.function()
        except BaseException as error:
            self.error = error
        self.over = True
        self.back.release()

    def step(self) -> None:
        """Give it the baton, and wait until it comes back."""
        self.go.release()
        self.back.acquire()

    def pause(self) -> None:
        """Hand the baton back, and wait until it comes again."""
        self.back.release()
        self.go.acquire()
        if self.stopped:
            raise _StopError


def run_in_turns(
    functions: Sequence[Callable[[], Any]], threads: set[int], flush: Callable[[], None]
) -> list[Any]:
    """The results of all functions; raises the first error, after all others have stopped.

    threads: is given the idents of their threads. flush: runs what all of them wait for.
    """
    back = threading.Semaphore(0)
    turns = [Turn(function, back, threads) for function in functions]
    for turn in turns:
        turn.start()
    waiting = turns
    while waiting:
        for turn in waiting:
            turn.step()
        waiting = [turn for turn in waiting if not turn.over]
        if any(turn.error is not None for turn in turns):
            break
        if waiting:
            flush()
    for turn in waiting:
        turn.stopped = True
        turn.step()
    for turn in turns:
        if turn.error is not None and not isinstance(turn.error, _StopError):
            raise turn.error
    return [turn.result for turn in turns]


class _StopError(BaseException):
    """Thrown into functions that wait when another has failed."""
