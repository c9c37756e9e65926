"""`multiplex`: decode requests of a batch run beside its prefill requests, on lanes of their own.

    compute   |qkv[1]      |attn[1] |out[1]      |mlp[1]           |   part 1: prefill
    compute1  |qkv[0]|attn[0]   |out[0]|mlp[0]|                        part 0: decode

Prefill leans on compute, decode on memory: MuxServe, Bullet (arXiv 2504.19516) and DuetServe (arXiv
2511.04791) run them side by side on one device. Here a mixed batch is cut where decode requests end
and prefill requests begin, so one plan has both; the host says which is which by
`weft.context(tokens_per_request=...)`. Two calls of a model are two plans, and are not mixed.
`uses` are the kinds of ops of the decode part that leave the first lane.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchweft.errors import StrategyError
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def multiplex(
    s: Scheduler, *, uses: Sequence[str] = ("compute", "memory"), min_tokens: int = 0
) -> None:
    """Cut a mixed batch between its phases; decode runs on the last lane, beside prefill."""
    # 1. Where decode requests end and prefill requests begin, if the batch has both.
    requests = s.context.tokens_per_request
    if s.graph.batch is None or s.context.num_tokens < min_tokens:
        return s.sequential(f"{s.context.num_tokens} tokens are fewer than {min_tokens}")
    try:
        s.split(2, at="phases")
    except StrategyError as why:
        return s.sequential(str(why))
    decode = 0 if requests[0] == 1 else 1
    # 2. Each op of prefill, and beside it that of decode.
    while ready := s.ready():
        for op, part in ready:
            aside = part == decode and op.uses in uses
            s.run(op, part, lane=s.lanes(op)[-1] if aside else None)
    return s.merge()
