"""`single_batch`: no split; what does not need a transfer runs while it is under way.

    compute  |route|shared expert|experts        |gate of next|join|
    network        |dispatch    |                |combine      |

Single-batch overlap of serving engines, for batches that are too small to be cut: a transfer starts
as soon as its inputs are there, and ops that do not need it (the shared expert, a gate beside a
gather) come before those that do, wherever the model's code has them. List scheduling on one lane:
an op for which the lane would stand still comes last, one that leads to a transfer soonest first.
"""

from __future__ import annotations

import math

from torchweft.plan.graph import Op
from torchweft.plan.precedence import precedence
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def single_batch(s: Scheduler) -> None:
    """Keep the batch whole; ops that wait for no transfer run beside it."""
    # 1. Seconds of work from each op to the next transfer; the longest way from it to the end.
    before = {name: ahead for (name, _), ahead in precedence(s.graph).items()}
    host, cost = s.machine.lanes[0].name, {op.name: s.cost(op) for op in s.graph.ops}
    away = {op.name for op in s.graph.ops if s.machine.lane_for(op).name != host}
    to_wire, to_end = dict.fromkeys(away, 0.0), dict(cost)
    for op in reversed(s.graph.ops):
        for name, _ in before[op.name]:
            near = cost[name] + to_wire.get(op.name, math.inf)
            to_wire[name] = min(to_wire.get(name, math.inf), near)
            to_end[name] = max(to_end[name], cost[name] + to_end[op.name])
    # 2. What need not be waited for comes first; of that, what leads to a transfer soonest.
    end, free = dict[str, float](), dict.fromkeys((lane.name for lane in s.machine.lanes), 0.0)

    def order(op: Op) -> tuple[float, float, float]:
        lane = s.machine.lane_for(op)
        arrives = max((end[name] for name, _ in before[op.name]), default=0.0)
        waits_s = arrives - free[host] if host in (lane.name, lane.via) else 0.0
        return max(waits_s, 0.0), to_wire.get(op.name, math.inf), -to_end[op.name]

    while ready := s.ready():
        op = min((op for op, _ in ready), key=order)
        lane = s.machine.lane_for(op)
        free[host] += order(op)[0]
        arrived = [end[name] for name, _ in before[op.name]]
        starts = max([free[lane.name], free[lane.via or lane.name], *arrived])
        end[op.name] = free[lane.name] = starts + cost[op.name]
        s.run(op)
