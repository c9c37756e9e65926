"""The Dynamo backend `weft`.

    torch.compile(model, backend="weft", options={"strategy": "overlap"})

Options are those of `weft.compile`. Under plain torch.compile sizes are static until they change,
and dims of equal size share a symbol; `weft.compile` asks Dynamo for more and is the better door.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from torchweft.errors import StrategyError
from torchweft.options import Options, is_disabled
from torchweft.serve.session import Session


def weft(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls with each graph. Raises `StrategyError` for an option we do not have.

    With WEFT_DISABLE=1 the graph runs as it is.
    """
    if is_disabled():
        return gm.forward
    if mode not in (None, "default"):
        raise StrategyError(f"mode: the backend 'weft' has no modes; got {mode!r}.", rule="option")
    wanted = Options.of(**(options or {}))
    if wanted.capture != "graph" or wanted.shadow:
        raise StrategyError(
            "options: a backend sees graphs, not calls of the model; capture='boundary' and shadow "
            "are for weft.compile.",
            rule="option",
        )
    return Session(wanted).backend(gm, example_inputs)
