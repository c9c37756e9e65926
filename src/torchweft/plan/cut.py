"""The `Cut`: how a batch falls into parts, as fractions and not as sizes.

    1/2 1/2               two parts of equal size, whatever the batch
    1/4 1/4 1/2           uneven parts are normal
    1/2 1/2 at requests   each border moves to the nearest border between two requests

A plan holds a cut, so one plan serves a whole bucket of batches; rows are bound at the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

from torchweft.errors import StrategyError, clip, unknown

RULES = ("requests",)
MAX_PARTS = 1024
POSSIBLE = f"the number of parts must be whole, from 1 to {MAX_PARTS}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Fractions of the batch, one a part, that add up to one; `rule` moves the borders."""

    fractions: tuple[Fraction, ...] = (Fraction(1),)
    rule: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.fractions) <= MAX_PARTS:
            raise StrategyError(f"split: {POSSIBLE}; got {len(self.fractions)}.")
        if any(fraction <= 0 for fraction in self.fractions) or sum(self.fractions) != 1:
            raise StrategyError(f"split: parts must be positive and add up to 1; got {clip(self)}.")
        if self.rule is not None and self.rule not in RULES:
            raise StrategyError(f"split: {unknown('rule', self.rule, RULES)}")

    @staticmethod
    def even(num_parts: int, rule: str | None = None) -> Cut:
        """Parts of equal size."""
        if not isinstance(num_parts, int) or not 1 <= num_parts <= MAX_PARTS:
            raise StrategyError(f"split: {POSSIBLE}; got {clip(num_parts)}.")
        return Cut((Fraction(1, num_parts),) * num_parts, rule)

    @staticmethod
    def sizes(sizes: Sequence[int]) -> Cut:
        """Parts in the proportion of `sizes`."""
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
            got = clip(list(sizes))
            raise StrategyError(f"split: sizes must be whole numbers, from 1 on; got {got}.")
        return Cut(tuple(Fraction(size, sum(sizes)) for size in sizes))

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self.fractions)

    def __str__(self) -> str:
        rule = f" at {self.rule}" if self.rule else ""
        return " ".join(map(str, self.fractions)) + rule

    def bounds(self, num_rows: int, requests: Sequence[int] = ()) -> tuple[int, ...]:
        """Row borders 0 = b0 < b1 < ... = num_rows; `requests` are the rows of each request.

        Raises `StrategyError` where there are fewer rows (or requests) than parts.
        """
        ends = list(accumulate(self.fractions))[:-1]
        inner = [round(end * num_rows) for end in ends]
        if self.rule == "requests":
            if sum(requests) != num_rows:
                raise StrategyError(
                    f"split: requests of {sum(requests)} rows in a batch of {num_rows}."
                )
            borders = list(accumulate(requests))[:-1]
            inner = [_nearest(borders, want) for want in inner]
        bounds = (0, *inner, num_rows)
        if any(end <= start for start, end in pairwise(bounds)):
            what = f"{len(requests)} requests" if self.rule else f"{num_rows} rows"
            raise StrategyError(f"split: {what} cannot make {self.num_parts} parts ({self}).")
        return bounds


def _nearest(borders: Sequence[int], want: int) -> int:
    return min(borders, key=lambda border: abs(border - want), default=0)
