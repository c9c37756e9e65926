"""`comet`: no split; each product in pieces, a piece on the wire while the next is computed.

    compute  |down 1of4|down 2of4   |down 3of4   |down 4of4   |            |next
    network            |reduce 1of4 |reduce 2of4 |reduce 3of4 |reduce 4of4 |

Fine-grained overlap of a product with the collective that it feeds, from Comet (arXiv 2502.19811)
and Flux (arXiv 2406.06858), whose kernels pass tiles; here the graph is rewritten, and the pieces
are ops. It needs no batch: at batch 1, too, all but the last piece of a collective is hidden.
"""

from __future__ import annotations

from torchweft.plan.rewrite import chunk
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy

FED = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


@strategy
def comet(s: Scheduler, *, chunks: int = 4, dim: int = -1, min_tokens: int = 0) -> None:
    """Cut products and the collectives that they feed into pieces; keep the batch whole."""
    # 1. Small calls gain nothing from pieces: each reads all of the input again.
    if s.context.num_tokens < min_tokens:
        return s.sequential(f"{s.context.num_tokens} tokens are fewer than {min_tokens}")
    talks = [op for op in s.graph.ops if op.collective and op.collective.kind in FED]
    if not talks or s.rewriter is None:
        return s.sequential("no calls of a model to cut" if talks else "no collective to cut")
    # 2. Each collective with its product in pieces, by columns or rows.
    s.rewrite(chunk(talks, chunks, dim))
    # 3. Program order: a piece starts on the wire as soon as it is there.
    s.sequential()
    return None
