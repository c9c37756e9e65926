"""The `Genes` of a plan: a candidate of the search as data, and the function that writes it.

plan --genes_of--> Genes --from_genes--> the same steps        cut, and runs, most urgent first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchweft.plan.context import Cut
from torchweft.plan.graph import Graph
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.plan import Plan, Range, Step
from torchweft.plan.precedence import Pair
from torchweft.plan.write.scheduler import Scheduler


@dataclass(frozen=True)
class Genes:
    """A candidate as data: the cut, and the runs, the most urgent first."""

    cut: Cut
    runs: tuple[Step, ...]


def genes_of(plan: Plan) -> Genes:
    """The genes that write a bare plan again."""
    return Genes(plan.cut, tuple(step for step in plan.steps if step.kind == "run"))


def from_genes(s: Scheduler, genes: Genes, kernels: Mapping[str, Kernel] | None = None) -> None:
    """Write a candidate: always the most urgent of the runs that are ready.

    Raises `StrategyError` if its runs are not those of the graph, or the batch has too few rows.
    """
    if genes.cut.num_parts > 1:
        s.split(genes.cut)
    waiting = [(step, _pairs(s.graph, genes.cut, step)) for step in genes.runs]
    while waiting:
        ready = {(op.name, part or 0) for op, part in s.ready()}
        at = next((i for i, (_, pairs) in enumerate(waiting) if pairs <= ready), 0)
        step, _ = waiting.pop(at)
        by = (kernels or {}).get(step.by, step.by) if step.by else None
        s.run(step.names, *range(*(step.parts or (0, 0))), lane=step.lane, replace=by)
    if genes.cut.num_parts > 1:
        s.merge()


def _pairs(graph: Graph, cut: Cut, step: Step) -> set[Pair]:
    """What must be ready for a run; the ops of a kernel make each other ready."""
    op = graph.op[step.names[0]]
    whole = op.whole or cut.num_parts == 1
    return {(op.name, part) for part in range(*(step.parts or (0, 1 if whole else cut.num_parts)))}


def ranges_of(genes: Genes) -> dict[str, list[Range | None]]:
    """The parts of the runs of each op."""
    ranges: dict[str, list[Range | None]] = {}
    for step in sorted(genes.runs, key=lambda step: step.parts or (0, 0)):
        for name in step.names:
            ranges.setdefault(name, []).append(step.parts)
    return ranges
