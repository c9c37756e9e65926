"""The stream program: a dispatch as straight-line Python for one host thread.

    def lane0(x, z, c, e, q, s, b):
        (v0, v1,) = x                          the inputs, the sizes, the borders: as on a CPU
        (q0, q1,) = q                          the streams; q0 is the caller's
        (v3_0_1,) = f0(v0_0_1, v1)             on q0, which is current when the call starts
        q0.record_event(e[0])                  somebody waits for this item
        q1.wait_event(e[0])
        on(q1)                                 what follows goes to another stream
        v3_0_1.record_stream(q1)               made on q0, used here: its bytes are not given to
        h4_0_1 = i4(v3_0_1)                    others before q1 is through with it
        q1.record_event(e[1])
        m7 = nm5_0(z[0], z[1])                 room for a whole value, ahead of the first part of it
        ...
        on(q0)
        q0.wait_event(e[5])                    the end: all streams are joined
        return (v9,)

There is one function a segment (one in all, unless some ops must not be captured). Nothing here
waits for the device: the host runs ahead, and streams wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from torchweft.plan.plan import Plan, Step
from torchweft.run.accelerator.dispatch import Dispatch, Item, copies, dispatch
from torchweft.run.program import Body, Delay, Program, failure_of, step_of
from torchweft.run.writer import Writer

LANDED = -1
"""Whose bytes a value has that a two-phase op made: those of one of two streams."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamProgram(Program):
    """A program whose functions are the segments of a dispatch; its plan is in host order."""

    dispatch: Dispatch


def compile_streams(
    plan: Plan,
    bodies: Mapping[str, Body],
    *,
    graphs: bool = False,
    traced: bool = False,
    jitter: Delay = False,
) -> StreamProgram:
    """Turn a plan into Python functions for one host thread. The plan should have been verified.

    graphs: functions are cut so that all but those of bodies with `graph=False` can be captured.
    traced, jitter: as for `compile_program`; the delays are the host's.
    """
    alone = [name for name, body in bodies.items() if not getattr(body, "graph", True)]
    given = dispatch(plan, alone=alone if graphs else ())
    return write_streams(given, bodies, traced=traced, jitter=jitter)


def write_streams(
    given: Dispatch, bodies: Mapping[str, Body], *, traced: bool = False, jitter: Delay = False
) -> StreamProgram:
    """The program of a dispatch."""
    program = _StreamWriter(given, bodies, traced, jitter).program()
    return StreamProgram(**vars(program), dispatch=given)


def keep(flight: Any, stream: Any) -> None:
    """Note that a stream uses all tensors of a flight, whose bytes another stream asked for."""
    if isinstance(flight, Tensor):
        flight.record_stream(stream)
    elif isinstance(flight, tuple | list):
        for item in flight:
            keep(item, stream)
    elif is_dataclass(flight):
        for spec in fields(flight):
            keep(getattr(flight, spec.name), stream)


def failed(program: StreamProgram, error: BaseException) -> BaseException:
    """The error that the caller sees, with the last step that each lane was given."""
    steps, at = program.plan.steps, step_of(program, error)
    begun = range(at if at is not None else len(steps))
    stands = [
        max((i for i in begun if steps[i].lane == lane), default=-1) for lane in program.lanes
    ]
    lane = steps[at].lane if at is not None else program.lanes[0]
    return failure_of(program, lane, error, stands)


class _StreamWriter(Writer):
    """One function a segment, all lanes in it. `made_on`: the stream whose bytes a variable has."""

    threads = False
    parameters = "x, z, c, e, q, s, b, on, now"

    def __init__(
        self, given: Dispatch, bodies: Mapping[str, Body], traced: bool, jitter: Delay
    ) -> None:
        super().__init__(given.plan, bodies, traced, jitter)
        self.given, self.num_functions, self.current = given, len(given.segments), 0
        self.ends = {segment.items[-1] for segment in given.segments}
        self.space["keep"] = keep
        self.used: list[str] = []
        self.made_on: dict[str, int] = {}
        self.users_of: dict[str, set[int]] = {}

    def _head(self) -> list[str]:
        streams = [f"q{number}" for number in range(len(self.given.streams))]
        return [*super()._head(), f"({', '.join(streams)},) = q"]

    def _entries(self) -> Iterator[tuple[int | None, list[str]]]:
        self.current = 0
        for at in self.given.segments[self.lane].items:
            item = self.given.items[at]
            yield item.step, self._item(at, item)

    def _tail(self) -> list[str]:
        """The last function gives the outputs, which the caller's stream uses from now on."""
        if self.lane < self.num_functions - 1:
            return []
        self.used = []
        outputs = self._outputs()
        return [*self._switch(0), *self._notes(0), f"return {outputs}"]

    def _item(self, at: int, item: Item) -> list[str]:
        """An item as source lines: waits, the step, an event if somebody waits for it."""
        stream, events = item.stream, self.given.events
        lines = [f"q{stream}.wait_event(e[{events[wait]}])" for wait in item.waits]
        if item.step is not None and item.opens:
            lines += self._opened(self.plan.steps[item.step], stream)
        elif item.step is not None:
            lines += self._step(item.step, self.plan.steps[item.step], stream)
        elif at in self.ends:
            lines += self._switch(0)
        if at in events:
            lines.append(f"q{stream}.record_event(e[{events[at]}])")
        return lines

    def _step(self, index: int, step: Step, stream: int) -> list[str]:
        self.used = []
        body = self._body(step)
        if step.kind == "free":
            for name in self.used:
                self.made_on.pop(name, None)
            return body
        notes = self._notes(stream)
        if step.kind == "complete":  # which lets the flight go
            flight = next(name for name in self.used if name[0] == "h")
            notes.append(f"keep({{{flight}}}, q{stream})")
        self._made(step, stream)
        if self.traced:
            body = [f"m = now(q{stream})", *body, f"s.append(({index}, m, now(q{stream})))"]
        return [*self._delay(step), *(self._switch(stream) if body else []), *notes, *body]

    def _rooms(self, step: Step) -> list[str]:
        return []  # an item of their own has made them

    def _opened(self, step: Step, stream: int) -> list[str]:
        """The rooms that a step and others of its op write into, with bytes of this stream."""
        self.used = []
        lines, users = super()._rooms(step), {stream}
        for variable in dict.fromkeys(self.used):
            if variable[0] == "m":  # the whole values that follow are views of it, with its notes
                users = {stream}
            self.made_on[variable], self.users_of[variable] = stream, users
        return [*self._switch(stream), *lines]

    def _switch(self, stream: int) -> list[str]:
        if stream == self.current:
            return []
        self.current = stream
        return [f"on(q{stream})"]

    # Bytes: they belong to the stream that asked for them; others that use them are noted.

    def _use(self, variable: str) -> str:
        self.used.append(variable)
        return super()._use(variable)

    def _notes(self, stream: int) -> list[str]:
        """Notes that this stream uses bytes of others. An alias has the notes of its root."""
        lines = []
        for name in dict.fromkeys(self.used):
            if self.made_on.get(name, stream) != stream and stream not in self.users_of[name]:
                self.users_of[name].add(stream)
                lines.append(f"{{{name}}}.record_stream(q{stream})")
        return lines

    def _made(self, step: Step, stream: int) -> None:
        made = set(step.names) if step.kind == "copy" else set()
        if step.kind in ("run", "complete"):
            made = {name for op in step.names for name in self.graph.op[op].makes}
        if step.kind == "split" and copies(self.graph, step):
            self.made_on |= dict.fromkeys(self.used, stream)
            self.users_of |= {variable: {stream} for variable in self.used}
        for variable in dict.fromkeys(self.used):
            placed = step.kind == "copy" and variable in self.made_on
            if not placed and self._value_of(variable) in made:
                # What lands may have come with the issue, on that stream, or with the complete.
                self.made_on[variable] = LANDED if step.kind == "complete" else stream
                self.users_of[variable] = {stream}

    def _value_of(self, variable: str) -> str | None:
        """The value that a variable holds a piece of; None if it has no bytes of the program's."""
        if variable[0] not in "vp":
            return None
        value = self.graph.values[int(variable[1:].split("_")[0])]
        return None if value.name in self.graph.inputs or value.dtype == "opaque" else value.name
