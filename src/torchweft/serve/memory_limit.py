"""The `MemoryLimit` of a machine: which plans its devices do not hold, and what it kept from a try.

limit.refusal(plan, context)                    the error of a plan that is too large, or None
limit.seconds(strategy, plan, context, costs)   as simulated; without end, noted, if too large
"""

from __future__ import annotations

import math

from torchweft.errors import MemoryPlanError
from torchweft.plan.context import Context
from torchweft.plan.machine import Costs, Machine
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import within_memory


class MemoryLimit:
    """What a machine's `memory_bytes` let run. Without any, nothing is simulated for it."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.is_set = machine, machine.is_limited
        self._skipped: dict[str, set[int]] = {}  # by strategy: the batches that it is too large for

    def refusal(self, plan: Plan, context: Context) -> MemoryPlanError | None:
        """Why a lowered plan cannot run a call: some device does not hold its peak."""
        if self.is_set:
            try:
                within_memory(plan, context, self.machine)
            except MemoryPlanError as error:
                return error
        return None

    def seconds(self, strategy: object, plan: Plan, context: Context, costs: Costs) -> float:
        """Seconds of a call by a strategy's lowered plan."""
        try:
            return within_memory(plan, context, costs.machine, costs).makespan_s
        except MemoryPlanError:
            self._skipped.setdefault(str(strategy), set()).add(int(context.batch))
            return math.inf

    @property
    def notes(self) -> tuple[str, ...]:
        """The strategies that were not tried, for people."""
        return tuple(
            f"memory: {way} was not tried at {len(batches)} size(s) of the batch: its plan needs "
            "more than the machine's memory_bytes"
            for way, batches in self._skipped.items()
        )
