"""A pair of timings: two programs run in turn, so that a noisy machine hits both alike.

    faster, control = measure(baseline, candidate)      faster.median: how many times as fast

Each round runs the baseline, the candidate, and the baseline again; the ratio of the two baselines
is the A/A control: the difference that this machine shows where there is none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIN_PAIRS = 30
MAX_AA = 0.05


@dataclass(frozen=True)
class Ratio:
    """The median of pairwise ratios with its 95 % interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    @property
    def is_even(self) -> bool:
        """Of a control: whether it shows so little noise that what stands beside it counts."""
        return self.low > 1 - MAX_AA and self.high < 1 + MAX_AA

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def ratio(values: Sequence[float]) -> Ratio:
    """The median of ratios; the interval is that of the binomial order statistics."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach))
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Ratio(middle, ordered[low], ordered[high], count)


def ratio_columns(name: str, over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """The ratio of two programs, round by round, as columns of a row: median, low and high."""
    pairs = ratio([first / second for first, second in zip(over, under, strict=True)])
    return {name: pairs.median, f"{name}_low": pairs.low, f"{name}_high": pairs.high}


def measure(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    num_pairs: int = MIN_PAIRS,
    num_warm: int = 3,
) -> tuple[Ratio, Ratio]:
    """(how many times as fast the candidate is, the A/A control)."""
    for _ in range(num_warm):
        baseline()
        candidate()
    faster, control = [], []
    for number in range(num_pairs):
        first_s = _time_s(baseline)
        candidate_s = _time_s(candidate)
        again_s = _time_s(baseline)
        # The candidate runs between two baselines; compare with each of them in turn.
        faster.append((first_s if number % 2 else again_s) / candidate_s)
        control.append(first_s / again_s)
    return ratio(faster), ratio(control)


def _time_s(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
