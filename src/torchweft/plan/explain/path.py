"""The critical path of a measured `Timeline`: the chain of works, each of which let the next begin.

It is walked from the end: before each work stands the one that ended last before it began; of
several, one that it is known to have waited for, or one of its own lane. What lies between two of
them is nobody's work: launches, waits, other ranks.
"""

from __future__ import annotations

from bisect import bisect_right

from torchweft.plan.explain.timeline import TimedWork, Timeline

NEAR_S = 2e-6


def critical_path(timeline: Timeline) -> tuple[TimedWork, ...]:
    """The chain that ends last, its first work first."""
    works = timeline.own
    by_end = sorted(range(len(works)), key=lambda n: works[n].end_s)
    ends = [works[n].end_s for n in by_end]
    path: list[TimedWork] = []
    number = by_end[-1] if by_end else None
    while number is not None:
        work = works[number]
        path.append(work)
        last = bisect_right(ends, work.start_s + NEAR_S) - 1
        near: list[int] = []
        while last >= 0 and (not near or ends[last] >= works[near[0]].end_s - NEAR_S):
            if works[by_end[last]].start_s < work.start_s:
                near.append(by_end[last])
            last -= 1
        number = max(near, key=lambda n: _claim(work, n, works[n]), default=None)
    return tuple(path[::-1])


def _claim(work: TimedWork, number: int, before: TimedWork) -> tuple[bool, bool, float]:
    """How sure it is that one work waited for another."""
    return number in (work.needs or ()), before.lane == work.lane, before.end_s
