"""The CPU runtime: runs a program, its first lane in the caller's thread, the others in threads.

    run(program, inputs, bounds) -> outputs

Lane threads take over the caller's grad, inference and autocast modes and its intra-op thread
count, wait for nothing but events of their own call, and go home after a second without work. If
one lane fails, the others are woken and stop, and the caller gets one `RunError` with every lane's
story.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchweft.errors import RunError, WeftError
from torchweft.plan.trace import SPANS, Span, Trace
from torchweft.run.modes import Modes
from torchweft.run.program import Program

LINGER_S = 1.0
Job = Callable[[], Callable[[], None] | None]
"""What a thread does; what it returns is called when the thread may be had for another job."""


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


@dataclass
class CpuCall:
    """The state of one call: cells that lanes share, events, and what went wrong."""

    program: Program
    cells: list[Any] = field(default_factory=list)
    events: list[threading.Event] = field(default_factory=list)
    state: list[Any] = field(default_factory=list)
    running: int = 0
    done: threading.Condition = field(default_factory=threading.Condition)
    failure: tuple[str, BaseException] | None = None

    def wait(self, event: threading.Event) -> None:
        """Wait for a step of another lane, or for the end of the call if it has failed."""
        event.wait()
        if self.failure is not None:
            raise Cancelled

    def join(self) -> None:
        """Wait until all other lanes have ended."""
        with self.done:
            while self.running:
                self.done.wait()
        if self.failure is not None:
            raise Cancelled

    def fail(self, lane: str, error: BaseException) -> None:
        """Note the first failure and wake every lane that waits."""
        with self.done:
            if self.failure is None:
                self.failure = (lane, error)
        for event in self.events:
            event.set()

    def end(self) -> None:
        """A lane has ended."""
        with self.done:
            self.running -= 1
            self.done.notify_all()


def run(
    program: Program,
    inputs: Sequence[Any],
    bounds: Sequence[int],
    lanes: Lanes,
    *,
    numbers: Sequence[int] = (),
    num_threads: int | None = None,
) -> tuple[Any, ...]:
    """Run one call and give its outputs. Raises `RunError` if an op fails.

    numbers: what `program.numbers` gave for these bounds.
    num_threads: intra-op threads of the other lanes; default: as many as the caller's.
    """
    return _run(program, inputs, bounds, lanes, numbers, num_threads)[0]


def run_alone(
    program: Program, inputs: Sequence[Any], bounds: Sequence[int], numbers: Sequence[int]
) -> tuple[Any, ...]:
    """Run one call of a program with one lane: nothing is shared, so nothing is made to share."""
    try:
        outputs: tuple[Any, ...] = program.functions[0](
            inputs, numbers, (), (), None, None, bounds, None
        )
    except BaseException as error:
        call = CpuCall(program, state=[-1, []], failure=(program.lanes[0], error))
        raise failure_of(call) from error
    return outputs


def run_traced(
    program: Program,
    inputs: Sequence[Any],
    bounds: Sequence[int],
    lanes: Lanes,
    *,
    numbers: Sequence[int] = (),
    num_threads: int | None = None,
) -> tuple[tuple[Any, ...], Trace]:
    """Run one call of a traced program: its outputs, and what happened when."""
    outputs, marks = _run(program, inputs, bounds, lanes, numbers, num_threads)
    return outputs, trace_of(program, marks)


def _run(
    program: Program,
    inputs: Sequence[Any],
    bounds: Sequence[int],
    lanes: Lanes,
    numbers: Sequence[int],
    num_threads: int | None,
) -> tuple[tuple[Any, ...], list[tuple[int, float, float]]]:
    call = CpuCall(program)
    call.cells = [None] * program.num_cells
    call.events = [threading.Event() for _ in range(program.num_events)]
    call.state = [-1] * len(program.lanes) + [[]]
    arguments = (
        inputs, numbers, call.cells, call.events, call.wait, call.state, bounds, call.join,
    )  # fmt: skip
    if len(program.functions) > 1:
        modes = Modes(num_threads)
        call.running = len(program.functions) - 1
        for name, function in zip(program.lanes[1:], program.functions[1:], strict=True):
            lanes.start(_job(call, name, function, arguments, modes))
    try:
        return program.functions[0](*arguments), call.state[-1]
    except BaseException as error:
        if not isinstance(error, Cancelled):
            call.fail(program.lanes[0], error)
        with call.done:
            while call.running:
                call.done.wait()
        raise failure_of(call) from (call.failure[1] if call.failure else None)


def _job(
    call: CpuCall, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], modes: Modes
) -> Callable[[], None]:
    def job() -> None:
        try:
            with modes:
                function(*arguments)
        except Cancelled:
            pass
        except BaseException as error:
            call.fail(name, error)
        finally:
            call.end()

    return job


def failure_of(call: CpuCall) -> BaseException:
    """The one error that the caller sees."""
    assert call.failure is not None, "a call without a failure has no error"
    lane, error = call.failure
    if not isinstance(error, Exception):
        return error  # Ctrl-C and the like stay what they are
    at = step_of(call.program, error)
    step = call.program.plan.steps[at].label if at is not None else "its end"
    what = f"run: {step} on lane {lane!r} failed: {type(error).__name__}: {error}"
    if isinstance(error, WeftError):
        error.step = at if error.step is None else error.step
        return error
    found = RunError(what, story=_story(call, lane, at), lane=lane)
    found.step = at
    return found


def step_of(program: Program, error: BaseException) -> int | None:
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == program.filename and frame.lineno is not None:
            return program.step_at.get(frame.lineno)
    return None


def _story(call: CpuCall, lane: str, at: int | None) -> str:
    """Where each lane stood, and the values that may be half written."""
    plan = call.program.plan
    lines = []
    for number, name in enumerate(call.program.lanes):
        step = at if name == lane else call.state[number]
        where = plan.steps[step].label if isinstance(step, int) and step >= 0 else "its start"
        lines.append(f"  lane {name!r} stood at {where}")
    changed = sorted(plan.graph.mutated & set(plan.graph.inputs))
    if changed:
        lines.append(f"  may be half written: {', '.join(changed)}")
    return "\n".join(lines)


def trace_of(program: Program, marks: list[tuple[int, float, float]]) -> Trace:
    """What the steps left behind, as a trace: steps, waits that took time, transfers in flight."""
    plan, graph = program.plan, program.plan.graph
    began = min((start for _, start, _ in marks), default=0.0)
    spans: list[Span] = []
    issued: dict[object, float] = {}
    for index, start, end in sorted(marks, key=lambda mark: mark[1]):
        step, start, end = plan.steps[index], start - began, end - began
        device = plan.lane[step.lane].device
        ops = step.names if step.kind in ("run", "issue", "complete") else ()
        uses = graph.op[ops[0]].uses if ops else "memory"
        if step.kind in SPANS:
            blocked = step.kind in ("wait", "complete")
            lane_uses = "compute" if step.kind in ("issue", "complete", "wait") else uses
            spans.append(
                Span(
                    step.kind, step.label, step.lane, device, lane_uses,
                    " ".join(ops), step.parts, start, end, 0.0 if blocked else end - start,
                )
            )  # fmt: skip
        if step.kind == "issue":
            issued[step.names, step.parts] = end
        if step.kind == "complete":
            issue = next(s for s in plan.steps if s.kind == "issue" and s.names == step.names)
            at = issued.get((step.names, step.parts), start)
            label, lane = step.label.removeprefix("complete "), issue.on or step.lane
            spans.append(
                Span(
                    "transfer", label, lane, device, uses,
                    " ".join(ops), step.parts, at, end, end - at,
                )
            )  # fmt: skip
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    lanes = tuple((lane.name, lane.device) for lane in plan.lanes if _busy(lane.name, spans))
    return Trace(plan.graph_name, tuple(spans), lanes=lanes)


def _busy(lane: str, spans: Sequence[Span]) -> bool:
    return any(span.lane == lane for span in spans)
