"""`branches`: independent branches of the graph run side by side on several compute lanes.

    compute   |query |attend       |join|
    compute1  |key   |value |gate  |

List scheduling by earliest finish: of all ready ops the one with the longest way to the end goes
first, on the lane where it ends first (HEFT, Topcuoglu et al. 2002, on lanes instead of devices).
It needs a machine with more than one compute lane, and ops that take longer than a hand-over.
"""

from __future__ import annotations

from torchweft.plan.precedence import precedence
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def branches(s: Scheduler, *, handover_s: float = 2e-5) -> None:
    """Give each ready op to the lane on which it ends first."""
    before = precedence(s.graph)
    # 1. The longest way from each op to the end.
    cost = {op.name: s.cost(op) for op in s.graph.ops}
    to_end = dict(cost)
    for op in reversed(s.graph.ops):
        for name, _ in before[op.name, 0]:
            to_end[name] = max(to_end[name], cost[name] + to_end[op.name])
    # 2. The most urgent ready op goes to the lane on which it ends first.
    free = dict.fromkeys((lane.name for lane in s.machine.lanes), 0.0)
    end: dict[str, tuple[float, str]] = {}
    while ready := s.ready():
        op = max((op for op, _ in ready), key=lambda op: to_end[op.name])
        best = None
        for lane in s.lanes(op):
            start = free[lane.name]
            for done, where in (end[n] for n, _ in before[op.name, 0] if n in end):
                start = max(start, done if where == lane.name else done + handover_s)
            if best is None or start + cost[op.name] < best[0]:
                best = (start + cost[op.name], lane.name)
        assert best is not None, "some lane takes every op, or s.run will say so"
        end[op.name] = best
        free[best[1]] = best[0]
        s.run(op, lane=best[1])
