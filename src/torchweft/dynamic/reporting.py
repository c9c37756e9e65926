"""The `DynamicReport`: what became of a dynamic model's calls: groups, workers, plans, learning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DynamicReport:
    """What became of a dynamic model. `str(report)` is the readable form.

    lost: why each worker that is gone is. reasons: what ran at once, unrecorded, and how often.
    learning: what a planner that learns has learned from; "" if it does not.
    """

    num_ops: int
    num_groups: int
    workers: tuple[str, ...]
    lost: tuple[str, ...]
    num_planned: int
    num_hits: int
    num_replanned: int
    reasons: tuple[tuple[str, int], ...]
    learning: str

    def __str__(self) -> str:
        lines = [f"dynamic: {self.num_ops} ops ran in {self.num_groups} groups"]
        lines += [f"  worker {label}" for label in self.workers]
        lines += [f"  lost: {reason}" for reason in self.lost]
        if self.workers or self.lost:
            again = f"{self.num_hits} calls by a plan from the cache"
            anew = f"{self.num_replanned} planned anew for a lost worker"
            lines.append(f"  plans: {self.num_planned} made, {again}, {anew}")
        if self.learning:
            lines.append(f"  {self.learning}")
        lines += [f"  ran at once, {count} x: {reason}" for reason, count in self.reasons]
        return "\n".join(lines)
