"""The `Context`: what is known when a call arrives, and the only thing a strategy may decide by.

batch             rows of this call (the size of the graph's batch symbol)
num_tokens        tokens of this call; equal to the batch unless the host knows better
tokens_per_request, phase   what a serving host adds: [512, 17, 1], "prefill" | "decode"
sizes             values of the other symbols, e.g. {"s1": 128}
strategy          the strategy that the host wants for this call, instead of the model's own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchweft.errors import StrategyError

if TYPE_CHECKING:
    from torchweft.plan.write.strategy import Strategy


@dataclass(frozen=True)
class HostFacts:
    """What the host knows of a call beyond its shapes."""

    phase: str | None = None
    tokens_per_request: tuple[int, ...] = ()
    num_tokens: int = 0
    strategy: Strategy | None = None


def phase_of(tokens_per_request: Sequence[int]) -> str:
    """What a step of a serving host does: a token a request is decode, one of several is mixed."""
    if max(tokens_per_request) == 1:
        return "decode"
    return "mixed" if min(tokens_per_request) == 1 else "prefill"


TOLD: ContextVar[HostFacts | None] = ContextVar("weft context", default=None)
"""What the host says about the calls of this thread: `with weft.context(...)`."""


@dataclass(frozen=True)
class Context:
    """What is known when a call arrives."""

    batch: int = 1
    num_tokens: int = 0
    tokens_per_request: tuple[int, ...] = ()
    phase: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        for number in (self.batch, self.num_tokens, *self.tokens_per_request):
            if not isinstance(number, int) or number < 0:
                text = f"numbers of rows and tokens must be whole, from 0 on; got {number!r}"
                raise StrategyError(f"context: {text}.")
        if not self.num_tokens:
            object.__setattr__(self, "num_tokens", sum(self.tokens_per_request) or self.batch)

    def env(self, symbol: str | None, rows: int | None = None) -> dict[str, int]:
        """Values for all symbols; the batch symbol stands for `rows` (default: the batch)."""
        env = dict(self.sizes)
        if symbol is not None:
            env[symbol] = self.batch if rows is None else rows
        return env
