"""The stream program: a dispatch as straight-line Python for one host thread.

    def lane0(x, z, c, e, q, s, b):
        (v0, v1,) = x                          the inputs, the sizes, the borders: as on a CPU
        (q0, q1,) = q                          the streams; q0 is the caller's
        (v3_0_1,) = f0(v0_0_1, v1)             on q0, which is current when the call starts
        q0.record_event(e[0])                  somebody waits for this item
        q1.wait_event(e[0])
        on(q1)                                 what follows goes to another stream
        h4_0_1 = i4(v3_0_1)                    made on q0, used here: kept until q0 waits for this
        q1.record_event(e[1])
        m7 = nm5_0(z[0], z[1])                 room for a whole value, ahead of the first part of it
        ...
        on(q0)
        q0.wait_event(e[5])                    the end: all streams are joined
        keep(v8, q0)                           bytes of q1 that q0 uses: not to be given to others
        return (v9,)

There is one function a segment (one in all, unless some ops must not be captured). Nothing here
waits for the device: the host runs ahead, and streams wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor

from torchweft.plan.plan import Plan, Step
from torchweft.run.accelerator.dispatch import Dispatch, Item, copies, dispatch
from torchweft.run.program import Body, Delay, Program, failure_of, step_of
from torchweft.run.writer import Writer


@dataclass(frozen=True)
class Bytes:
    """What a variable holds: the streams of which one has asked for it, and each one's last use."""

    owners: set[int]
    uses: dict[int, int] = field(default_factory=dict)


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
    one_stream: bool = False,
) -> StreamProgram:
    """Turn a plan into Python functions for one host thread. The plan should have been verified.

    graphs: functions are cut so that all but those of bodies with `graph=False` can be captured.
    one_stream: all lanes are put on the caller's stream.
    traced, jitter: as for `compile_program`; the delays are the host's.
    """
    alone = [name for name, body in bodies.items() if not getattr(body, "graph", True)]
    given = dispatch(plan, alone=alone if graphs else (), one_stream=one_stream)
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
    """One function a segment, all lanes in it.

    Bytes belong to the stream that asked for them: what it asks for next may get them as soon as
    the host lets go of them. So a variable is let go where its owners are known to be behind every
    stream that uses it. What is left at the end of a call is noted with the allocator instead.
    """

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
        self.bytes: dict[str, Bytes] = {}
        self.clocks: dict[int, Mapping[int, int]] = {}
        self.leaving: list[list[str]] = []  # what is let go together, as soon as that is safe

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
        for variable in self.used:
            if variable in self.bytes:
                self.bytes[variable].uses[0] = len(self.given.items)
        whole = {self._root(variable) for variable in self.bytes if "_" not in variable}
        # Parts of a value that is nowhere whole have each their own.
        shared: dict[str, list[str]] = {}
        for variable in self.bytes:
            root = self._root(variable)
            part = "" if root in whole else variable.partition("_")[2]
            shared.setdefault(f"{root} {part}", []).append(variable)
        notes = [line for variables in shared.values() for line in self._notes(variables)]
        return [*self._switch(0), *notes, f"return {outputs}"]

    def _item(self, at: int, item: Item) -> list[str]:
        """An item as source lines: waits, the step, an event if somebody waits for it."""
        stream, events = item.stream, self.given.events
        lines = [f"q{stream}.wait_event(e[{events[wait]}])" for wait in item.waits]
        if self.given.clocks[at]:
            self.clocks[stream] = self.given.clocks[at]
        if item.step is not None and item.opens:
            lines += self._opened(at, self.plan.steps[item.step], stream)
        elif item.step is not None:
            lines += self._step(at, item.step, self.plan.steps[item.step], stream)
        elif at in self.ends:
            lines += self._switch(0)
        if at in events:
            lines.append(f"q{stream}.record_event(e[{events[at]}])")
        return lines + self._let_go(all_of_it=at in self.ends)

    def _step(self, at: int, index: int, step: Step, stream: int) -> list[str]:
        self.used = []
        body = self._body(step)
        self._note(at, step, stream)
        if self.traced and step.kind != "free":
            body = [f"m = now(q{stream})", *body, f"s.append(({index}, m, now(q{stream})))"]
        return [*self._delay(step), *(self._switch(stream) if body else []), *body]

    def _rooms(self, step: Step) -> list[str]:
        return []  # an item of their own has made them

    def _opened(self, at: int, step: Step, stream: int) -> list[str]:
        """The rooms that a step and others of its op write into, with bytes of this stream."""
        self.used = []
        lines, room = super()._rooms(step), Bytes({stream}, {stream: at})
        for variable in dict.fromkeys(self.used):
            if variable[0] == "m":  # the whole values that follow are views of it
                room = Bytes({stream}, {stream: at})
            self.bytes[variable] = room
        return [*self._switch(stream), *lines]

    def _switch(self, stream: int) -> list[str]:
        if stream == self.current:
            return []
        self.current = stream
        return [f"on(q{stream})"]

    def _use(self, variable: str) -> str:
        self.used.append(variable)
        return super()._use(variable)

    def _note(self, at: int, step: Step, stream: int) -> None:
        """Note whose bytes the variables of a step hold, and that its stream uses them."""
        used = dict.fromkeys(self.used)
        made = set(step.names) if step.kind == "copy" else set()
        if step.kind in ("run", "complete"):
            made = {name for op in step.names for name in self.graph.op[op].makes}
        if step.kind == "split" and copies(self.graph, step):
            self.bytes |= {variable: Bytes({stream}) for variable in used}
        # A flight holds what it is given, and a result may be its input, or a view of it, although
        # nobody has said so: whoever owns what was read may own what was made.
        owners = {stream}.union(*(self.bytes[each].owners for each in used if each in self.bytes))
        for variable in used:
            if variable[0] == "h" and step.kind == "issue":
                self.bytes[variable] = Bytes(owners)
            placed = step.kind == "copy" and variable in self.bytes
            if not placed and self._value_of(variable) in made:
                self.bytes[variable] = Bytes({stream} if step.kind == "copy" else owners)
        for variable in used if step.kind != "free" else ():
            if variable in self.bytes:
                self.bytes[variable].uses[stream] = at

    def _add(self, target: str, term: str) -> list[str]:
        """The sum takes the place of a value whose bytes another stream may own."""
        variable = target[1:-1]
        before = f"w{len(self.users)}_{variable}"
        if variable not in self.bytes:
            return super()._add(target, term)
        held = self.bytes[variable]
        self.bytes[before] = Bytes(set(held.owners), dict(held.uses))
        line = f"{self._use(before)} = {target}"
        return [line, *super()._add(target, term), *self._drop(f"{{{before}}}")]

    # Letting go.

    def _drop(self, *variables: str) -> list[str]:
        self.leaving.append([variable[1:-1] for variable in variables])  # as `_use` wrote them
        return []

    def _let_go(self, *, all_of_it: bool) -> list[str]:
        """What can be let go now: its owners are behind all its uses, or learn of them by notes."""
        waiting, self.leaving = self.leaving, []
        lines: list[str] = []
        for variables in waiting:
            if self._unknown(variables) and not all_of_it:
                self.leaving.append(variables)
                continue
            lines += self._notes(variables)
            for variable in variables:
                held, root = self.bytes.pop(variable, Bytes(set())), self._root(variable)
                for other, near in self.bytes.items():
                    if self._root(other) == root:  # which may still show the same bytes
                        near.uses.update(
                            {s: max(at, near.uses.get(s, at)) for s, at in held.uses.items()}
                        )
                lines.append(f"{super()._use(variable)} = None")
        return lines

    def _unknown(self, variables: Iterable[str]) -> set[int]:
        """The streams whose use of some bytes is not known to be over by all of their owners."""
        held = [self.bytes[variable] for variable in variables if variable in self.bytes]
        return {
            stream
            for each in held
            for stream, at in each.uses.items()
            for owner in {owner for other in held for owner in other.owners} - {stream}
            if self.clocks.get(owner, {}).get(stream, -1) < at
        }

    def _notes(self, variables: Sequence[str]) -> list[str]:
        """Notes with the allocator of the uses that the owners of some bytes do not know of."""
        held = [super(_StreamWriter, self)._use(v) for v in variables if v in self.bytes]
        unknown = sorted(self._unknown(variables))
        return [f"keep({each}, q{stream})" for stream in unknown for each in held]

    def _root(self, variable: str) -> str:
        """What the bytes of a variable are known by: the root of its value; a flight is its own."""
        if variable[0] not in "vpm":
            return variable
        return self.graph.root[self.graph.values[int(variable[1:].split("_")[0])].name]

    def _value_of(self, variable: str) -> str | None:
        """The value that a variable holds a piece of; None if it has no bytes of the program's."""
        if variable[0] not in "vp":
            return None
        value = self.graph.values[int(variable[1:].split("_")[0])]
        return None if value.name in self.graph.inputs or value.dtype == "opaque" else value.name
