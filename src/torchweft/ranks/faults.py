"""What hinders ranks from making a call together, as errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchweft.errors import PlanError

if TYPE_CHECKING:
    from torchweft.ranks.ranks import Channel


class WholeError(PlanError):
    """Ranks have plans that differ, and all of them can run this call with the batch whole."""


class EagerError(PlanError):
    """Some rank runs its model as it is, and this one has a plan, or the other way round.

    is_over: whether that rank waits for nobody; then nothing hinders this one from doing the same.
    """

    is_over = False


class LostError(Exception):
    """Another rank did not do its share; becomes a `RunError` that names the step.

    channel: where it was waited for, if that is known.
    """

    def __init__(self, text: str, channel: Channel | None = None) -> None:
        super().__init__(text)
        self.channel = channel
