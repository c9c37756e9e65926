"""A `Bucket`: the batches that share one plan.

A strategy runs once a bucket, not on every call. By default a bucket is a power of two of tokens,
cut where the strategy itself looked: while it writes, the numbers of its context remember what they
were compared with (`if s.context.num_tokens < 4096` cuts at 4096).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torchweft.plan.context import Context

EXACT_BELOW = 4
"""Smaller batches have a bucket each: one row more or less decides whether they can be split."""


class WatchedNumber(int):
    """A number that remembers what it was compared with."""

    seen: set[int]

    def __lt__(self, other: object) -> bool:
        return self._look(other, 0) and int(self) < other  # type: ignore[operator]

    def __ge__(self, other: object) -> bool:
        return self._look(other, 0) and int(self) >= other  # type: ignore[operator]

    def __le__(self, other: object) -> bool:
        return self._look(other, 1) and int(self) <= other  # type: ignore[operator]

    def __gt__(self, other: object) -> bool:
        return self._look(other, 1) and int(self) > other  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        return self._look(other, 0, 1) and int(self) == other

    __hash__ = int.__hash__

    def _look(self, other: object, *borders: int) -> bool:
        """Note the numbers at which this comparison changes its answer."""
        if isinstance(other, int | float) and abs(other) < 2**62:
            self.seen |= {
                math.floor(other) + 1 if border else math.ceil(other) for border in borders
            }
        return True


@dataclass(frozen=True)
class Bucket:
    """Batches from `first` up to, not including, `end`."""

    first: int
    end: int

    def __contains__(self, batch: int) -> bool:
        return self.first <= batch < self.end

    def __str__(self) -> str:
        return f"{self.first}..{self.end - 1}" if self.end > self.first + 1 else str(self.first)


def watch(context: Context) -> tuple[Context, set[int]]:
    """The same context with numbers that remember, and what they will have seen."""
    seen: set[int] = set()

    def watched(number: int) -> WatchedNumber:
        watching = WatchedNumber(number)
        watching.seen = seen
        return watching

    return replace(
        context, batch=watched(context.batch), num_tokens=watched(context.num_tokens)
    ), seen


def bucket_of(context: Context, seen: set[int]) -> Bucket:
    """The batches for which a strategy that saw these numbers does the same."""
    batch = int(context.batch)
    if batch < EXACT_BELOW or int(context.num_tokens) != batch:
        return Bucket(batch, batch + 1)
    first = 1 << (batch.bit_length() - 1)
    lower = max([first, *(cut for cut in seen if cut <= batch)])
    return Bucket(lower, min([2 * first, *(cut for cut in seen if cut > batch)]))
