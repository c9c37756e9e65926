"""The `EagerPart` of a call at run time: an eager model in a thread of its own.

    dispatching thread                thread of the part
    part.resume()   ----- go ----->   computes up to its next stop
                    <---- back ----   stop("all_reduce group_0"), and waits there

Of each pair of threads one waits, so a part and its dispatcher never run side by side; parts that
are resumed by several lanes do. What torch keeps by thread (gradients, autocast ...) is a part's
own by itself; context variables are those of the dispatching thread when the part starts. The
default dtype, which torch keeps by process, is put in force whenever a part goes on, and taken back
where it stops.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

import torch

from torchweft.capture.marks import listening
from torchweft.errors import RunError, clip
from torchweft.ranks.talk import SEQUENCE
from torchweft.run.cpu import Cancelled, Lanes
from torchweft.run.eager.collectives import BETWEEN_TWO, EagerCollective
from torchweft.run.modes import Modes


class Stop(NamedTuple):
    """A boundary of the model: what it tells there, and whether control passes to other parts."""

    text: str
    passes: bool = True


class EagerPart:
    """One part of one call: started once, resumed at each of its stops, and cancelled or over.

    first: its first row. stops: what the model is to come to; its end is none of them.
    """

    def __init__(
        self, run: Callable[[], Any], stops: Sequence[Stop], first: int, modes: Modes
    ) -> None:
        self.run, self.stops, self.first, self.modes = run, stops, first, modes
        self.at = 0
        self.caught: EagerCollective | None = None
        self.outputs: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.over = threading.Event()
        self._dtype = self._home = torch.get_default_dtype()
        self._context = copy_context()
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()

    # Called by the dispatching thread.

    def start(self, threads: Lanes) -> None:
        """Run up to the first stop. Raises what the model raises."""
        threads.start(self._job)
        self._wait()

    def resume(self) -> None:
        """Run up to the next stop, or to the end. Raises what the model raises."""
        self._go.release()
        self._wait()

    def _wait(self) -> None:
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Let the model end where it stands, or where it stops next."""
        self.cancelled = True
        _free(self._go)

    # Called by the thread of the part.

    def _job(self) -> Callable[[], None]:
        try:
            with self.modes, listening(self):
                self._enter()
                try:
                    self.outputs = self._context.run(self.run)
                finally:
                    self._leave()
            if self.at < len(self.stops):
                raise unfit(self.stops[self.at].text, "its end")
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        return self._end

    def _end(self) -> None:
        self.over.set()
        _free(self._back)

    def stop(self, text: str, mark: Any) -> None:
        """The model enters or leaves a mark."""
        self._come_to(text, None)

    def talk(self, caught: EagerCollective) -> Any:
        """The model calls a collective: it goes on when that has landed."""
        if caught.kind in BETWEEN_TWO:
            return caught.pass_on()
        self._come_to(caught.text, caught)
        return caught.result

    def _come_to(self, text: str, caught: EagerCollective | None) -> None:
        planned = self.stops[self.at] if self.at < len(self.stops) else Stop("its end")
        if planned.text != text:  # noted here, for the model may catch what is raised
            self.error = unfit(planned.text, text)
            raise Cancelled
        self.at += 1
        if planned.passes:
            self.caught = caught
            self._leave()
            if not self.cancelled:
                self._back.release()
                self._go.acquire()
            if self.cancelled:
                raise Cancelled
            self._enter()

    def _enter(self) -> None:
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)

    def _leave(self) -> None:
        self._dtype = torch.get_default_dtype()
        if self._dtype is not self._home:
            torch.set_default_dtype(self._home)


def _free(lock: threading.Lock) -> None:
    """Release a lock that another thread may have released already."""
    with contextlib.suppress(RuntimeError):
        lock.release()


def cancel(parts: Sequence[EagerPart], patience_s: float) -> bool:
    """Cancel all parts that are not over; whether their threads ended in time."""
    for part in parts:
        if not part.over.is_set():
            part.cancel()
    return all(part.over.wait(patience_s) for part in parts)


def unfit(planned: str, came: str) -> RunError:
    """The error of a model that comes to another boundary than the plan says."""
    return RunError(
        f"sequence: the model came to {clip(came)} where its first run had {clip(planned)}; "
        "its plan does not fit any more.",
        rule=SEQUENCE,
    )
