"""An `Eager` call: a model that runs as it is, while several ranks may be about.

    with Eager(speaker, watchdog_s) as eager, listening(eager):
        model(x)

Its collectives go over the communicators that plans use, so ranks agree on the call too (the
others must run theirs eagerly as well), no wait is endless, and a rank that fails wakes its peers.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torchweft.capture.stops import listening
from torchweft.ranks.speakers import Speaker
from torchweft.ranks.talk import Talk
from torchweft.run.eager.caught import BETWEEN_TWO, EagerCollective


class Eager:
    """Listens to a model that nobody schedules."""

    def __init__(self, speaker: Speaker, watchdog_s: float) -> None:
        self.ranks = Talk(None, {}, speaker, watchdog_s)

    def __enter__(self) -> Eager:
        self.ranks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ranks.__exit__(kind, error, trace)

    def stop(self, text: str, mark: Any) -> None:
        """Nothing is planned, so nothing happens here."""

    def talk(self, caught: EagerCollective) -> Any:
        """Start a collective and wait for its end."""
        if caught.kind in BETWEEN_TWO:
            return caught.pass_on()
        with listening(None):
            self.ranks.join(caught.group)
            return caught.start().land().result
