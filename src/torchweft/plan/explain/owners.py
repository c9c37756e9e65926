"""The owner of every moment in which a rank computes nothing: why it did not.

    Timeline, when other ranks joined its flights --owned--> [OwnedTime(owner, communicators, time)]

The time without compute is cut where anything changes, and each piece gets exactly one owner, so
owners add up to exposed and idle time. The question is always the same: *the next compute that ran
could have run here; what held it back?* The flight that it waited for is the one that a plan's
graph names, that its lane completed, or else the last that landed just before it began.

    1  flight not joined by the last rank yet            another rank late
    2  flight on a lane that computes                    wrong lane
    3  nothing is left to compute                        last part
    4  the host was still launching, or busy             launch-bound
    5  its inputs were there, but nobody issued it       issued late
    6  an earlier flight of its communicator came first  order of the communicator
    7  it took longer than alone                         contention
    8  none of these: it just takes that long            dependency
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from torchweft.plan.explain.intervals import Interval, clipped, covers, total_s
from torchweft.plan.explain.timeline import TimedWork, Timeline

OWNERS: Mapping[str, str] = {
    "issued late": "Issue it as soon as its inputs are there, before the next compute.",
    "wrong lane": "Give it a lane of its own: nothing can run beside it where it is.",
    "order of the communicator": "Issue it earlier, or give one of the two its own communicator.",
    "dependency": "All that is left needs it: cut the batch into parts, so that another can run.",
    "launch-bound": "The host is too slow: fewer and larger ops, a compiled inner, device graphs.",
    "memory cap": "The host waits for memory: free earlier, or use fewer or smaller parts.",
    "another rank late": "The others wait for one rank: look at its own time, or balance the work.",
    "contention": "It runs slower than alone: fewer lanes at once, or other multiprocessors.",
    "last part": "Nothing is left to cover it: a smaller last part, or more parts.",
    "io": "The read is longer than what runs beside it: start it earlier or cut it into parts.",
    "unknown": "The trace does not tell.",
}
"""Why a rank computes nothing, each with its cure."""
LATE_S, NEAR_S = 2e-5, 2e-4
"""A flight issued later than this is late; what begins sooner than this behind it waited for it."""


class OwnedTime(NamedTuple):
    """A piece of time without compute: its owner, and the communicators in flight (none: idle)."""

    owner: str
    communicators: tuple[str, ...]
    start_s: float
    end_s: float


def owned(timeline: Timeline, joined_s: Mapping[int, float] | None = None) -> list[OwnedTime]:
    """All time without compute, in pieces. joined_s: by the number of a work, when the last of the
    other ranks had begun it, by this rank's clock."""
    return list(_Owning(timeline, joined_s or {}).stretches())


class _Gap(NamedTuple):
    """Time without compute: what ran next, and the flights and reads under way in it."""

    start_s: float
    end_s: float
    next: TimedWork | None
    flights: Sequence[int]
    reads: Sequence[Interval]


class _Owning:
    def __init__(self, timeline: Timeline, joined_s: Mapping[int, float]) -> None:
        self.timeline, self.works, self.joined_s = timeline, timeline.works, joined_s
        self.compute = [work for work in self.works if work.uses == "compute"]
        self.starts = [work.start_s for work in self.compute]
        self.flights = [n for n, work in enumerate(self.works) if work.uses == "network"]
        self.io = timeline.busy("io")
        self.alone_s = _alone(timeline)
        # The earliest moment at which something that runs later could have run, from the back.
        self.least: list[float | None] = [None] * (len(self.compute) + 1)
        for at in range(len(self.compute) - 1, -1, -1):
            known = [s for s in (self.compute[at].ready_s, self.least[at + 1]) if s is not None]
            self.least[at] = min(known, default=None)

    def stretches(self) -> Iterator[OwnedTime]:
        """Gap by gap, each cut where anything changes."""
        first = 0
        for start_s, end_s in self.timeline.gaps:
            while first < len(self.flights) and self.works[self.flights[first]].end_s <= start_s:
                first += 1
            last = first
            while last < len(self.flights) and self.works[self.flights[last]].start_s < end_s:
                last += 1
            at = bisect_left(self.starts, end_s)
            then = self.compute[at] if at < len(self.compute) else None
            inside = [n for n in self.flights[first:last] if self.works[n].end_s > start_s]
            reads = clipped(self.io, start_s, end_s)
            gap = _Gap(start_s, end_s, then, inside, reads)
            main = self._awaited(gap)
            for one_s, other_s in pairwise(self._cuts(gap, main)):
                middle_s = (one_s + other_s) / 2
                flying = [n for n in inside if covers([self.works[n].time], middle_s)]
                owner = self._owner(gap, main, flying, middle_s)
                talks = dict.fromkeys(self.works[n].communicator for n in flying)
                yield OwnedTime(owner, tuple(talks), one_s, other_s)

    def _awaited(self, gap: _Gap) -> int | None:
        """The flight that the next compute had to wait for."""
        if gap.next is None:
            return None
        needed = gap.flights if gap.next.needs is None else gap.next.needs
        flights = [n for n in needed if self.works[n].uses == "network"]
        late = [n for n in flights if gap.start_s < self.works[n].end_s <= gap.end_s + LATE_S]
        main = max(late, key=lambda n: self.works[n].end_s, default=None)
        if main is not None and gap.next.needs is None:  # by time alone: it must fit
            work = self.works[main]
            issues = () if self.timeline.has_host else self.timeline.launches
            behind_s = gap.end_s - work.end_s - total_s(clipped(issues, work.end_s, gap.end_s))
            if behind_s > max(NEAR_S, 0.05 * (work.end_s - work.start_s)):
                return None
        return main

    def _late_s(self, work: TimedWork) -> float:
        if work.ready_s is None or work.launched_s is None:
            return 0.0
        late_s = work.launched_s - work.ready_s
        return late_s if late_s > LATE_S else 0.0

    def _slow_s(self, work: TimedWork) -> float:
        alone_s = self.alone_s.get(work.key, work.end_s - work.start_s)
        slow_s = work.end_s - work.start_s - alone_s
        return slow_s if slow_s > 0.1 * alone_s else 0.0

    def _cuts(self, gap: _Gap, main: int | None) -> list[float]:
        moments: list[float | None] = [gap.start_s, gap.end_s]
        numbers = dict.fromkeys([*gap.flights, *(() if main is None else (main,))])
        for number in numbers:
            work = self.works[number]
            moments += [work.start_s, work.end_s, work.ready_s, work.launched_s]
            moments.append(self.joined_s.get(number))
        if main is not None:
            work = self.works[main]
            soon_s = work.end_s - self._late_s(work)
            moments += [soon_s, soon_s - self._slow_s(work)]
        if gap.next is not None:
            moments += [gap.next.ready_s, gap.next.launched_s]
        edges = [*gap.reads]
        for host in (self.timeline.launches, self.timeline.memory):
            edges += clipped(host, gap.start_s, gap.end_s)
        moments += [moment for edge in edges for moment in edge]
        inside = {m for m in moments if m is not None and gap.start_s <= m <= gap.end_s}
        return sorted(inside)

    def _owner(self, gap: _Gap, main: int | None, flying: Sequence[int], at_s: float) -> str:
        works, then = self.works, gap.next
        if any(self.joined_s.get(number, at_s) > at_s for number in flying):
            return "another rank late"
        if covers(self.timeline.memory, at_s):
            return "memory cap"
        on_lanes = [n for n in flying if works[n].lane in self.timeline.mixed_lanes]
        if flying and len(on_lanes) == len(flying):
            return "wrong lane" if self._could_run(at_s) else "dependency"
        if then is None:
            return self._tail(gap, flying, at_s)
        if self._launching(at_s) and (
            not self.timeline.has_host or (then.launched_s is not None and at_s < then.launched_s)
        ):
            return "launch-bound"
        if main is not None and at_s < works[main].end_s:
            return self._awaiting(works[main], [works[n] for n in flying], at_s)
        if covers(gap.reads, at_s):
            return "io"
        if not flying or then.needs is not None or self.timeline.has_host:
            return self._idle(then, at_s)
        return "launch-bound" if gap.end_s - gap.start_s < NEAR_S else "unknown"

    def _awaiting(self, main: TimedWork, flying: Sequence[TimedWork], at_s: float) -> str:
        """Why the flight that compute waits for has not landed yet."""
        before = [w for w in flying if w.communicator == main.communicator and w is not main]
        if at_s < main.start_s or (before and min(before, key=_start).start_s < main.start_s):
            ready = main.ready_s is not None and main.ready_s <= at_s
            issued = main.launched_s is None or main.launched_s <= at_s
            if before and issued and (ready or at_s >= main.start_s):
                return "order of the communicator"
            if ready and not issued:
                return "issued late" if self._late_s(main) > 0 else "launch-bound"
            return "dependency" if flying else "launch-bound"
        soon_s = main.end_s - self._late_s(main)
        if at_s > soon_s:
            return "issued late"
        return "contention" if at_s > soon_s - self._slow_s(main) else "dependency"

    def _could_run(self, at_s: float) -> bool:
        """Whether something that runs later was ready; where nothing is known, perhaps."""
        place = bisect_left(self.starts, at_s)
        if any(work.ready_s is None for work in self.compute[place : place + 1]):
            return True
        least_s = self.least[place]
        return least_s is not None and least_s <= at_s

    def _launching(self, at_s: float) -> bool:
        return covers(self.timeline.launches, at_s)

    def _tail(self, gap: _Gap, flying: Sequence[int], at_s: float) -> str:
        if flying:
            return "last part"
        if covers(gap.reads, at_s):
            return "io"
        return "launch-bound" if self._launching(at_s) or self.timeline.has_host else "unknown"

    def _idle(self, then: TimedWork, at_s: float) -> str:
        """Nothing that it needs is in flight. On a CPU lane whoever computes also launches."""
        if then.ready_s is not None and at_s < then.ready_s:
            return "dependency"
        if not self.timeline.has_host:
            return "launch-bound"
        if then.launched_s is None:
            return "unknown"
        late = at_s < then.launched_s or then.start_s - at_s < LATE_S
        return "launch-bound" if late else "unknown"


def _start(work: TimedWork) -> float:
    return work.start_s


def _alone(timeline: Timeline) -> dict[str, float]:
    """By key, how long network works took that had next to no compute beside them."""
    alone: dict[str, list[float]] = {}
    for work in timeline.works:
        if work.uses == "network" and work.key and work.end_s > work.start_s:
            beside_s = total_s(clipped(timeline.compute, *work.time))
            if beside_s < 0.1 * (work.end_s - work.start_s):
                alone.setdefault(work.key, []).append(work.end_s - work.start_s)
    return {key: median(times_s) for key, times_s in alone.items()}


def slowed_s(timeline: Timeline) -> float | None:
    """Seconds that compute beside the network took longer than equal compute alone.

    None where no work of equal key ran both ways.
    """
    network = timeline.network
    alone: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    for work in timeline.works:
        taken_s = work.end_s - work.start_s
        if work.uses != "compute" or not work.key or taken_s <= 0:
            continue
        share = total_s(clipped(network, *work.time)) / taken_s
        if share < 0.1 or share > 0.9:
            (alone if share < 0.1 else beside).setdefault(work.key, []).append(taken_s)
    both = alone.keys() & beside.keys()
    excess_s = [(median(beside[key]) - median(alone[key])) * len(beside[key]) for key in both]
    return max(0.0, sum(excess_s)) if both else None


def joined(timelines: Sequence[Timeline]) -> tuple[list[dict[int, float]], list[str]]:
    """For each rank, by the number of a flight, when the last rank began it; and what did not fit.

    Ranks match their flights of one communicator by order. Their clocks are set by the ends of
    these flights, which are nearly the same moment on all of them.
    """
    found: list[dict[int, float]] = [{} for _ in timelines]
    orders, notes = [_sequences(timeline) for timeline in timelines], []
    for name in sorted({name for order in orders for name in order}):
        holders = [rank for rank, order in enumerate(orders) if name in order]
        numbers = [orders[rank][name] for rank in holders]
        if len({len(each) for each in numbers}) > 1:
            notes.append(f"ranks made different numbers of flights on {name}")
            continue
        flights = [
            [timelines[rank].works[number] for number in each]
            for rank, each in zip(holders, numbers, strict=True)
        ]
        shifts = [
            median(one.end_s - own.end_s for one, own in zip(flights[0], each, strict=True))
            for each in flights
        ]
        for at, same in enumerate(zip(*flights, strict=True)):
            last_s = max(work.start_s + shift for work, shift in zip(same, shifts, strict=True))
            for rank, each, work, shift in zip(holders, numbers, same, shifts, strict=True):
                joined_s = min(last_s - shift, work.end_s)
                if joined_s > work.start_s + LATE_S:
                    found[rank][each[at]] = joined_s
    return found, notes


def _sequences(timeline: Timeline) -> dict[str, list[int]]:
    order: dict[str, list[int]] = {}
    for number, work in enumerate(timeline.works):
        if work.uses == "network":
            order.setdefault(work.communicator, []).append(number)
    return order
