"""`overlap`: cut the batch; network ops of one part run beside compute ops of the others.

    compute  |attn0[0]|attn0[1]|mlp0[0] |mlp0[1] |attn1[0]| ...
    network           |red[0]  |red[1]  |red[0]  |red[1]  |

The scheme of NanoFlow (arXiv 2408.12757) and of two-batch overlap in serving engines, for any
number of parts. It pays where a network op takes about as long as the compute beside it.
"""

from __future__ import annotations

from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def overlap(s: Scheduler, *, parts: int = 2, min_tokens: int = 0, at: str | None = None) -> None:
    """Split the batch; network ops of one part run beside compute ops of the others."""
    # 1. Small calls gain nothing from splitting: each part reads all weights again.
    if s.context.num_tokens < parts * min_tokens:
        return s.sequential(f"{s.context.num_tokens} tokens are fewer than {parts} x {min_tokens}")
    # 2. Each op on all its parts before the next op: part 1 computes while part 0 is on the wire.
    s.split(parts, at=at)
    while ready := s.ready():
        for op, part in ready:
            s.run(op, part)
    s.merge()
    return None
