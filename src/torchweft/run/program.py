"""The `Program`: a verified plan as Python functions, one a lane; `writer` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchweft.plan.graph import Graph
from torchweft.plan.plan import Plan, Range, Step
from torchweft.plan.sizes import Size

Body = Callable[..., Sequence[Any]]
Jitter = Callable[[Step], float]


@dataclass(frozen=True)
class Program:
    """Compiled lanes of one plan; `lanes[0]` runs in the caller's thread.

    ranges: the parts whose side state it puts in force, in the order of the switch's numbers.
    """

    plan: Plan
    lanes: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    source: str
    filename: str
    step_at: Mapping[int, int]
    num_cells: int
    num_events: int
    sizes: tuple[tuple[Size, int, int], ...]
    ranges: tuple[Range, ...] = ()

    def numbers(self, env: Mapping[str, int], bounds: Sequence[int]) -> tuple[int, ...]:
        """The sizes that bodies need in a call: symbols from `env`, the batch by part."""
        symbol = self.plan.graph.batch
        found = []
        for size, start, stop in self.sizes:
            rows = {symbol: bounds[stop] - bounds[start]} if symbol else {}
            found.append(size.evaluate({**env, **rows}))
        return tuple(found)


def reads_of(graph: Graph, step: Step) -> list[str]:
    """What the ops of a step need from outside, in order."""
    inside: set[str] = set()
    found: dict[str, None] = {}
    for name in step.names:
        op = graph.op[name]
        found |= dict.fromkeys(n for n in op.reads if n not in inside)
        inside.update(op.makes)
    return list(found)


def makes_of(graph: Graph, step: Step) -> list[str]:
    """What the ops of a step make; of a kernel's ops, what is used outside of them."""
    if step.by is None:
        return list(graph.op[step.names[0]].makes)
    made = [name for op in step.names for name in graph.op[op].makes]
    outside = {
        name for name in made
        if name in graph.outputs
        or any(reader.name not in step.names for reader in graph.readers[name])
    }  # fmt: skip
    return [name for name in made if name in outside]
