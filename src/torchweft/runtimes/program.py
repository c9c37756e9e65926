"""The `Program`: a verified plan as Python functions, one a lane; `writer` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchweft.plan import Plan, Step
from torchweft.sizes import Size

Body = Callable[..., Sequence[Any]]
Jitter = Callable[[Step], float]


@dataclass(frozen=True)
class Program:
    """Compiled lanes of one plan; `lanes[0]` runs in the caller's thread."""

    plan: Plan
    lanes: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    source: str
    filename: str
    step_at: Mapping[int, int]
    num_cells: int
    num_events: int
    sizes: tuple[tuple[Size, int, int], ...]

    def numbers(self, env: Mapping[str, int], bounds: Sequence[int]) -> tuple[int, ...]:
        """The sizes that bodies need in a call: symbols from `env`, the batch by part."""
        symbol = self.plan.graph.batch
        found = []
        for size, start, stop in self.sizes:
            rows = {symbol: bounds[stop] - bounds[start]} if symbol else {}
            found.append(size.evaluate({**env, **rows}))
        return tuple(found)
