"""The `Throttle`: a worker that sleeps after each group, in proportion to the time it took, is an
emulated slow device."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Throttle:
    """Sleeps so that work takes `slowness` times as long; what it overslept counts."""

    slowness: float = 1.0
    debt_s: float = 0.0

    def pay(self, worked_s: float) -> None:
        """Sleep for work that took so long."""
        if self.slowness <= 1:
            return
        self.debt_s += worked_s * (self.slowness - 1)
        if self.debt_s > 0:
            began_s = time.perf_counter()
            time.sleep(self.debt_s)
            self.debt_s -= time.perf_counter() - began_s
