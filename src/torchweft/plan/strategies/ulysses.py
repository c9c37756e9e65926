"""`ulysses`: while one part is exchanged between ranks, another is attended to.

    compute  |qkv[0]|qkv[1]   |attn[0] |attn[1] |mlp[0] qkv[0]|mlp[1] qkv[1]|
    network         |heads[0] |heads[1]|back[0] |back[1]      |heads[0]     |heads[1]

The overlap that Ulysses (arXiv 2309.14509) leaves to be done: each rank has a share of the
sequence, and all_to_all gives it all of the sequence for a share of the heads. Parts are rows of
the batch. Of one row they are groups of heads, by a rewrite: all are sent, and each is attended to
and sent back while the next is on the wire.
"""

from __future__ import annotations

from torchweft.errors import StrategyError
from torchweft.plan.rewrite import chunk
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def ulysses(s: Scheduler, *, parts: int = 2, groups: int = 2, min_tokens: int = 0) -> None:
    """Exchange parts of the batch, or groups of heads, while others are attended to."""
    # 1. Small calls gain nothing from parts, and models without all_to_all have nothing to hide.
    if not s.has_tokens(min_tokens):
        return s.sequential(f"{s.context.num_tokens} tokens are fewer than {min_tokens}")
    talks = [op for op in s.graph.ops if op.collective and "all_to_all" in op.collective.kind]
    if not talks:
        return s.sequential("it has no all_to_all")
    # 2. Too few rows: groups of heads, all of which are sent first, in program order.
    if s.graph.batch is None or s.context.batch < parts:
        try:
            s.rewrite(chunk(talks, groups, "heads"))
        except StrategyError as why:
            return s.sequential(str(why))
        return s.sequential()
    # 3. Parts: what sends goes first; else the part that has sent longest ago goes on.
    s.split(parts)
    sent: dict[int | None, int] = {}
    while ready := s.ready():
        op, part = min(ready, key=lambda pair: (pair[0] not in talks, sent.get(pair[1], 0)))
        s.run(op, part)
        if op in talks:
            sent[part] = max(sent.values(), default=0) + 1
    return s.merge()
