"""`tokenweave`: the tokens in two; while shares of one part go round, the other part computes.

    compute  |A[0]      |A[1]      |n[0]|B[0]      |n[1]|B[1]      |
    network            |scatter[0]  |gather[0]    |gather[1]    |scatter[0] ...

The scheme of TokenWeave (arXiv 2505.11329): a reduce_scatter, the norm of the rank's own share and
an all_gather stand where an all_reduce and the norm of all rows did; so the norm costs a share of
what it did, and the three of them are hidden behind the compute of the other part. In a graph with
all_reduce, the norm stays with each rank, and the all_reduce is woven in the same way.
"""

from __future__ import annotations

from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def tokenweave(s: Scheduler, *, parts: int = 2, min_tokens: int = 0) -> None:
    """Weave parts of the tokens: what moves shares on goes first, what has just left goes last."""
    # 1. Small calls gain nothing from splitting: each part reads all weights again.
    if not s.has_tokens(parts * min_tokens):
        return s.sequential(f"{s.context.num_tokens} tokens are fewer than {parts} x {min_tokens}")
    if not any(op.collective for op in s.graph.ops):
        return s.sequential("it has no collectives")
    s.split(parts)
    # 2. The ops between a reduce_scatter and its all_gather: short, and the wire waits for them.
    shares = {op.name for op in s.graph.ops if s.graph.dealt.intersection(op.touched)}
    fresh: list[int | None] = []  # the parts whose collective nothing has been computed beside yet
    while ready := s.ready():
        # 3. Collectives first; then shares, then other ops, of parts that have landed; else of the
        #    part whose collective is the oldest on the wire.
        op, part = min(
            ready,
            key=lambda pair: (
                pair[0].collective is None,
                fresh.index(pair[1]) + 1 if pair[1] in fresh else 0,
                pair[0].name not in shares,
            ),
        )
        s.run(op, part)
        # 4. Compute of a part is what the collectives of the others hide behind.
        long = op.collective is None and op.name not in shares
        fresh = [each for each in fresh if each != part and not long]
        fresh += [part] if op.collective is not None else []
    s.merge()
    return None
