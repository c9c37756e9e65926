"""The `Dispatch`: how one host thread hands the steps of a plan to the streams of a device.

    plan --dispatch--> items in host order, each on a stream, behind the items it waits for

    start                      the caller's stream, behind all that the caller has put on it
    attn0[0]    on compute
    reduce0[0]  on network     behind attn0[0]
    end                        the caller's stream, behind the last item of every stream

Stream 0 is the caller's. The plan's first lane runs on it, unless it has a priority or an SM budget
of its own; every other lane, also one without a thread, has a stream. An item that another stream
waits for leaves an event. A wait that a clock or another wait tells already is left out, as `lower`
does for lanes. To wait for an event that was not recorded yet is to wait for nothing; a plan that
was lowered has every wait behind its event.

The bytes of a room belong to the stream that asks for them. Parts that write into one room may be
on several streams: an item ahead of the first of them asks, and the other streams wait for it.

`alone`: ops that no device graph may hold. The dispatch then falls into segments; a step of such an
op has one for itself, and each segment starts and ends on stream 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torchweft.plan.graph import Graph
from torchweft.plan.machine import Lane
from torchweft.plan.plan import Plan, Step

WORK = ("run", "issue", "complete", "copy")


class Item(NamedTuple):
    """One thing put on a stream: a step, or the start or end of a segment (`step` is None).

    waits: the items, by number, whose events its stream waits for first.
    opens: not the step itself, but the rooms that it is the first to write into.
    """

    stream: int
    step: int | None = None
    waits: tuple[int, ...] = ()
    opens: bool = False


class Segment(NamedTuple):
    """Items from a start to an end, and whether a device graph may hold them."""

    items: range
    captured: bool


@dataclass(frozen=True)
class Dispatch:
    """A plan's steps as items on streams. `plan` has its steps in host order.

    clocks: for each item how far every stream is known to be behind it; empty for one without work.
    """

    plan: Plan
    streams: tuple[Lane | None, ...]
    items: tuple[Item, ...]
    segments: tuple[Segment, ...]
    clocks: tuple[Mapping[int, int], ...]

    @cached_property
    def events(self) -> Mapping[int, int]:
        """The items that leave an event, each with the number of its event."""
        awaited = sorted({wait for item in self.items for wait in item.waits})
        return {item: number for number, item in enumerate(awaited)}


def dispatch(plan: Plan, *, alone: Collection[str] = (), one_stream: bool = False) -> Dispatch:
    """The dispatch of a plan as `lower` leaves it, every wait behind what it waits for.

    one_stream: all of it is put on the caller's stream.
    """
    return _Dispatcher(landed(plan, alone), alone, one_stream).dispatch()


def landed(plan: Plan, alone: Collection[str]) -> Plan:
    """The plan with nothing in flight where a segment ends: completes are moved up to there."""
    ends = {step.label: step for step in plan.steps if step.kind == "complete"}
    flying: dict[str, Step] = {}
    steps: list[Step] = []
    for step in plan.steps:
        if step.kind == "complete" and flying.pop(step.label, None) is None:
            continue  # it was moved up
        if _is_apart(step, alone):
            steps += flying.values()
            flying = {}
        steps.append(step)
        if step.kind == "issue":
            end = ends[step._replace(kind="complete").label]
            if _is_apart(step, alone):
                steps.append(end)
            else:
                flying[end.label] = end
    return plan if tuple(steps) == plan.steps else replace(plan, steps=tuple(steps))


def _is_apart(step: Step, alone: Collection[str]) -> bool:
    return step.kind in ("run", "issue") and any(op in alone for op in step.names)


def copies(graph: Graph, step: Step) -> bool:
    """Whether a split copies: rows that lie inside an outer dim are no view of the whole."""
    batch = graph.value[step.names[0]].batch
    return batch is not None and batch.outer.constant != 1


class _Dispatcher:
    """Puts the steps of a plan on streams, one after another."""

    def __init__(self, plan: Plan, alone: Collection[str], one_stream: bool) -> None:
        self.plan, self.alone, self.one_stream = plan, alone, one_stream
        self.items: list[Item] = []
        self.segments: list[Segment] = []
        self.clocks: list[dict[int, int]] = []  # by item: how far each stream is known to be
        self.now: dict[int, dict[int, int]] = {}
        self.last: dict[int, int] = {}
        self.by_label: dict[str, list[int]] = {}
        self.owed: dict[str, list[int]] = {}  # by lane: what its next item has to wait for
        self.rooms: dict[str, int] = {}  # by value: the item that asked for the bytes of its place
        self.direct = {place.value for place in plan.places} - plan.copied
        self.streams: list[Lane | None] = [None]
        self.stream_of: dict[str, int] = {}
        for step in plan.steps:
            for name in (step.lane, step.on if step.kind == "issue" else None):
                if name is not None and name not in self.stream_of:
                    self._open(plan.lane[name])

    def _open(self, lane: Lane) -> None:
        """A stream for a lane; the first gets the caller's if any stream will do for it."""
        first = not self.stream_of and not lane.priority and lane.num_sms is None
        if first or self.one_stream:
            self.stream_of[lane.name] = 0
        else:
            self.stream_of[lane.name] = len(self.streams)
            self.streams.append(lane)

    def dispatch(self) -> Dispatch:
        """All items, segment by segment."""
        first = self._put(None, 0, [])
        for index, step in enumerate(self.plan.steps):
            apart = _is_apart(step, self.alone)
            if apart and len(self.items) > first + 1:
                first = self._cut(first, captured=True)
            self._step(index, step)
            if apart and step.kind == "issue":  # landed() has put its complete right behind it
                continue
            lands = step.kind == "complete" and any(op in self.alone for op in step.names)
            if apart or lands:
                first = self._cut(first, captured=False)
        self._end(first, captured=True)
        made = (self.streams, self.items, self.segments, self.clocks)
        return Dispatch(self.plan, *map(tuple, made))  # type: ignore[arg-type]

    def _cut(self, first: int, *, captured: bool) -> int:
        self._end(first, captured=captured)
        return self._put(None, 0, [])

    def _end(self, first: int, *, captured: bool) -> None:
        """The end of a segment: every stream is joined."""
        tails = [at for stream, at in self.last.items() if stream and at > first]
        end = self._put(None, 0, tails)
        items = range(first, end + 1)
        steps = [self.items[at].step for at in items]
        works = any(s is not None and self._works(self.plan.steps[s]) for s in steps)
        self.segments.append(Segment(items, captured and works))

    def _step(self, index: int, step: Step) -> None:
        """Put a step on its stream, behind what its lane owes and what its kind asks for."""
        stream = self.stream_of[step.lane]
        here = [self.last[stream]] if stream in self.last else []
        if step.target is not None:
            self.owed.setdefault(step.lane, []).extend(self.by_label[step.target])
            return
        needs = list(self.owed.get(step.lane, ()))
        if not self._works(step):  # the device does nothing: who waits for it, waits for its lane
            self.by_label.setdefault(step.label, here + needs)
            self.items.append(Item(stream, index))
            self.clocks.append({})
            return
        if step.kind == "issue":  # lane order counts for the start of what another stream does
            assert step.on is not None, "an issue names a lane"
            needs, stream = needs + here, self.stream_of[step.on]
        else:
            self.owed.pop(step.lane, None)
        if step.kind == "complete":
            needs += self.by_label[step._replace(kind="issue").label]
        # Bytes come from the stream that asked for them, which may still use them otherwise.
        if step.kind == "copy":
            needs.append(self.rooms.setdefault(step.names[0], len(self.items)))
        if step.kind == "run" and step.parts is not None:
            makes = self.direct.intersection(self.plan.graph.op[step.names[0]].makes)
            if not makes <= self.rooms.keys():  # ahead of the first part, or others wait for that
                self.rooms |= dict.fromkeys(makes, self._put(index, stream, [], opens=True))
            needs += [self.rooms[name] for name in makes]
        self.by_label.setdefault(step.label, []).append(self._put(index, stream, needs))

    def _works(self, step: Step) -> bool:
        """Whether the device has something to do for a step."""
        return step.kind in WORK or (step.kind == "split" and copies(self.plan.graph, step))

    def _put(self, step: int | None, stream: int, needs: list[int], *, opens: bool = False) -> int:
        """Append an item that waits for those of its needs that nothing else tells."""
        number = len(self.items)
        start = self.segments[-1].items.stop if self.segments else 0
        if number > start and self.last.get(stream, -1) < start:
            needs = [*needs, start]  # the first on this stream: it starts where the caller stands
        clock = dict(self.now.get(stream, {}))
        needs = [n for n in dict.fromkeys(needs) if n < number and not self._knows(clock, n)]
        told = [n for n in needs if any(self._knows(self.clocks[o], n) for o in needs if o != n)]
        waits = tuple(sorted(n for n in needs if n not in told))
        for wait in waits:
            for other, count in self.clocks[wait].items():
                clock[other] = max(clock.get(other, -1), count)
        clock[stream] = number
        self.items.append(Item(stream, step, waits, opens))
        self.clocks.append(clock)
        self.now[stream], self.last[stream] = clock, number
        return number

    def _knows(self, clock: Mapping[int, int], item: int) -> bool:
        """Whether an item is over by a clock; clocks count items by their numbers."""
        return clock.get(self.items[item].stream, -1) >= item
