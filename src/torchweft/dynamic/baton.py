"""Taking turns: functions in threads of their own, of which exactly one runs at a time.

    each runs until it needs numbers and hands the baton on; when all wait, what they asked for
    runs once, together, and each goes on in turn

A thread takes over the caller's grad and inference modes, as lanes do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchweft.dynamic.state import State


class _Turn(threading.Thread):
    """One function; it runs while it has the baton."""

    def __init__(
        self, state: State, function: Callable[[], Any], back: threading.Semaphore
    ) -> None:
        super().__init__(name="weft turn", daemon=True)
        self.state = state
        self.function, self.back = function, back
        self.go = threading.Semaphore(0)
        self.result: Any = None
        self.error: BaseException | None = None
        self.over = self.stopped = False
        self.modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.num_threads = torch.get_num_threads()

    def run(self) -> None:
        self.go.acquire()
        self.state.threads.add(threading.get_ident())
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

    def pause(self) -> None:
        """Hand the baton back, and wait until it comes again."""
        self.back.release()
        self.go.acquire()
        if self.stopped:
            raise _StopError


def run_in_turns(state: State, functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all functions; raises the first error, after all others have stopped."""
    back = threading.Semaphore(0)
    turns = [_Turn(state, function, back) for function in functions]
    flush, recording = state.flush, state.recording
    assert recording is not None, "turns are taken inside a recording"

    def wait_for_all(_: Any) -> None:
        turn = threading.current_thread()
        assert isinstance(turn, _Turn), "only turns need numbers here"
        turn.pause()

    for turn in turns:
        turn.start()
    waiting, failed = list(turns), False
    try:
        while waiting:
            state.flush = wait_for_all
            for turn in waiting:
                turn.go.release()
                back.acquire()
            failed = failed or any(turn.error is not None for turn in waiting)
            waiting = [turn for turn in waiting if not turn.over]
            state.flush = flush
            if failed:
                for turn in waiting:
                    turn.stopped = True
                    turn.go.release()
                    back.acquire()
                break
            if waiting:
                flush(recording)
    finally:
        state.flush = flush
    for turn in turns:
        if turn.error is not None and not isinstance(turn.error, _StopError):
            raise turn.error
    return [turn.result for turn in turns]


class _StopError(BaseException):
    """Thrown into functions that wait when another has failed."""
