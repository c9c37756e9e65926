"""Interleavings: every order in which lanes can begin and end their steps, one after another.

A state says for each lane of each rank how far it is: `2 * steps ended + 1 if one is running`.
From each state every event that can happen is tried:

    begin the next step of a lane     always (but a complete that talks: when its issue has ended);
                                      if another step holds its bytes, that is a race
    end the running step of a lane    a wait: its target has ended; a complete: its issue has ended;
                                      a collective: the k-th of this rank has begun on all members

The effects of an action happen when it begins, and it holds its bytes until it ends, so no other
step sees what it reads or writes in between. States are remembered: one that is reached in two ways
with different contents, or with another order of collectives, is a race too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torchweft_tools.bench.oracle.content import (
    Action,
    Content,
    OracleTalk,
    UnsafeError,
    conflict,
    perform,
)
from torchweft_tools.bench.oracle.reading import Reading

Positions = tuple[int, ...]
Arrivals = dict[tuple[int, tuple[str | int, ...]], tuple[tuple[str, OracleTalk], ...]]


@dataclass(frozen=True)
class _Moment:
    """Where all lanes are, what every rank's cells hold, and which collectives have begun."""

    positions: Positions
    contents: tuple[Content, ...]
    arrivals: Arrivals


class TooManyError(Exception):
    """There are more states than were allowed."""


def count_bound(readings: Sequence[Reading]) -> int:
    """No plan of these lane lengths has more states than this."""
    return prod(2 * len(steps) + 1 for steps in _StateSearch(readings).threads)


def search(readings: Sequence[Reading], max_states: int) -> None:
    """Try all interleavings. Raises `UnsafeError` at a bad one, `TooManyError` above max_states."""
    _StateSearch(readings).run(max_states)


class _StateSearch:
    def __init__(self, readings: Sequence[Reading]) -> None:
        self.readings = readings
        self.threads: list[list[tuple[int, int]]] = []  # each thread's steps, as (rank, step)
        self.where: dict[tuple[int, int], tuple[int, int]] = {}  # (rank, step): thread, position
        self.begins: dict[tuple[int, int], Action] = {}
        self.ends: dict[tuple[int, int], Action] = {}
        for reading in readings:
            steps = reading.plan.steps
            for lane in dict.fromkeys(step.lane for step in steps):
                thread = [(reading.rank, at) for at, step in enumerate(steps) if step.lane == lane]
                for position, key in enumerate(thread):
                    self.where[key] = (len(self.threads), position)
                self.threads.append(thread)
            for action in reading.actions:
                self.begins[action.rank, action.first] = action
                self.ends[action.rank, action.last] = action

    def run(self, max_states: int) -> None:
        contents = tuple(dict(reading.first) for reading in self.readings)
        todo = [_Moment((0,) * len(self.threads), contents, {})]
        seen = {todo[0].positions: todo[0]}
        while todo:
            moment = todo.pop()
            nexts = self.nexts(moment)
            if not nexts:
                self.check_end(moment)
            for later in nexts:
                before = seen.get(later.positions)
                if before is None:
                    seen[later.positions] = later
                    todo.append(later)
                elif before != later:
                    raise UnsafeError("the order of two steps is left to chance, and it matters")
            if len(seen) > max_states:
                raise TooManyError

    def check_end(self, moment: _Moment) -> None:
        for thread, position in zip(self.threads, moment.positions, strict=True):
            if position < 2 * len(thread):
                rank, at = thread[position // 2]
                step = self.readings[rank].plan.steps[at]
                raise UnsafeError(f"deadlock: {step.label} on rank {rank} never ends")
        for reading, content in zip(self.readings, moment.contents, strict=True):
            reading.check_last(content)

    def nexts(self, moment: _Moment) -> list[_Moment]:
        """The moments after one more event."""
        moments = []
        for number, thread in enumerate(self.threads):
            position = moment.positions[number]
            if position == 2 * len(thread):
                continue
            rank, at = thread[position // 2]
            later = (*moment.positions[:number], position + 1, *moment.positions[number + 1 :])
            if position % 2 == 0:
                opens = self.readings[rank].opens(at, self.ends.get((rank, at)))
                if opens is not None and not self.has_ended(moment.positions, rank, opens):
                    continue
                moments.append(self.begin(moment, rank, at, later))
            elif self.may_end(moment, rank, at):
                moments.append(_Moment(later, moment.contents, moment.arrivals))
        return moments

    def has_ended(self, positions: Positions, rank: int, at: int) -> bool:
        thread, position = self.where[rank, at]
        return positions[thread] >= 2 * position + 2

    def has_begun(self, positions: Positions, rank: int, at: int) -> bool:
        thread, position = self.where[rank, at]
        return positions[thread] >= 2 * position + 1

    def in_flight(self, positions: Positions, rank: int) -> list[Action]:
        return [
            action
            for action in self.readings[rank].actions
            if self.has_begun(positions, rank, action.first)
            and not self.has_ended(positions, rank, action.last)
        ]

    def begin(self, moment: _Moment, rank: int, at: int, later: Positions) -> _Moment:
        action, reading = self.begins.get((rank, at)), self.readings[rank]
        if action is None:
            arrivals, ended = moment.arrivals, self.ends.get((rank, at))
            if ended is not None:
                for talk in ended.late:
                    arrivals = self.arrive(arrivals, rank, talk, f"the end of {ended.label}")
            return _Moment(later, moment.contents, arrivals)
        for other in self.in_flight(moment.positions, rank):
            if (cell := conflict(action, other, reading.overlaps)) is not None:
                raise UnsafeError(f"race: {action.label} and {other.label} touch {cell} at once")
        for earlier, one in reading.edges:
            if one is action and not self.has_ended(moment.positions, rank, earlier.last):
                raise UnsafeError(f"edge: {action.label} begins before {earlier.label} has ended")
        content = dict(moment.contents[rank])
        perform(action, content, reading.overlaps)
        contents = (*moment.contents[:rank], content, *moment.contents[rank + 1 :])
        arrivals = moment.arrivals
        for talk in action.talks:
            arrivals = self.arrive(arrivals, rank, talk, action.label)
        return _Moment(later, contents, arrivals)

    def arrive(self, arrivals: Arrivals, rank: int, talk: OracleTalk, label: str) -> Arrivals:
        mine = arrivals.get((rank, talk.key), ())
        if len(self.readings) > 1:
            if rank not in talk.members:
                raise UnsafeError(f"{label}: rank {rank} is not a member")
            for member in talk.members:
                theirs = arrivals.get((member, talk.key), ())
                if len(theirs) > len(mine) and theirs[len(mine)][1].facts != talk.facts:
                    raise UnsafeError(f"{label}: rank {member} has another collective in its place")
        return {**arrivals, (rank, talk.key): (*mine, (label, talk))}

    def may_end(self, moment: _Moment, rank: int, at: int) -> bool:
        reading = self.readings[rank]
        target = reading.waits.get(at, reading.issues.get(at))
        if target is not None and not self.has_ended(moment.positions, rank, target):
            return False
        action = self.ends.get((rank, at))
        if action is None or len(self.readings) == 1:
            return True
        talks = action.talks + action.late
        return all(self.is_met(moment.arrivals, rank, talk) for talk in talks)

    def is_met(self, arrivals: Arrivals, rank: int, talk: OracleTalk) -> bool:
        """Whether all members have begun the collective that this one of ours is matched with."""
        number = next(i for i, (_, one) in enumerate(arrivals[rank, talk.key]) if one is talk)
        return all(len(arrivals.get((one, talk.key), ())) > number for one in talk.members)
