"""A flight as a trace has shown it, and what each of them took: `Flown`, `taken_by`.

flights of a lane, in the order of their ends --taken_by--> key, rows, seconds: one of each size
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import NamedTuple

Key = tuple[str, str]
"""What an op is called in a table of costs, and its device."""


class Flown(NamedTuple):
    """A collective or message, from its start to its end."""

    key: Key
    rows: int
    num_bytes: int
    start_s: float
    end_s: float


def taken_by(flown: Sequence[Flown]) -> Iterator[tuple[Key, int, float]]:
    """What flights of a lane took in a call, the mean of each size: of flights of a few kilobytes
    most are quick and some take ten times as long, and a call pays for all. Those that share the
    link tell it only together: of two at once, one seems to take nothing. So each has a part of
    their seconds, by its bytes."""
    seconds: dict[tuple[Key, int], list[float]] = {}
    train: list[Flown] = []  # each began before the one before it had ended
    for flight in [*flown, None]:
        if train and (flight is None or flight.start_s >= train[-1].end_s):
            taken_s = train[-1].end_s - min(each.start_s for each in train)
            total = sum(each.num_bytes for each in train)
            for key, rows, num_bytes, *_ in train:
                share = num_bytes / total if total else 1 / len(train)
                seconds.setdefault((key, rows), []).append(taken_s * share)
            train = []
        train += [flight] if flight is not None else []
    for size, taken in seconds.items():
        yield *size, mean(taken)
