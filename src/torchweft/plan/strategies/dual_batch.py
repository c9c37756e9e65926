"""`dual_batch`: two halves of the batch take turns, a stage each; one may be stages ahead.

    compute  |attn[0]|attn[1]   |experts[0]|experts[1]|attn[0] ...
    network          |dispatch[0]|dispatch[1]|combine[0]|combine[1]

Dual-batch (two-batch) overlap, as DeepSeek's inference and serving engines run experts on many
ranks: dispatch and combine of one half beside attention and experts of the other. A stage ends
where a transfer starts. In prefill the halves take turns at once; in decode, where attention is
long, the first half is `decode_offset` stages ahead. A shared expert needs no transfer: it has a
lane of its own where the machine has two, and runs behind the dispatch where it has one.
"""

from __future__ import annotations

import re

from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def dual_batch(
    s: Scheduler,
    *,
    offset: int = 0,
    decode_offset: int = 2,
    min_tokens: int = 0,
    decode_min_tokens: int = 0,
    shared: str = "shared",
) -> None:
    """Two halves take turns: the transfers of one run beside attention and experts of the other."""
    # 1. The variant of this phase, and whether the call is worth two halves.
    decode = s.context.phase == "decode"
    ahead, least = (decode_offset, decode_min_tokens) if decode else (offset, min_tokens)
    rows = s.context.batch if not s.graph.takes_empty else 2
    if s.graph.batch is None or rows < 2 or s.context.num_tokens < 2 * least:
        return s.sequential(f"{s.context.num_tokens} tokens are too few for halves of {least}")
    requests = s.context.tokens_per_request
    s.split(2, at="requests" if len(requests) > 1 and all(requests) else None)

    # 2. A stage of one half: all that it can do until a transfer of its own has started.
    def stage(part: int) -> None:
        while ready := s.ready(part):
            op, own = ready[0]
            aside = re.search(shared, f"{op.path} {op.name}") and op.uses != "network"
            s.run(op, own, lane=s.lanes(op)[-1] if aside else None)
            if op.uses == "network":
                return

    # 3. The first half gets ahead, then they take turns.
    for _ in range(ahead):
        stage(0)
    while s.ready():
        stage(0)
        stage(1)
    return s.merge()
