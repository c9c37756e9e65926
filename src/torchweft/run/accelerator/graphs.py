"""Device graphs: a whole plan captured once, all its streams in it, and replayed by one launch.

    call 1 of a shape    issued as usual; it warms up what libraries set up at their first call
    call 2               captured, segment by segment, each replayed as soon as it is there
    call 3 ...           inputs copied into their slots, graphs replayed, outputs copied out

A graph reads and writes where it did at its capture. So an input that comes from another address
in every call has a *slot*, a tensor that keeps its address; one that stayed where it was (weights),
or is changed in place (a KV cache), is *fixed*: read where it is, and the call is captured anew if
it moves. What an op marked `graph=False` makes is copied into the bytes it had at the capture.
Outputs are copied out, for the next replay writes over them, but what a forward graph saves: its
backward graph reads that where it is. All graphs share one pool of memory, so their replays are put
one behind the other.

`Pads` fill calls up to the next of a few sizes, so that few device graphs serve them all:

    37 rows --fill--> 64 rows, the last one repeated --run--> 64 rows --take--> 37 rows
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, is_inference_mode_enabled
from torch.nn import Parameter

from torchweft.capture.rows.axes import rows_at
from torchweft.errors import RunError, WeftError
from torchweft.plan.graph import Graph, Value
from torchweft.plan.machine import Lane
from torchweft.run.accelerator.streams import StreamProgram, failed
from torchweft.run.program import Inputs, Numbers, Outputs
from torchweft.run.writer import taker

if TYPE_CHECKING:
    from torchweft.run.accelerator.accelerator import Accelerator, Loan

MAX_GRAPHS = 64
MAX_CAPTURES = 4
ALIAS = "graphs: an output shares bytes with another value, so it cannot be copied out"
MOVES = "graphs: an input that is changed in place moves at every call"
FROZEN = "graphs: an input lives on the CPU, and its numbers would be those of the capture"
WANTED = "graphs: what an earlier forward has saved is still wanted"
OPAQUE = "graphs: an op marked graph=False makes something other than a tensor"


class StreamCall(NamedTuple):
    """One call: what runs, and what it is given."""

    device: Accelerator
    program: StreamProgram
    inputs: Inputs
    bounds: Numbers
    numbers: Numbers

    def issue(self, marks: list[Any] | None = None) -> Outputs:
        """Put all of it on its streams, function by function; no graph is used."""
        cells: list[Any] = [None] * self.program.num_cells
        device, outputs = self.device, ()
        with device.active(), device.lend(self.program.dispatch) as loan:
            caller = device.current_stream()
            try:
                for function in self.program.functions:
                    outputs = self.run(function, self.inputs, cells, caller, loan, marks)
                return outputs
            except BaseException as error:
                for stream in loan.streams:  # what has been issued still uses the caller's bytes
                    caller.wait_stream(stream)
                raise failed(self.program, error) from error
            finally:
                device.set_stream(caller)

    def run(
        self, function: Any, inputs: Inputs, cells: list[Any], first: Any, loan: Loan,
        marks: list[Any] | None = None,
    ) -> Any:  # fmt: skip
        """Run one function of the program, its stream 0 being `first`."""
        return function(
            inputs, self.numbers, cells, loan.events, (first, *loan.streams), marks, self.bounds,
            self.device.set_stream, self.device.now,
        )  # fmt: skip


class GraphSegment(NamedTuple):
    """One segment of a captured call: a graph, or a function that is run at each replay.

    before, after: what the cells held when the function started and ended at the capture.
    """

    graph: Any = None
    function: Any = None
    before: Sequence[Any] = ()
    after: Sequence[Any] = ()


@dataclass
class Shape:
    """What is known of the calls of one program and shape."""

    addresses: list[int | None]
    fixed: list[bool]
    num_captures: int = 0
    slots: list[Any] = field(default_factory=list)
    parts: list[GraphSegment] = field(default_factory=list)
    outputs: tuple[Any, ...] = ()
    lent: list[weakref.ref[Any]] = field(default_factory=list)  # what was saved by the last replay
    refused: str = ""

    def moved(self, addresses: Sequence[int | None]) -> list[int]:
        """The fixed inputs that are not where they were."""
        pairs = zip(self.fixed, self.addresses, addresses, strict=True)
        return [at for at, (fixed, old, new) in enumerate(pairs) if fixed and old != new]


class Graphs:
    """Captured calls, by program and shape; those not used for longest go first."""

    def __init__(
        self,
        device: Accelerator,
        fall_back: Callable[[str], None],
        constants: Collection[str] = (),
        saved: Collection[str] = (),
    ) -> None:
        self.device, self.fall_back = device, fall_back
        self.constants, self.saved = frozenset(constants), frozenset(saved)
        self.shapes: OrderedDict[object, Shape] = OrderedDict()
        self.num_replays = 0
        self.stream: Any = None
        self._varying: dict[StreamProgram, list[int]] = {}  # the inputs that are no weights

    def run(self, call: StreamCall) -> Outputs:
        """Run one call: issued, captured or replayed. What a host captures itself is issued."""
        if self.device.is_capturing():
            return call.issue()
        addresses = [item.data_ptr() if isinstance(item, Tensor) else None for item in call.inputs]
        mode = is_inference_mode_enabled()  # tensors made in it cannot be written outside
        sizes = tuple(call.bounds), tuple(call.numbers)
        if (varying := self._varying.get(call.program)) is None:
            pairs = enumerate(call.inputs)  # of a weight only the address counts
            varying = [at for at, item in pairs if not isinstance(item, Parameter)]
            self._varying[call.program] = varying
        key = (call.program, mode, *sizes, *[_facts(call.inputs[at]) for at in varying])
        with self.device.replaying:
            shape = self.shapes.get(key)
            if shape is None:
                self.shapes[key] = self._first(call, addresses)
                if len(self.shapes) > MAX_GRAPHS:
                    self.device.synchronize()  # its bytes may be in use
                    self.shapes.popitem(last=False)
                return call.issue()
            self.shapes.move_to_end(key)
            refused = shape.refused
            if any(lent() is not None for lent in shape.lent):
                refused = refused or WANTED
            if not refused and (not shape.parts or shape.moved(addresses)):
                return self._capture(call, shape, addresses)
            if not refused:
                return self._replay(call, shape)
        self.fall_back(refused)
        return call.issue()

    def _first(self, call: StreamCall, addresses: list[int | None]) -> Shape:
        """A shape at its first call: inputs count as fixed until they are seen to move."""
        graph = call.program.plan.graph
        refused = ALIAS if any(graph.value[n].alias_of is not None for n in graph.outputs) else ""
        for name, item in zip(graph.inputs, call.inputs, strict=True):
            on_host = isinstance(item, Tensor) and item.device.type == "cpu"
            if on_host and name not in self.constants:
                refused = FROZEN
        return Shape(addresses, [address is not None for address in addresses], refused=refused)

    def _capture(self, call: StreamCall, shape: Shape, addresses: list[int | None]) -> Outputs:
        """Capture a call and carry it out on the way."""
        graph, is_first = call.program.plan.graph, not shape.num_captures
        for at in shape.moved(addresses):  # it came from two addresses: from now on it has a slot
            is_kept = is_first and addresses[at] in self.device.kept  # by a forward that was issued
            shape.fixed[at] = graph.inputs[at] in graph.mutated or is_kept
        shape.addresses, shape.num_captures = addresses, shape.num_captures + 1
        self.device.synchronize()  # what is replaced may be in use, and a capture starts clean
        shape.parts = []
        if shape.num_captures > MAX_CAPTURES:
            shape.refused = MOVES
            return call.issue()
        device = self.device
        # Streams and events are lent before a capture begins: none is made inside of it.
        with device.active(), device.lend(call.program.dispatch) as loan:
            caller = self._behind()
            shape.slots = [
                item.clone() if isinstance(item, Tensor) and not fixed else item
                for item, fixed in zip(call.inputs, shape.fixed, strict=True)
            ]
            try:
                self._segments(call, shape, caller, loan)
            except BaseException as error:
                shape.parts = []
                raise _uncapturable(call.program, error) from error
            finally:
                device.set_stream(caller)
            cells = [zip(part.before, part.after, strict=True) for part in shape.parts]
            made = [after for pairs in cells for before, after in pairs if after is not before]
            if not all(isinstance(each, Tensor | None) for each in made):
                shape.refused = OPAQUE  # it runs at each replay, and cannot be put in place
            outputs = self._handed_out(call, shape, caller)
            for at, fixed in enumerate(shape.fixed):
                if fixed:  # only its address counts: its bytes are the caller's to free
                    shape.slots[at] = None
            return outputs

    def _segments(self, call: StreamCall, shape: Shape, caller: Any, loan: Loan) -> None:
        """Capture each segment and replay it, or run it where it must not be captured."""
        device, program = self.device, call.program
        self.stream = self.stream or device.stream(Lane("capture"))
        cells: list[Any] = [None] * program.num_cells
        for function, segment in zip(program.functions, program.dispatch.segments, strict=True):
            if not segment.captured:
                before = tuple(cells)
                shape.outputs = call.run(function, shape.slots, cells, caller, loan)
                shape.parts.append(GraphSegment(None, function, before, tuple(cells)))
                continue
            device.set_stream(self.stream)
            graph = device.begin_capture()
            try:
                shape.outputs = call.run(function, shape.slots, cells, self.stream, loan)
            finally:
                device.set_stream(self.stream)
                graph.capture_end()
                device.set_stream(caller)
            device.captured.add(graph)
            graph.replay()
            shape.parts.append(GraphSegment(graph))

    def _replay(self, call: StreamCall, shape: Shape) -> Outputs:
        """Put a captured call on the caller's stream."""
        self.num_replays += 1
        with self.device.active():
            caller = self._behind()
            given = list(call.inputs)
            for at, slot in enumerate(shape.slots):
                if isinstance(slot, Tensor):
                    given[at] = slot.copy_(given[at])
            for part in shape.parts:
                if part.graph is not None:
                    part.graph.replay()
                    continue
                cells = list(part.before)
                try:
                    with self.device.lend(call.program.dispatch) as loan:
                        call.run(part.function, given, cells, caller, loan)
                finally:
                    self.device.set_stream(caller)
                for made, place in zip(cells, part.after, strict=True):
                    if isinstance(place, Tensor) and made is not place:
                        place.copy_(made)
                        made.record_stream(caller)  # another stream may have asked for its bytes
            return self._handed_out(call, shape, caller)

    def _behind(self) -> Any:
        """The caller's stream, behind the last replay: they share slots and memory."""
        caller = self.device.current_stream()
        if self.device.ended is not None:
            caller.wait_event(self.device.ended)
        return caller

    def _handed_out(self, call: StreamCall, shape: Shape, caller: Any) -> Outputs:
        """The outputs in bytes of the caller's own; an input that is an output is itself.

        What is saved for the backward graph stays where it is, for the next replay to write over:
        that one looks whether somebody still has it.
        """
        graph = call.program.plan.graph
        own = dict(zip(graph.inputs, call.inputs, strict=True))
        outputs = list(shape.outputs)
        shape.lent = []
        for at, (name, made) in enumerate(zip(graph.outputs, shape.outputs, strict=True)):
            if name in own:
                outputs[at] = own[name]
            elif isinstance(made, Tensor) and name in self.saved:
                outputs[at] = made.detach()
                shape.lent.append(weakref.ref(outputs[at]))
                self.device.kept.add(made.data_ptr())
            elif isinstance(made, Tensor):
                outputs[at] = made.clone()
        self.device.ended = self.device.ended or self.device.event()
        caller.record_event(self.device.ended)
        return tuple(outputs)


def _facts(item: Any) -> object:
    """What must be equal for two calls to have one graph."""
    if isinstance(item, Tensor):
        return (item.shape, item.stride(), item.dtype, item.device)
    return item if isinstance(item, int | float | str | None) else id(item)


def _uncapturable(program: StreamProgram, error: BaseException) -> BaseException:
    own = failed(program, error)
    if not isinstance(own, RunError) or isinstance(error, WeftError):
        return own
    where = program.plan.steps[own.step].label if own.step is not None else "the plan"
    text = f"graphs: {where} cannot be captured: {error} Mark it with graph=False, or compile the "
    text += "model without graphs."
    return RunError(text, story=own.story, lane=own.lane, step=own.step)


class Pads:
    """How the calls of one graph are filled up. `refused`: why they are not; empty if they are.

    Rows that only fill must not be seen by the others, and must not be written anywhere: graphs
    whose ops look across rows or draw numbers, or that change an input in place, are not padded.
    """

    def __init__(self, graph: Graph, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.inputs = [_batched(graph.value[name]) for name in graph.inputs]
        self.outputs = [_batched(graph.value[name]) for name in graph.outputs]
        self.refused = _refusal(graph)

    def size(self, rows: int) -> int:
        """The next size that holds so many rows; beyond the largest, and for none, `rows`."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if rows > 0 and at < len(self.sizes) else rows

    def rows(self, inputs: Sequence[Any]) -> int:
        """How many rows a call has; where calls are not padded, too many to be filled up."""
        for value, item in zip(self.inputs, inputs, strict=True):
            if value is not None and (inner := _inner(value)):
                return int(item.shape[value.batch.dim]) // (_outer(value) * inner)
        return sys.maxsize

    def fill(self, inputs: Sequence[Any], rows: int, size: int) -> list[Any]:
        """The inputs with `size` rows: their last row is repeated."""
        filled = []
        for value, item in zip(self.inputs, inputs, strict=True):
            if value is not None:
                index = torch.arange(size, device=item.device).clamp_(max=rows - 1)
                item = rows_at(item, value.batch, rows, index)
            filled.append(item)
        return filled

    def take(self, outputs: Sequence[Any], rows: int, size: int) -> tuple[Any, ...]:
        """The rows of the outputs that the caller asked for."""
        taken = []
        for value, item in zip(self.outputs, outputs, strict=True):
            if value is not None and isinstance(item, torch.Tensor):
                item = taker(value)(item, size, 0, rows)
                item = item if item.is_contiguous() else item.clone()
            taken.append(item)
        return tuple(taken)


def _refusal(graph: Graph) -> str:
    for op in graph.ops:
        if op.rows not in ("row-wise", "batch-free"):
            return f"graphs: calls are not padded, for op {op.name!r} is {op.rows}"
    if written := sorted(graph.mutated & set(graph.inputs)):
        return f"graphs: calls are not padded, for input {written[0]!r} is changed in place"
    inputs = [v for name in graph.inputs if (v := _batched(graph.value[name])) is not None]
    if not any(_inner(value) for value in inputs) or not all(_outer(v) for v in inputs):
        return "graphs: calls are not padded, for no input tells how many rows there are"
    return ""


def _batched(value: Value) -> Any:
    return value if value.batch is not None and value.dtype != "opaque" else None


def _outer(value: Any) -> int:
    return value.batch.outer.constant or 0


def _inner(value: Any) -> int:
    return value.batch.inner.constant or 0
