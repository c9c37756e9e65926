"""`compose`: other strategies, each for some phases and some layers of a model.

    compose(phases={"decode": "sequential"}, layers={":2": "sequential"}, otherwise="overlap")

    embed, layers 0 and 1   |sequential           |
    layers 2 and on                               |overlap, in parts ...

The phase chooses first: its strategy writes the whole plan. Else each op takes the first of
`layers` that it is in: a number or a range of layers (`3`, `2:`, `0:4`), the class of the repeated
module (`DecoderLayer`), or a module path (`layers.*.mlp*`). Ops in a row with one strategy are a
stretch, which it writes by itself. All that split must split alike, for a plan has one cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import groupby

from torchweft.errors import StrategyError
from torchweft.plan.graph import Op
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import Strategy, as_strategy, strategy

Way = str | Strategy
NUMBERS = re.compile(r"(\d*)(:?)(\d*)")


@strategy
def compose(
    s: Scheduler,
    *,
    phases: Mapping[str, Way] | None = None,
    layers: Mapping[str, Way] | None = None,
    otherwise: Way = "overlap",
    min_tokens: int = 0,
    slack: float = 0.1,
) -> None:
    """Choose a strategy by the phase of the call, and for each layer of the model."""
    ways = {} if layers is None else dict(layers)
    # 1. The whole call: too small, or of a phase with a strategy of its own.
    if min_tokens and not s.has_tokens(min_tokens, slack=slack):
        return s.sequential(f"{s.context.num_tokens} tokens are fewer than {min_tokens}")
    if phases is not None and (s.context.phase or "") in phases:
        otherwise, ways = phases[s.context.phase or ""], {}
    # 2. What each op is in. What no op is in is told; if all of them are, it is a mistake.
    chosen = [next((key for key in ways if is_in(op, key)), "") for op in s.ops]
    idle = [key for key in ways if key not in chosen]
    if idle and not any(chosen):
        raise StrategyError(f"layers: no op is in {', '.join(idle)}. {_known(s)}", rule="layers")
    s.notes += [f"compose: no op is in {key}" for key in idle]
    # 3. Stretch by stretch.
    for key, stretch in groupby(zip(chosen, s.ops, strict=True), key=lambda pair: pair[0]):
        with s.within([op for _, op in stretch]):
            as_strategy(ways[key] if key else otherwise)(s)
    if s.num_parts > 1:
        s.merge()
    return None


def is_in(op: Op, key: str) -> bool:
    """Whether an op is in some layers, in a module of this class or path."""
    if (numbers := NUMBERS.fullmatch(key)) is not None and key:
        first, colon, end = numbers.groups()
        last = int(end) if end else None if colon else int(first) + 1
        return op.layer is not None and int(first or 0) <= op.layer < (last or op.layer + 1)
    return op.block == key or fnmatchcase(op.path, key)


def _known(s: Scheduler) -> str:
    layers = sorted({op.layer for op in s.ops if op.layer is not None})
    blocks = sorted({op.block for op in s.ops if op.block is not None})
    return f"Layers: {layers or 'none'}, classes: {', '.join(blocks) or 'none'}."
