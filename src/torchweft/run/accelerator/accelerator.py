"""The accelerator runtime: one host thread puts a program's items on the streams of a device.

    runtime = runtime_of(inputs)                  None where they live on no accelerator
    runtime.run(program, inputs, bounds)  ->  outputs, still being computed

Written against `torch.Stream`, `torch.Event` and `torch.accelerator`; what only CUDA has stands in
`cuda.py`. A call borrows streams and events, starts behind what the caller's current stream holds
and ends by making that stream wait for all others, so for the caller it is as if everything had run
on the current stream. The host never waits for the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from torchweft.errors import RunError, clip
from torchweft.plan.machine import Lane
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Trace
from torchweft.run.accelerator.dispatch import Dispatch
from torchweft.run.accelerator.graphs import Graphs, StreamCall
from torchweft.run.accelerator.streams import StreamProgram, compile_streams
from torchweft.run.program import Body, Delay, Inputs, Numbers, Outputs, trace_of


class Loan(NamedTuple):
    """Streams and events that one call has to itself. Events are recorded anew in every call."""

    streams: list[Any]
    events: list[Any]


class Accelerator:
    """A device as `torch.accelerator` shows it; `cuda.py` has one with more to it.

    There is one for all graphs of a process: torch has few streams, and hands them out in turn, so
    that two lanes might get the same one; and device graphs share one pool of memory.

    api: stands in for torch in tests. Streams and events have the methods of torch's own.
    captured, ended: the device graphs that live, and the end of the last replay.
    kept: the addresses of what forward graphs save there for their backward graphs.
    """

    def __init__(self, device: torch.device, api: Any = torch) -> None:
        self.device, self.api = device, api
        self.lock, self.replaying = threading.Lock(), threading.RLock()
        self.idle: dict[tuple[Lane, ...], list[Loan]] = {}
        self.captured: WeakSet[Any] = WeakSet()
        self.ended: Any = None
        self.kept: set[int] = set()

    @contextmanager
    def lend(self, given: Dispatch) -> Iterator[Loan]:
        """Streams and events for one call of a dispatch, until it has issued everything.

        Work that is still queued then is behind its events.
        """
        lanes = tuple(lane for lane in given.streams if lane is not None)
        with self.lock:
            idle = self.idle.setdefault(lanes, [])
            loan = idle.pop() if idle else None
        loan = loan or Loan([self.stream(lane) for lane in lanes], [])
        while len(loan.events) < len(given.events):
            loan.events.append(self.event())
        try:
            yield loan
        finally:
            with self.lock:
                idle.append(loan)

    def stream(self, lane: Lane) -> Any:
        """A new stream. Raises `RunError` if the lane has an SM budget: only CUDA holds to one."""
        if lane.num_sms is not None:
            raise RunError(
                f"run: lane {lane.name!r} has a budget of {lane.num_sms} multiprocessors, which "
                f"{self.device.type!r} cannot hold it to. Give it none on this device."
            )
        return self.api.Stream(self.device, priority=lane.priority)

    def event(self, *, timing: bool = False) -> Any:
        return self.api.Event(self.device, enable_timing=timing)

    def current_stream(self) -> Any:
        return self.api.accelerator.current_stream(self.device)

    def now(self, stream: Any = None) -> Any:
        """An event that a stream, the current one if none is named, records now, with its time."""
        event = self.event(timing=True)
        (self.current_stream() if stream is None else stream).record_event(event)
        return event

    def set_stream(self, stream: Any) -> None:
        """Send work to another stream from now on."""
        self.api.accelerator.set_stream(stream)

    def active(self) -> AbstractContextManager[Any]:
        """Make this device the current one inside."""
        active: AbstractContextManager[Any] = self.api.accelerator.device_index(self.device.index)
        return active

    def synchronize(self) -> None:
        self.api.accelerator.synchronize(self.device)

    @property
    def pool(self) -> Any:
        """The memory that device graphs share; None if none lives. torch gives up what had its last
        graph, even if tensors are left in it."""
        return next((graph.pool() for graph in self.captured), None)

    def begin_capture(self) -> Any:
        """A new graph that takes what is put on the current stream and those forked from it."""
        graph = self.api.accelerator.Graph(pool=self.pool)
        graph.capture_begin()
        return graph

    def is_capturing(self) -> bool:
        """Whether somebody else captures what is put on the current stream."""
        return False

    @cached_property
    def no_graphs(self) -> str:
        """Why this device has no graphs; empty if it has."""
        try:
            self.api.accelerator.Graph()
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            return f"graphs: {self.device.type!r} has none here: {clip(error)}"
        return ""

    @cached_property
    def one_stream(self) -> str:
        """Why everything goes to the caller's stream; empty if there can be others."""
        try:
            self.api.empty(1, device=self.device).record_stream(self.current_stream())
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            why = "cannot be told that a stream uses bytes of another, so all lanes have one stream"
            return f"streams: {self.device.type!r} {why}: {clip(error)}"
        return ""

    @cached_property
    def no_times(self) -> str:
        """Why events of this device tell no times; empty if they do."""
        try:
            start, end = self.now(), self.now()
            end.synchronize()
            start.elapsed_time(end)
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            return f"trace: events of {self.device.type!r} tell no times: {clip(error)}"
        return ""


class Runtime:
    """Runs the stream programs of one graph on a device. Calls may come from several threads."""

    def __init__(self, device: Accelerator, graphs: Graphs | None = None) -> None:
        self.device, self.graphs = device, graphs

    def compile(
        self, plan: Plan, bodies: Mapping[str, Body], *, traced: bool = False, jitter: Delay = False
    ) -> StreamProgram:
        """The program of a plan; with graphs, cut where ops must not be captured."""
        return compile_streams(
            plan, bodies, graphs=self.graphs is not None and not traced, traced=traced,
            jitter=jitter, one_stream=bool(self.device.one_stream),
        )  # fmt: skip

    def run(
        self, program: StreamProgram, inputs: Inputs, bounds: Numbers, *, numbers: Numbers = ()
    ) -> Outputs:
        """Run one call and give its outputs. Raises `RunError` if an op fails on the host."""
        call = StreamCall(self.device, program, inputs, bounds, numbers)
        return call.issue() if self.graphs is None else self.graphs.run(call)

    def run_traced(
        self, program: StreamProgram, inputs: Inputs, bounds: Numbers, *, numbers: Numbers = ()
    ) -> tuple[Outputs, Trace]:
        """Run one call of a traced program to its end: its outputs, and what happened when."""
        marks: list[tuple[int, Any, Any]] = []
        began = self.device.now()
        outputs = StreamCall(self.device, program, inputs, bounds, numbers).issue(marks)
        self.device.synchronize()
        spans = [
            (index, began.elapsed_time(start) / 1e3, began.elapsed_time(end) / 1e3)
            for index, start, end in marks
        ]
        return outputs, trace_of(program, spans)


def devices_of(inputs: Sequence[Any]) -> set[torch.device]:
    """The accelerators that inputs live on."""
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return set()
    devices = {item.device for item in inputs if isinstance(item, torch.Tensor)}
    return {device for device in devices if device.type == kind.type}


def runtime_of(
    inputs: Sequence[Any],
    *,
    graphs: bool,
    fall_back: Callable[[str], None],
    constants: Collection[str] = (),
    saved: Collection[str] = (),
) -> Runtime | None:
    """The runtime for the accelerator that inputs live on; None: they are for the CPU runtime.

    fall_back: is told why, at each call that cannot be captured although `graphs` asks for it.
    constants: the inputs of the graph that are the same in every call. saved: the outputs that only
    the backward graph gets.
    """
    devices = devices_of(inputs)
    if len(devices) != 1:
        return None
    device = accelerator_of(*devices)
    captures = graphs and not device.no_graphs
    return Runtime(device, Graphs(device, fall_back, constants, saved) if captures else None)


@functools.cache
def accelerator_of(place: torch.device) -> Accelerator:
    """The one object of this process for an accelerator."""
    if place.type == "cuda":
        from torchweft.run.accelerator.cuda import Cuda  # what only CUDA has is loaded where it is

        return Cuda(place)
    return Accelerator(place)
