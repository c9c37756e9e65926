"""The CPU runtime: runs a program, its first lane in the caller's thread, the others in threads.

    run(program, inputs, bounds) -> outputs

Lane threads take over the caller's grad, inference and autocast modes and its intra-op thread
count, wait for nothing but events of their own call, and end after a second without work. If one
lane fails, the others are woken and stop, and the caller gets one `RunError` with every lane's
story.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torchweft.plan.trace import Trace
from torchweft.run.modes import Modes
from torchweft.run.program import Mark, Program, failure_of, trace_of

LINGER_S = 1.0
Job = Callable[[], Callable[[], None] | None]
"""What a thread does; what it returns is called when the thread is free for another job."""


class Cancelled(BaseException):
    """Thrown into the lanes of a call of which another lane has failed."""


class Lanes:
    """Threads for lanes, lent to one call at a time; they end after `linger_s` without work."""

    def __init__(self, linger_s: float | None = LINGER_S) -> None:
        self.lock, self.linger_s = threading.Lock(), linger_s
        self.idle: list[_LaneThread] = []
        self.process = os.getpid()

    def start(self, job: Job) -> None:
        """Do a job in a thread of its own."""
        with self.lock:
            if self.process != os.getpid():  # a fork has no threads but its caller's
                self.idle, self.process = [], os.getpid()
            thread = self.idle.pop() if self.idle else None
        if thread is None:
            thread = _LaneThread(self)
            thread.start()
        thread.jobs.put(job)

    def close(self) -> None:
        """End all idle threads now."""
        threads = self.release()
        for thread in threads if self.process == os.getpid() else ():
            thread.join()

    def release(self) -> list[_LaneThread]:
        """Tell all idle threads to end, without waiting for them."""
        with self.lock:
            threads, self.idle, self.linger_s = self.idle, [], LINGER_S
        for thread in threads:
            thread.jobs.put(None)
        return threads


class _LaneThread(threading.Thread):
    def __init__(self, lanes: Lanes) -> None:
        super().__init__(name="weft lane", daemon=True)
        self.lanes = lanes
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()

    def run(self) -> None:
        while True:
            try:
                job = self.jobs.get(timeout=self.lanes.linger_s)
            except queue.Empty:
                with self.lanes.lock:
                    if self in self.lanes.idle:
                        self.lanes.idle.remove(self)
                        return
                continue  # a job is on its way
            if job is None:
                return
            after = job()
            del job
            with self.lanes.lock:
                self.lanes.idle.append(self)
            if after is not None:
                after()
            del after  # what it holds is not to live as long as the thread


class CpuCall:
    """The state of one call: cells that lanes share, events, and what went wrong."""

    def __init__(self, program: Program, marks: Sequence[Mark]) -> None:
        self.cells: list[Any] = [None] * program.num_cells
        self.events = [threading.Event() for _ in range(program.num_events)]
        self.state: list[Any] = [-1] * len(program.lanes) + [marks]  # the step of each lane; marks
        self.ends = [threading.Event() for _ in program.functions[1:]]
        self.lock = threading.Lock()
        self.failure: tuple[str, BaseException] | None = None

    def wait(self, event: threading.Event) -> None:
        """Wait for a step of another lane, or for the end of the call if it has failed."""
        event.wait()
        if self.failure is not None:
            raise Cancelled

    def join(self) -> None:
        for end in self.ends:
            end.wait()
        if self.failure is not None:
            raise Cancelled

    def fail(self, lane: str, error: BaseException) -> None:
        """Note the first failure and wake every lane that waits."""
        with self.lock:
            if self.failure is None:
                self.failure = (lane, error)
        for event in self.events:
            event.set()


def run(
    program: Program,
    inputs: Sequence[Any],
    bounds: Sequence[int],
    lanes: Lanes,
    *,
    numbers: Sequence[int] = (),
    num_threads: int | None = None,
    marks: Sequence[Mark] = (),
) -> tuple[Any, ...]:
    """Run one call and give its outputs. Raises `RunError` if an op fails.

    numbers: what `program.numbers` gave for these bounds.
    num_threads: intra-op threads of the other lanes; default: as many as the caller's.
    marks: a list for what the steps of a traced program leave.
    """
    call = CpuCall(program, marks)
    arguments = (
        inputs, numbers, call.cells, call.events, call.wait, call.state, bounds, call.join,
    )  # fmt: skip
    if call.ends:
        modes = Modes(num_threads)
        for number in range(len(call.ends)):
            lanes.start(partial(_run_lane, call, program, number + 1, arguments, modes))
    try:
        outputs: tuple[Any, ...] = program.functions[0](*arguments)
        return outputs
    except BaseException as error:
        if not isinstance(error, Cancelled):
            call.fail(program.lanes[0], error)
        with contextlib.suppress(Cancelled):
            call.join()
        assert call.failure is not None, "a call is cancelled only if a lane has failed"
        lane, cause = call.failure
        raise failure_of(program, lane, cause, call.state) from cause


def run_alone(
    program: Program, inputs: Sequence[Any], bounds: Sequence[int], numbers: Sequence[int]
) -> tuple[Any, ...]:
    """Run one call of a program with one lane: nothing is shared, so nothing is made to share."""
    try:
        outputs: tuple[Any, ...] = program.functions[0](
            inputs, numbers, (), (), None, None, bounds, None
        )
    except BaseException as error:
        raise failure_of(program, program.lanes[0], error, (-1,)) from error
    return outputs


def run_traced(
    program: Program, inputs: Sequence[Any], bounds: Sequence[int], lanes: Lanes, **options: Any
) -> tuple[tuple[Any, ...], Trace]:
    """Run one call of a traced program: its outputs, and what happened when. Options of `run`."""
    marks: list[Mark] = []
    outputs = run(program, inputs, bounds, lanes, marks=marks, **options)
    return outputs, trace_of(program, marks)


def _run_lane(
    call: CpuCall, program: Program, number: int, arguments: tuple[Any, ...], modes: Modes
) -> None:
    try:
        with modes:
            program.functions[number](*arguments)
    except Cancelled:
        pass
    except BaseException as error:
        call.fail(program.lanes[number], error)
    finally:
        call.ends[number - 1].set()
