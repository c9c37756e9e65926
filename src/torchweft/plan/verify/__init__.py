"""The verifier: says whether a plan is safe, from the plan and its graph alone.

`docs/plans.md` is what it holds plans to. It knows nothing of how a plan was made, it accepts every
safe plan and refuses every other: `torchweft bench verify` compares it with an exhaustive search.

    plan --static rules (coverage.py)--> ok --walk (walk.py, touch.py, cells.py)--> findings
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchweft.errors import PlanError
from torchweft.plan.plan import Plan
from torchweft.plan.verify.coverage import Finding, static_findings
from torchweft.plan.verify.walk import Walk

__all__ = ["Finding", "findings", "findings_ranks", "verify", "verify_ranks"]


def findings(plan: Plan) -> list[Finding]:
    """Every broken rule of a plan, taken alone: what other ranks do is taken for granted."""
    return findings_ranks([plan])


def findings_ranks(plans: Sequence[Plan]) -> list[Finding]:
    """Every broken rule of the plans of all ranks together, rank by rank.

    Races come first: what else is found beside one depends on which of its two steps came first.
    """
    static = [(rank, item) for rank, plan in enumerate(plans) for item in static_findings(plan)]
    broken = [replace(item, rank=rank) for rank, item in static]
    if not broken:
        Walk(plans, broken).go()
    return sorted(broken, key=lambda item: item.rule != "race")


def verify(plan: Plan) -> Plan:
    """The plan itself if it is safe. Raises `PlanError` with the step marked if it is not."""
    return verify_ranks([plan])[0]


def verify_ranks(plans: Sequence[Plan]) -> list[Plan]:
    """The plans if they are safe together: no race, no deadlock, one order of collectives.

    Raises `PlanError` for the first broken rule.
    """
    if not plans:
        raise PlanError("ranks: there is no plan to verify.", rule="ranks")
    if broken := findings_ranks(plans):
        raise broken[0].error(plans[broken[0].rank], len(broken) - 1, len(plans))
    return list(plans)
