"""The Dynamo backend `weft`.

    torch.compile(model, backend="weft", options={"strategy": "overlap"})

Options are those of `weft.compile`. Under plain torch.compile sizes are static until they change,
and dims of equal size share a symbol; `weft.compile` asks Dynamo for more and is the better door.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from torchweft.errors import StrategyError, unknown
from torchweft.serve.session import Session


def check_options(given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `StrategyError` for an option that we do not have; it lists those that we have."""
    for name in given:
        if name not in known:
            raise StrategyError(f"options: {unknown('option', name, known)}", rule="option")


def weft(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls with each graph. Raises `StrategyError` for an option we do not have."""
    if mode not in (None, "default"):
        raise StrategyError(f"mode: the backend 'weft' has no modes; got {mode!r}.", rule="option")
    check_options(options or {}, inspect.signature(Session).parameters)
    return Session(**(options or {})).backend(gm, example_inputs)
