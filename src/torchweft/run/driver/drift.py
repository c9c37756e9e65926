"""`Drift`: how far real runs have moved from the seconds that were measured, by (cell, device).

    drift.saw(("tree", "fast"), ratio=1.9, seconds=2e-4)       every call moves its factor
    drift["tree", "fast"]                                      the factor on what was measured
    drift.epoch                                                changes when plans are out of date

A call moves a factor a part of the way (in logarithms) to the median of what the last calls saw: on
a busy machine single runs are late by any factor. It is a small part, so that noise evens out, and
a larger one while all the last calls were a quarter off on the same side. Plans are out of date
once the work of a device, all its cells by the seconds they take, costs a quarter more or less than
when they were made. One noisy cell does not throw all plans away; one that slows down for good and
matters does.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

FOLLOW = 0.3  # how far one call moves what has changed
STEADY = 0.1  # how far it moves what has not
LAST = 3  # calls
MOVED = 1.25
FADE = 0.99  # of the seconds that cells count by, with all that is seen of their device
FROM = "from "
Key = tuple[str, str]  # (cell, device); of a link (FROM + source, target)


class Drift(dict[Key, float]):
    """Factors by (cell, device); a pair that is not in it has not moved."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = 0
        self.settled: dict[Key, float] = {}
        self.spent_s: dict[Key, float] = {}
        self.seen: dict[Key, deque[float]] = {}

    def saw(self, key: Key, ratio: float, seconds: float) -> None:
        """Runs took these seconds, `ratio` times what they were expected to take."""
        before = self.get(key, 1.0)
        seen = self.seen.setdefault(key, deque(maxlen=LAST))
        seen.append(before * ratio)
        off = min(seen) > MOVED * before or max(seen) * MOVED < before
        self[key] = before * (median(seen) / before) ** (FOLLOW if off else STEADY)
        self.settled.setdefault(key, 1.0)
        self.spent_s[key] = self.spent_s.get(key, 0.0) + seconds
        beside = [other for other in self.spent_s if other[1] == key[1]]
        moved = total_s = 0.0
        for other in beside:
            self.spent_s[other] *= FADE
            total_s += self.spent_s[other]
            moved += self.spent_s[other] * math.log(self[other] / self.settled[other])
        if abs(moved) > total_s * math.log(MOVED):
            self.settled.update((other, self[other]) for other in beside)
            self.epoch += 1

    def forget(self, device: str) -> None:
        """Forget a device that is gone, and the links from and to it."""
        for known in (self, self.settled, self.spent_s, self.seen):
            forget(known, device)


def forget(known: dict[Key, Any], device: str) -> None:
    """Drop what is known of a device, and of the links from and to it."""
    for key in [key for key in known if device in (key[0].removeprefix(FROM), key[1])]:
        del known[key]
