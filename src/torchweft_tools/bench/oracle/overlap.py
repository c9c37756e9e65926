"""The `OracleSpan`: the units of a shared buffer that a value, or one part of it, takes.

    offset 2, 3 units, part None:   [2, 5) of the buffer, whatever the batch
    offset 2, 3 units, part 1:      the rows of part 1 in there, from 2 * batch + 3 * rows[0]

Two spans overlap if they do for *some* positive numbers of rows per part. That is decided here by
trying row counts and comparing plain integers. A finite set of row counts is enough:

1. Both borders are linear in the rows, so "they overlap" is f(rows) > 0 and g(rows) > 0 with
   f = end of the first - start of the second, g = end of the second - start of the first.
2. (f, g) of a row vector is a sum, with the rows as factors, of one plane vector per part. If some
   sum lies in the open positive quadrant, so does one of at most two of these vectors (Caratheodory
   in the plane). Very few rows in every other part, compared to these two, do not change the signs.
3. For two parts, one alone is enough, or f asks for a ratio above p/q and g for one below P/Q;
   if p/q < P/Q then (p + P)/(q + Q) lies strictly between. So three ratios decide two parts.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from torchweft.plan.sizes import Size


class OracleSpan(NamedTuple):
    """Units from `offset` to `offset + units`; of these the rows of `part`, None: all rows."""

    offset: int
    units: int
    part: int | None

    def bounds(self, rows: tuple[int, ...]) -> tuple[int, int]:
        """Start and end, counted in unit / batch, for parts of so many rows."""
        before = 0 if self.part is None else sum(rows[: self.part])
        until = sum(rows) if self.part is None else sum(rows[: self.part + 1])
        start = self.offset * sum(rows)
        return start + self.units * before, start + self.units * until


@lru_cache(maxsize=65536)
def overlap(first: OracleSpan, second: OracleSpan, num_parts: int) -> bool:
    """Whether two spans of one buffer share bytes for some positive numbers of rows per part."""
    return any(overlap_at(first, second, rows) for rows in _row_counts(first, second, num_parts))


def overlap_at(first: OracleSpan, second: OracleSpan, rows: tuple[int, ...]) -> bool:
    """Whether two spans of one buffer share bytes if the parts have these rows."""
    start, end = first.bounds(rows)
    other_start, other_end = second.bounds(rows)
    return max(start, other_start) < min(end, other_end)


def _row_counts(first: OracleSpan, second: OracleSpan, num_parts: int) -> list[tuple[int, ...]]:
    """Row counts that show an overlap if any row counts do."""
    vectors = []
    for part in range(num_parts):
        only = tuple(int(number == part) for number in range(num_parts))
        (start, end), (other_start, other_end) = first.bounds(only), second.bounds(only)
        vectors.append((end - other_start, other_end - start))
    large = 1 + sum(abs(f) + abs(g) for f, g in vectors)
    counts = [(1,) * num_parts]
    for one in range(num_parts):
        counts.append(_mostly(num_parts, {one: large}))
    for one, two in combinations(range(num_parts), 2):
        ratio = sum(map(abs, vectors[two])), sum(map(abs, vectors[one]))
        counts.append(_mostly(num_parts, {one: ratio[0] * large, two: ratio[1] * large}))
    return counts


def _mostly(num_parts: int, rows: dict[int, int]) -> tuple[int, ...]:
    return tuple(1 + rows.get(part, 0) for part in range(num_parts))


@lru_cache(maxsize=4096)
def units_of(total: Size, unit: Size) -> int | None:
    """How many units a value of `total` bytes takes; None if that is 0 or not a whole number."""
    if not unit.terms or len(unit.terms) != len(total.terms):
        return None
    count = total.terms[0][1] // unit.terms[0][1]
    return count if count > 0 and unit * count == total else None
