"""Device graphs: a whole plan captured once, all its streams in it, and replayed by one launch.

    call 1 of a shape    issued as usual; it warms up what libraries set up at their first call
    call 2               captured, segment by segment, each replayed as soon as it is there
    call 3 ...           inputs copied into their slots, graphs replayed, outputs copied out

A graph reads and writes where it did at its capture. So an input that comes from another address
in every call has a *slot*, a tensor that keeps its address; one that stayed where it was (weights),
or is changed in place (a KV cache), is *fixed*: read where it is, and the call is captured anew if
it moves. What an op marked `graph=False` makes is copied into the bytes it had at the capture.
Outputs are copied out, for the next replay writes over them. All graphs of a runtime share one pool
of memory, so their replays are put one behind the other.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchweft.machine import Lane
from torchweft.runtimes.streams import StreamProgram

if TYPE_CHECKING:
    from torchweft.runtimes.accelerator import Runtime

log = logging.getLogger("torchweft")
MAX_GRAPHS = 64
MAX_CAPTURES = 4


@dataclass
class Part:
    """One segment of a captured call: a graph, or a function that is run at each replay.

    before, after: what the cells held when the function started and ended at the capture.
    """

    graph: Any = None
    function: Any = None
    before: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)


@dataclass
class Shape:
    """What is known of the calls of one shape."""

    addresses: list[int | None]
    fixed: list[bool]
    num_captures: int = 0
    slots: list[Any] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    refused: str = ""

    def moved(self, addresses: Sequence[int | None]) -> list[int]:
        """The fixed inputs that are not where they were at the capture."""
        pairs = zip(self.fixed, self.addresses, addresses, strict=True)
        return [at for at, (fixed, old, new) in enumerate(pairs) if fixed and old != new]


class Graphs:
    """The captured calls of a runtime, by program and shape; the least used go first."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.device = runtime, runtime.device
        self.shapes: OrderedDict[object, Shape] = OrderedDict()
        self.refused: dict[str, int] = {}
        self.num_replays = 0
        self.pool: Any = None
        self.stream: Any = None
        self.ended: Any = None
        self.lock = threading.RLock()

    def run(
        self,
        program: StreamProgram,
        inputs: Sequence[Any],
        bounds: Sequence[int],
        numbers: Sequence[int],
    ) -> tuple[Any, ...]:
        """Run one call: issued, captured or replayed."""
        with self.lock:
            addresses = [item.data_ptr() if isinstance(item, Tensor) else None for item in inputs]
            key = (id(program), tuple(bounds), tuple(numbers), *map(_facts, inputs))
            shape = self.shapes.get(key)
            if shape is None:
                shape = self._first(program, addresses)
                self.shapes[key] = shape
                if len(self.shapes) > MAX_GRAPHS:
                    self.shapes.popitem(last=False)
                return self.runtime.issue(program, inputs, bounds, numbers)
            self.shapes.move_to_end(key)
            if shape.refused:
                self.refused[shape.refused] += 1
                return self.runtime.issue(program, inputs, bounds, numbers)
            if not shape.parts or shape.moved(addresses):
                return self._capture(program, shape, inputs, bounds, numbers, addresses)
            return self._replay(program, shape, inputs, bounds, numbers)

    def _first(self, program: StreamProgram, addresses: list[int | None]) -> Shape:
        """A shape at its first call; refused if its outputs could not be copied out."""
        graph = program.plan.graph
        shape = Shape(addresses, [address is not None for address in addresses], refused="")
        aliases = [name for name in graph.outputs if graph.value[name].alias_of is not None]
        if aliases:
            self._refuse(shape, "graphs: an output shares bytes with another value")
        return shape

    def _refuse(self, shape: Shape, why: str) -> None:
        shape.refused = why
        if why not in self.refused:
            log.warning("calls are not captured in a device graph: %s", why.partition(": ")[2])
        self.refused.setdefault(why, 0)

    def _capture(
        self,
        program: StreamProgram,
        shape: Shape,
        inputs: Sequence[Any],
        bounds: Sequence[int],
        numbers: Sequence[int],
        addresses: list[int | None],
    ) -> tuple[Any, ...]:
        """Capture a call and carry it out on the way."""
        shape.num_captures += 1
        if shape.num_captures > MAX_CAPTURES:
            shape.parts = []
            self._refuse(shape, "graphs: an input that is changed in place moves at every call")
            return self.runtime.issue(program, inputs, bounds, numbers)
        graph = program.plan.graph
        for at in shape.moved(addresses):  # it came from two addresses: from now on it has a slot
            shape.fixed[at] = graph.inputs[at] in graph.mutated
        shape.addresses, shape.parts = addresses, []
        with self.device.active():
            caller = self.device.current_stream()
            self._behind(caller)
            self.device.synchronize()
            shape.slots = [
                item if fixed or not isinstance(item, Tensor) else item.clone()
                for item, fixed in zip(inputs, shape.fixed, strict=True)
            ]
            try:
                self._segments(program, shape, caller, bounds, numbers)
            except BaseException:
                shape.parts = []
                raise
            for at, fixed in enumerate(shape.fixed):
                if fixed:  # only its address counts; its bytes are the caller's to free
                    shape.slots[at] = None
            if wrong := _unkept(shape):
                self._refuse(shape, wrong)
            return self._handed_out(program, shape, inputs, caller)

    def _segments(
        self,
        program: StreamProgram,
        shape: Shape,
        caller: Any,
        bounds: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        loan = self.runtime.borrow(program)
        cells: list[Any] = [None] * program.program.num_cells
        self.stream = self.stream or self.device.stream(Lane("capture"))
        functions = zip(program.program.functions, program.dispatch.segments, strict=True)
        device = self.device
        try:
            for function, segment in functions:
                first = self.stream if segment.captured else caller
                arguments = (
                    shape.slots, numbers, cells, loan.events, (first, *loan.streams), None, bounds,
                    device.set_stream, None,
                )  # fmt: skip
                part = Part()
                if segment.captured:
                    device.set_stream(first)
                    part.graph = device.begin_capture(self.pool)
                    try:
                        shape.outputs = function(*arguments)
                    finally:
                        device.set_stream(first)
                        part.graph.capture_end()
                        device.set_stream(caller)
                    self.pool = self.pool or part.graph.pool()
                    part.graph.replay()
                else:
                    part.function, part.before = function, list(cells)
                    shape.outputs = function(*arguments)
                    part.after = list(cells)
                shape.parts.append(part)
        finally:
            device.set_stream(caller)
            self.runtime.give_back(program, loan)

    def _replay(
        self,
        program: StreamProgram,
        shape: Shape,
        inputs: Sequence[Any],
        bounds: Sequence[int],
        numbers: Sequence[int],
    ) -> tuple[Any, ...]:
        """Put a captured call on the caller's stream."""
        self.num_replays += 1
        with self.device.active():
            caller = self.device.current_stream()
            self._behind(caller)
            given = list(inputs)
            for at, slot in enumerate(shape.slots):
                if isinstance(slot, Tensor):
                    slot.copy_(inputs[at])
                    given[at] = slot
            for part in shape.parts:
                if part.graph is not None:
                    part.graph.replay()
                else:
                    self._again(program, part, given, bounds, numbers, caller)
            return self._handed_out(program, shape, inputs, caller)

    def _again(
        self,
        program: StreamProgram,
        part: Part,
        given: Sequence[Any],
        bounds: Sequence[int],
        numbers: Sequence[int],
        caller: Any,
    ) -> None:
        """Run a segment that is not captured; what it makes goes where graphs look for it."""
        loan, cells = self.runtime.borrow(program), list(part.before)
        set_stream = self.device.set_stream
        try:
            streams = (caller, *loan.streams)
            part.function(given, numbers, cells, loan.events, streams, None, bounds, set_stream, None)
        finally:
            set_stream(caller)
            self.runtime.give_back(program, loan)
        for made, place in zip(cells, part.after, strict=True):
            if isinstance(place, Tensor) and made is not place:
                place.copy_(made)

    def _behind(self, stream: Any) -> None:
        """Replays share bytes: each comes behind the last, whoever called it."""
        if self.ended is not None:
            stream.wait_event(self.ended)

    def _handed_out(
        self, program: StreamProgram, shape: Shape, inputs: Sequence[Any], caller: Any
    ) -> tuple[Any, ...]:
        """The outputs in bytes of the caller's own; an input that is an output is itself."""
        graph = program.plan.graph
        own = {name: inputs[at] for at, name in enumerate(graph.inputs)}
        outputs = tuple(
            own[name] if name in own else made.clone() if isinstance(made, Tensor) else made
            for name, made in zip(graph.outputs, shape.outputs, strict=True)
        )
        self.ended = self.ended or self.device.event()
        caller.record_event(self.ended)
        return outputs


def _facts(item: Any) -> object:
    """What must be equal for two calls to have one graph."""
    if isinstance(item, Tensor):
        return (item.shape, item.dtype)
    return item if isinstance(item, int | float | str | None) else id(item)


def _unkept(shape: Shape) -> str:
    """Why a captured call cannot be replayed: an op outside of graphs makes what is no tensor."""
    for part in shape.parts:
        for before, after in zip(part.before, part.after, strict=True):
            if after is not None and after is not before and not isinstance(after, Tensor):
                return "graphs: an op with graph=False makes what is no tensor"
    return ""
