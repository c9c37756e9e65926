"""Ticks: the seconds of a problem as whole numbers, for a solver that knows no others.

If all its seconds are multiples of one decimal or binary unit, nothing is lost. Else every time is
rounded down to a billionth of the horizon: then an optimum in ticks is a lower bound in
seconds, and an answer in ticks is timed again in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torchweft.placement.problem import INF, Problem

MOST = 1e9
UNITS = (*(10.0**-k for k in range(10)), *(2.0**-k for k in range(1, 31)))


def in_ticks(problem: Problem, horizon_s: float) -> tuple[Problem, float]:
    """The problem with every time a whole number of ticks, and the seconds of a tick.

    Transfers are rounded in `preds` and `succs`, pair by pair; latencies and bytes stay.
    """
    tick_s = next(
        (u for u in UNITS if horizon_s / u <= MOST and all(_fits(t, u) for t in _times(problem))),
        horizon_s / MOST if horizon_s > 0 else 1.0,
    )

    def ticks(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(to_ticks(item, tick_s) for item in row) for row in rows)

    small = replace(problem, seconds=ticks(problem.seconds), ready_s=ticks(problem.ready_s))
    known = {id(m): ticks(m) for preds in problem.preds for _, m in preds}
    for name in ("preds", "succs"):
        found = tuple(tuple((op, known[id(m)]) for op, m in row) for row in getattr(problem, name))
        small.__dict__[name] = found
    return small, tick_s


def to_ticks(seconds: float, tick_s: float) -> float:
    """Seconds in ticks, rounded down (but a hair below a whole number is that number)."""
    return seconds if seconds == INF else float(math.floor(seconds / tick_s * (1 + 1e-12) + 1e-9))


def _fits(seconds: float, unit: float) -> bool:
    whole = seconds / unit
    return abs(whole - round(whole)) <= 1e-9 * max(1.0, whole)


def _times(problem: Problem) -> Iterator[float]:
    for rows in (problem.seconds, problem.ready_s):
        yield from (item for row in rows for item in row if item < INF)
    seen: set[int] = set()
    for preds in problem.preds:
        for _, matrix in preds:
            if id(matrix) not in seen:
                seen.add(id(matrix))
                yield from (item for row in matrix for item in row)
