"""`pipeline`: parts of the batch flow through the ranks, each of which computes another part.

    rank 0  |F[0]|F[1]|F[2]|F[3]|
    rank 1       |F[0]|F[1]|F[2]|F[3]|          (parts + ranks - 1) turns instead of parts * ranks

The forward of GPipe (arXiv 1811.06965) over models that are cut by `isend` and `irecv`: each rank
writes its own plan, and the messages of a direction go part by part, so the plans fit each other.
"""

from __future__ import annotations

from torchweft.errors import StrategyError, unknown
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy

SCHEDULES = ("gpipe",)


@strategy
def pipeline(s: Scheduler, *, schedule: str = "gpipe", parts: int = 4, min_tokens: int = 0) -> None:
    """Cut the batch; take each part through this rank before the next, messages in flight."""
    if schedule not in SCHEDULES:
        raise StrategyError(f"pipeline: {unknown('schedule', schedule, SCHEDULES)}")
    # 1. Without messages there is nothing to pipeline; all ranks see the same small calls.
    if all(op.collective is None or op.collective.peer is None for op in s.graph.ops):
        return s.sequential("no message goes to another rank")
    if s.context.num_tokens < parts * max(1, min_tokens):
        return s.sequential(f"{s.context.num_tokens} tokens are too few for {parts} parts")
    s.split(parts)
    # 2. The earliest part that can go on, as far as it goes: received, computed, sent.
    while ready := s.ready():
        op, part = min(ready, key=lambda pair: -1 if pair[1] is None else pair[1])
        s.run(op, part)
    # 3. Sends are completed last: nothing here waits for the next rank.
    s.merge()
    return None
