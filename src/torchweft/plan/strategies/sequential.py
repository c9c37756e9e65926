"""`sequential`: all ops in program order, the batch whole.

    compute  |attn0|       |mlp0|        |attn1| ...
    network        |reduce|     |reduce|

What plain PyTorch does; every other strategy is measured against it.
"""

from __future__ import annotations

from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def sequential(s: Scheduler) -> None:
    """Run the ops one by one."""
    s.sequential()
