"""The strategy `replay`: writes again what was written before: a plan that was found, or edited.

    replay(plan=str(plan))      the same cut, runs, order and lanes, for all calls of a bucket
    weft.compile(model, plan)   the same; also of a plan file, or of several plans

The text is data: that of a plan, or of several for the graphs of one model, one behind the other.
A graph takes the one that was made for it. A bare plan is lowered; one that is lowered runs as it
stands, if the verifier says that it is safe.
"""

from __future__ import annotations

from torchweft.errors import StrategyError
from torchweft.plan.improve.genes import from_genes, genes_of
from torchweft.plan.plan import Plan
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy


@strategy
def replay(s: Scheduler, *, plan: str = "") -> None:
    """The runs of a plan that was written before, given as its text."""
    written = Plan.parse_all(plan)
    plans = {each.digest: each for each in written}
    if len(plans) < len(written):
        raise StrategyError("replay: two of these plans are for one graph.", rule="graph")
    if not plans:
        s.sequential("no plan was given")
        return
    own = plans.get(s.graph.digest)
    if own is None:
        raise StrategyError(
            f"replay: none of these plans was made for graph {s.graph.name!r} ({s.graph.digest}); "
            f"they are for {', '.join(sorted(each.graph_name for each in plans.values()))}.",
            rule="graph",
        )
    for by in sorted({step.by for step in own.steps if step.by}):
        given, told = s.known.get(by), own.declaration.get(by)
        if given is None:
            raise StrategyError(
                f"replay: this plan has a kernel {by!r}, which its text does not hold. Give the "
                f"function: kernels={{{by!r}: ...}}.",
                rule="kernel",
            )
        if given.declaration != told:
            raise StrategyError(
                f"replay: the plan was written for a kernel that declares {told or 'nothing'}; the "
                f"one that is given declares {given.declaration or 'nothing'}.",
                rule="kernel",
            )
    if own.is_lowered:
        s.adopt(own)
    else:
        from_genes(s, genes_of(own))
