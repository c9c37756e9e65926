"""A `Finding`: one broken rule of a plan, with the step where it shows and the cure."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.errors import PlanError
from torchweft.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `step` is an index into the plan's steps, None if no step is at fault."""

    rule: str
    message: str
    step: int | None = None
    cure: str = ""
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"

    def error(self, plan: Plan, num_others: int = 0, num_ranks: int = 1) -> PlanError:
        """The error to raise: rule, excerpt with an arrow, cure."""
        where = f"rank {self.rank}: " if num_ranks > 1 else ""
        shown = [f"{self.rule}: {where}{self.message}"]
        if self.step is not None:
            shown.append(plan.excerpt(self.step))
        if self.cure:
            shown.append(f"  {self.cure}")
        if num_others:
            shown.append(f"  (and {num_others} more; findings(plan) lists all)")
        lane = plan.steps[self.step].lane if self.step is not None else None
        return PlanError("\n".join(shown), rule=self.rule, step=self.step, lane=lane)
