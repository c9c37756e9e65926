"""`tokenweave`: the tokens in two; while shares of one part go round, the other part computes.

    compute  |A[0]      |A[1]      |n[0]|B[0]      |n[1]|B[1]      |
    network            |scatter[0]  |gather[0]    |gather[1]    |scatter[0] ...

The scheme of TokenWeave (arXiv 2505.11329): a reduce_scatter, the norm of the rank's own share and
an all_gather stand where an all_reduce and the norm of all rows did; so the norm costs a share of
what it did, and the three of them are hidden behind the compute of the other part. A graph with
all_reduces is rewritten so; where it cannot be, they are woven whole, with a note in the history.
The other way is a declared kernel that does all three: `kernel` names it, in the place of each
all_reduce and of the op that reads it.
"""

from __future__ import annotations

from torchweft.errors import StrategyError
from torchweft.plan.graph import Graph, Op
from torchweft.plan.rewrite import decompose as taken_apart
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def tokenweave(
    s: Scheduler, *, parts: int = 2, min_tokens: int = 0, decompose: bool = True, kernel: str = ""
) -> None:
    """Weave parts of the tokens: what moves shares on goes first, what has just left goes last."""
    # 1. Small calls gain nothing from splitting: each part reads all weights again.
    if not s.has_tokens(parts * min_tokens):
        return s.sequential(f"{s.context.num_tokens} tokens are fewer than {parts} x {min_tokens}")
    if not any(op.collective for op in s.graph.ops):
        return s.sequential("it has no collectives")
    # 2. Each all_reduce in two legs, with what follows row by row on the rank's share in between.
    whole = [op for op in s.graph.ops if op.collective and op.collective.kind == "all_reduce"]
    if decompose and whole and not kernel and s.rewriter is not None:
        try:
            s.rewrite(taken_apart(whole))
        except StrategyError as why:
            s.note(f"all_reduces are woven whole: {why}")
    s.split(parts)
    # 3. The ops between a reduce_scatter and its all_gather: short, and the wire waits for them.
    dealt = s.graph.dealt
    shares = {op.name for op in s.graph.ops if dealt.intersection((*op.touched, *op.makes))}
    fresh: list[int | None] = []  # the parts whose collective nothing has been computed beside yet
    while ready := s.ready():
        # 4. Collectives first; then shares, then other ops, of parts that have landed; else of the
        #    part whose collective is the oldest on the wire.
        op, part = min(
            ready,
            key=lambda pair: (
                pair[0].collective is None,
                fresh.index(pair[1]) + 1 if pair[1] in fresh else 0,
                pair[0].name not in shares,
            ),
        )
        fused = (op, *_reader(s.graph, op)) if kernel and op in whole else (op,)
        s.run(fused, part, replace=kernel if len(fused) > 1 else None)
        # 5. Compute of a part is what the collectives of the others hide behind.
        long = op.collective is None and op.name not in shares
        fresh = [each for each in fresh if each != part and not long]
        fresh += [part] if op.collective is not None else []
    s.merge()
    return None


def _reader(graph: Graph, op: Op) -> tuple[Op, ...]:
    """The first op that reads what a collective gives."""
    given, later = {*op.makes, *op.mutates}, graph.ops[graph.ops.index(op) + 1 :]
    return tuple(other for other in later if given.intersection(other.reads))[:1]
