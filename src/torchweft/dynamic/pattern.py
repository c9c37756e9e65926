"""A pattern: what stays of the arguments of a call when its tensors are taken out, as a key.

    (x, [h, 2], flag=True)   ->   (tuple, (spec of x, (list, (spec of h, (int, 2))))), ...

Calls of one target with equal patterns are ops of one cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from torchweft.run.workers.cell import Spec


class Weight:
    """Marks the name of a weight in a pattern."""


def weights_in(pattern: Any) -> Iterator[str]:
    """The names of the weights in a pattern."""
    if isinstance(pattern, tuple):
        if pattern and pattern[0] is Weight:
            yield pattern[1]
        elif pattern and pattern[0] in (list, tuple, dict):
            for each in pattern[1]:
                yield from weights_in(each[1] if pattern[0] is dict else each)


def fill(pattern: Any, rows: Iterator[Tensor], weights: Mapping[str, Tensor]) -> Any:
    """The arguments of a pattern with tensors in the place of specs."""
    if isinstance(pattern, Spec):
        return next(rows)
    kind, *rest = pattern
    if kind is Weight:
        return weights[rest[0]]
    if kind is dict:
        return {key: fill(each, rows, weights) for key, each in rest[0]}
    if kind in (list, tuple):
        return kind(fill(each, rows, weights) for each in rest[0])
    return slice(*rest) if kind is slice else rest[0]
