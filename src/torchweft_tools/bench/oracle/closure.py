"""The closure: for each event (the start or the end of a step) all events that come before it.

1. Run the plans once, each lane as far as it can go: this shows a deadlock, or gives an order of
   all events and, with it, which collective of one rank met which of another.
2. From the events before an event, in that order, follow the set of all that precede it.
3. Conflicting actions must be ordered, end before start; collectives of one communicator on one
   rank start before start. If they are, every other run meets the same partners: the first
   event that differed would be a start that overtakes one which precedes it.
4. So all orders have the same effect; perform the actions in the order of the first run and look.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torchweft_tools.bench.oracle.content import Action, Cell, OracleTalk, UnsafeError, perform
from torchweft_tools.bench.oracle.reading import Reading

Event = tuple[int, int, bool]  # rank, step, whether it is the end
Met = tuple[Event, str, OracleTalk]


def close(readings: Sequence[Reading]) -> None:
    """Judge plans by the closure of their events. Raises `UnsafeError` if they are not safe."""
    first_run = _FirstRun(readings)
    order = first_run.run()
    before = _precede(first_run, order)
    for reading in readings:
        for one, two in _conflicts(reading):
            if not (before(_end(one), _start(two)) or before(_end(two), _start(one))):
                raise UnsafeError(f"race: {one.label} and {two.label} are not ordered")
        for one, two in reading.edges:
            if not before(_end(one), _start(two)):
                raise UnsafeError(f"edge: {two.label} may begin before {one.label} has ended")
    for met in first_run.arrivals.values():
        for (earlier, its_label, _), (later, label, _) in pairwise(met):
            if earlier != later and not before(earlier, later):
                raise UnsafeError(f"collectives {its_label} and {label} are not ordered")
    contents = [dict(reading.first) for reading in readings]
    for rank, at, is_end in order:
        action = first_run.begins.get((rank, at))
        if action is not None and not is_end:
            perform(action, contents[rank], readings[rank].overlaps)
    for reading, content in zip(readings, contents, strict=True):
        reading.check_last(content)


def _start(action: Action) -> Event:
    return action.rank, action.first, False


def _end(action: Action) -> Event:
    return action.rank, action.last, True


class _FirstRun:
    """One run of all lanes, each as far as it can go, in turn."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.readings = readings
        self.begins = {(a.rank, a.first): a for reading in readings for a in reading.actions}
        self.ends = {(a.rank, a.last): a for reading in readings for a in reading.actions}
        self.arrivals: dict[tuple[int, tuple[str | int, ...]], list[Met]] = {}
        self.number: dict[int, int] = {}  # of a talk, by identity, among those of its key
        self.lanes: list[list[tuple[int, int]]] = []
        for reading in readings:
            lanes: dict[str, list[tuple[int, int]]] = {}
            for at, step in enumerate(reading.plan.steps):
                lanes.setdefault(step.lane, []).append((reading.rank, at))
            self.lanes += lanes.values()

    def run(self) -> list[Event]:
        """All events in an order in which they can happen."""
        order: dict[Event, None] = {}
        waiting = [list(reversed(lane)) for lane in self.lanes]
        progress = True
        while progress:
            progress = False
            for lane in waiting:
                while lane:
                    rank, at = lane[-1]
                    if (rank, at, False) not in order:
                        if any(event not in order for event in self.opens(rank, at)):
                            break
                        order[rank, at, False] = None
                        self.arrive(rank, at)
                        progress = True
                    if any(event not in order for event in self.needs(rank, at)):
                        break
                    order[rank, at, True] = None
                    lane.pop()
                    progress = True
        if any(waiting):
            rank, at = next(lane[-1] for lane in waiting if lane)
            label = self.readings[rank].plan.steps[at].label
            raise UnsafeError(f"deadlock: {label} on rank {rank} never ends")
        return list(order)

    def arrive(self, rank: int, at: int) -> None:
        action = self.begins.get((rank, at)) or self.ends.get((rank, at))
        for talk in action.talks_of(at) if action is not None else ():
            met = self.arrivals.setdefault((rank, talk.key), [])
            self.number[id(talk)] = len(met)
            met.append(((rank, at, False), action.label, talk))  # type: ignore[union-attr]

    def opens(self, rank: int, at: int) -> list[Event]:
        """The events before the start of a step, apart from those of its lane."""
        issue = self.readings[rank].opens(at, self.ends.get((rank, at)))
        return [] if issue is None else [(rank, issue, True)]

    def needs(self, rank: int, at: int) -> list[Event]:
        """The events before the end of a step, apart from its own start.

        A partner that has not arrived yet is an event that never happens.
        """
        reading, events = self.readings[rank], []
        target = reading.waits.get(at, reading.issues.get(at))
        if target is not None:
            events.append((rank, target, True))
        action = self.ends.get((rank, at))
        if action is None or len(self.readings) == 1:
            return events
        talks = action.talks + action.late
        if any(id(talk) not in self.number for talk in talks):
            return [*events, (rank, -1, True)]
        return events + [self.partner(rank, talk, m) for talk in talks for m in talk.members]

    def partner(self, rank: int, talk: OracleTalk, member: int) -> Event:
        if rank not in talk.members:
            raise UnsafeError(f"{talk.key}: rank {rank} is not a member")
        theirs = self.arrivals.get((member, talk.key), [])
        if len(theirs) <= self.number[id(talk)]:
            return member, -1, True
        event, _, other = theirs[self.number[id(talk)]]
        if other.facts != talk.facts:
            raise UnsafeError(
                f"{talk.key}: ranks {rank} and {member} talk of {talk.facts}, {other.facts}"
            )
        return event


class _Before:
    def __init__(self, numbers: dict[Event, int], sets: list[int]) -> None:
        self.numbers, self.sets = numbers, sets

    def __call__(self, one: Event, two: Event) -> bool:
        return bool(self.sets[self.numbers[two]] >> self.numbers[one] & 1)


def _precede(first_run: _FirstRun, order: list[Event]) -> _Before:
    """The relation "comes before in every run", as one bit set per event."""
    numbers = {event: number for number, event in enumerate(order)}
    previous = {}
    for lane in first_run.lanes:
        for (rank, at), (_, after) in pairwise(lane):
            previous[rank, after] = (rank, at, True)
    sets: list[int] = []
    for rank, at, is_end in order:
        if is_end:
            direct = [(rank, at, False), *first_run.needs(rank, at)]
        else:
            direct = [previous[rank, at]] if (rank, at) in previous else []
            direct += first_run.opens(rank, at)
        bits = 0
        for event in direct:
            bits |= sets[numbers[event]] | 1 << numbers[event]
        sets.append(bits)
    return _Before(numbers, sets)


def _conflicts(reading: Reading) -> dict[tuple[Action, Action], None]:
    """All pairs of actions that touch overlapping bytes, not both only reading."""
    touching: dict[Cell, list[Action]] = {}
    for action in reading.actions:
        for cell in action.touches:
            touching.setdefault(cell, []).append(action)
    pairs: dict[tuple[Action, Action], None] = {}
    for action in reading.actions:
        for cell in action.writes:
            for near in (cell, *reading.overlaps.get(cell, ())):
                for other in touching.get(near, ()):
                    if other is not action:
                        pairs[action, other] = None
    return pairs
