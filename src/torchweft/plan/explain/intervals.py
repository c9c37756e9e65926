"""Intervals of time: unions, intersections and differences, never sums of durations.

union([(0, 2), (1, 3), (5, 6)])         ->  [(0, 3), (5, 6)]      sorted, apart from each other
common([(0, 3), (5, 6)], [(2, 5.5)])    ->  [(2, 3), (5, 5.5)]
without([(0, 3), (5, 6)], [(2, 5.5)])   ->  [(0, 2), (5.5, 6)]
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""From a start to an end, in seconds."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that at least one of these covers; empty ones cover none."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def common(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The time that both of two unions cover."""
    both: list[Interval] = []
    at = other = 0
    while at < len(left) and other < len(right):
        start, end = max(left[at][0], right[other][0]), min(left[at][1], right[other][1])
        if start < end:
            both.append((start, end))
        if left[at][1] < right[other][1]:
            at += 1
        else:
            other += 1
    return both


def without(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The time that the first of two unions covers and the second does not."""
    rest: list[Interval] = []
    at = 0
    for start, end in left:
        while at < len(right) and right[at][1] <= start:
            at += 1
        other = at
        while other < len(right) and right[other][0] < end:
            if start < right[other][0]:
                rest.append((start, right[other][0]))
            start = max(start, right[other][1])
            other += 1
        if start < end:
            rest.append((start, end))
    return rest


def clipped(intervals: Sequence[Interval], start_s: float, end_s: float) -> list[Interval]:
    """What a union covers between two moments; only what lies there is looked at."""
    first = max(0, bisect_right(intervals, (start_s, math.inf)) - 1)
    inside: list[Interval] = []
    for start, end in intervals[first : bisect_left(intervals, (end_s, -math.inf))]:
        if max(start, start_s) < min(end, end_s):
            inside.append((max(start, start_s), min(end, end_s)))
    return inside


def total_s(intervals: Iterable[Interval]) -> float:
    """The seconds of intervals that are apart from each other."""
    return math.fsum(end - start for start, end in intervals)


def covers(intervals: Sequence[Interval], at_s: float) -> bool:
    """Whether a union covers a moment."""
    place = bisect_right(intervals, (at_s, math.inf)) - 1
    return place >= 0 and at_s < intervals[place][1]
