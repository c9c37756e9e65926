"""Ranks: waiting for what other processes must do their share of, never without a bound."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

WATCHDOG_S = 60.0


def wait(work: Any) -> None:
    """Wait for a c10d work, at most as long as the watchdog allows."""
    work.wait(timedelta(seconds=WATCHDOG_S))
