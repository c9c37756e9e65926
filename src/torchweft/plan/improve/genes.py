"""The `Genes` of a plan: a candidate of the search as data, and the function that writes it.

plan --genes_of--> Genes --from_genes--> the same steps        cut, and runs, most urgent first
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchweft.plan.context import Cut
from torchweft.plan.graph import Graph
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.plan import Pair, Plan, Range, Step, pairs_of
from torchweft.plan.precedence import precedence
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
    graph, number, waiting = s.graph, genes.cut.num_parts, list(genes.runs)
    before, ended = precedence(graph, number), set[Pair]()
    needs: dict[Step, set[Pair]] = {}  # the ops and parts of one run make each other ready
    for step in waiting:
        own = pairs_of(graph, number, step.names, step.parts)
        ahead = {pair for each in own for pair in before[each]}
        needs[step] = (ahead - {*own}) | _earlier(graph, number, step)
    while waiting:
        step = waiting.pop(next((i for i, run in enumerate(waiting) if needs[run] <= ended), 0))
        by = (kernels or {}).get(step.by, step.by) if step.by else None
        after = [
            (op, at) for op, r in step.after for at in (range(*r) if r is not None else [None])
        ]
        s.run(step.names, *range(*(step.parts or (0, 0))), lane=step.lane, replace=by, after=after)
        ended.update(pairs_of(graph, number, step.names, step.parts))
    if genes.cut.num_parts > 1:
        s.merge()


def _earlier(graph: Graph, num_parts: int, step: Step) -> set[Pair]:
    """What a run comes after by its edges."""
    return {p for name, parts in step.after for p in pairs_of(graph, num_parts, (name,), parts)}


def ranges_of(genes: Genes) -> dict[str, list[Range | None]]:
    """The parts of the runs of each op."""
    ranges: dict[str, list[Range | None]] = {}
    for step in sorted(genes.runs, key=lambda step: step.parts or (0, 0)):
        for name in step.names:
            ranges.setdefault(name, []).append(step.parts)
    return ranges
