"""Candidates by list scheduling: the `Lists` of runs of a graph, at their costs when alone.

cut, merged runs --by_op--> Genes           each op on all its parts before the next op
                 --by_urgency--> Genes      by when a run can start, and its way to the end
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchweft.errors import StrategyError
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Graph, Op
from torchweft.plan.improve.genes import Genes
from torchweft.plan.machine import Costs, Machine
from torchweft.plan.plan import Pair, Range, Step
from torchweft.plan.precedence import precedence

Ranges = Mapping[str, Sequence[Range | None]]
"""The parts of the runs of an op; an op that is not named runs part by part."""


class Lists:
    """Candidates by list scheduling, at the costs of runs when they are alone."""

    def __init__(self, graph: Graph, context: Context, machine: Machine, costs: Costs) -> None:
        self.graph, self.context, self.machine, self.costs = graph, context, machine, costs
        self._before: dict[int, dict[Pair, list[Pair]]] = {}
        self._seconds: dict[tuple[str, int, str], float] = {}

    def extra_s(self, cut: Cut, op: Op) -> float:
        """What parts of an op take more than all of it in one run."""
        rows = self.context.batch
        whole_s = min(self._ways(op.name, rows))[0]
        sizes = [max(1, round(share * rows)) for share in cut.fractions]
        return sum(min(self._ways(op.name, size))[0] for size in sizes) - whole_s

    def by_op(self, cut: Cut, merged: Ranges) -> Genes:
        """Each op on all its parts before the next op, as `overlap` has it."""
        lane = {op.name: self.machine.lane_for(op).name for op in self.graph.ops}
        runs = self._runs(cut, merged)
        return Genes(cut, tuple(Step("run", lane[name], (name,), parts) for name, parts in runs))

    def by_urgency(self, cut: Cut, merged: Ranges) -> Genes:
        """The run that can start first, of several the one with the longest way to the end."""
        runs = self._runs(cut, merged)
        try:
            bounds = cut.bounds(
                self.context.batch, self.context.tokens_per_request, self.graph.row_unit
            )
        except StrategyError:  # too few rows: it cannot be written either
            return self.by_op(cut, merged)
        before = self._run_precedence(cut, runs)
        rows = [bounds[last] - bounds[first] for first, last in self._spans(cut, runs)]
        quickest = [self._ways(name, rows[at]) for at, (name, _) in enumerate(runs)]
        to_end = [min(seconds for seconds, _ in ways) for ways in quickest]
        for at in range(len(runs) - 1, -1, -1):
            for other in before[at]:
                least = min(seconds for seconds, _ in quickest[other])
                to_end[other] = max(to_end[other], least + to_end[at])
        return Genes(cut, tuple(_schedule(runs, before, quickest, to_end)))

    def _runs(self, cut: Cut, merged: Ranges) -> list[tuple[str, Range | None]]:
        runs: list[tuple[str, Range | None]] = []
        each = [(part, part + 1) for part in range(cut.num_parts)]
        for op in self.graph.ops:
            once = op.whole or cut.num_parts == 1
            runs += [(op.name, parts) for parts in ((None,) if once else merged.get(op.name, each))]
        return runs

    def _spans(self, cut: Cut, runs: Sequence[tuple[str, Range | None]]) -> list[Range]:
        return [parts or (0, cut.num_parts) for _, parts in runs]

    def _run_precedence(
        self, cut: Cut, runs: Sequence[tuple[str, Range | None]]
    ) -> list[list[int]]:
        number = cut.num_parts
        if number not in self._before:
            self._before[number] = precedence(self.graph, number)
        at: dict[Pair, int] = {}
        pairs: list[list[Pair]] = []
        for index, ((name, _), span) in enumerate(zip(runs, self._spans(cut, runs), strict=True)):
            whole = self.graph.op[name].whole
            pairs.append([(name, part) for part in (range(1) if whole else range(*span))])
            at |= dict.fromkeys(pairs[-1], index)
        before = self._before[number]
        ahead = [{at[other] for pair in some for other in before[pair]} for some in pairs]
        return [sorted(some - {index}) for index, some in enumerate(ahead)]

    def _ways(self, name: str, rows: int) -> list[tuple[float, str]]:
        """The seconds of a run on each lane that takes it; on those without a thread if there are
        some: a network op on a lane with a thread keeps others from running there."""
        op, ways = self.graph.op[name], []
        lanes = self.machine.lanes_for(op)
        for lane in [lane for lane in lanes if lane.via] or lanes:
            key = (name, rows, lane.device)
            if key not in self._seconds:
                env = self.context.env(self.graph.batch, rows)
                self._seconds[key] = self.costs.run_s(self.graph, op, env, lane.device)
            host_s = 2 * self.costs.host_s(lane.device) if lane.via else 0.0
            ways.append((self._seconds[key] + host_s, lane.name))
        return ways


def _schedule(
    runs: Sequence[tuple[str, Range | None]],
    before: Sequence[Sequence[int]],
    ways: Sequence[Sequence[tuple[float, str]]],
    to_end: Sequence[float],
) -> Iterator[Step]:
    """The runs in the order in which they start, each on the lane where it ends first."""
    after: list[list[int]] = [[] for _ in runs]
    missing = [len(ahead) for ahead in before]
    for index, ahead in enumerate(before):
        for other in ahead:
            after[other].append(index)
    ready = [index for index, count in enumerate(missing) if not count]
    free: dict[str, float] = {}
    end = [0.0] * len(runs)
    while ready:
        best: Any = None
        for index in ready:
            known_s = max((end[other] for other in before[index]), default=0.0)
            starts = [(max(known_s, free.get(lane, 0.0)), s, lane) for s, lane in ways[index]]
            start, seconds, lane = min(starts, key=lambda way: way[0] + way[1])
            key = (start, -to_end[index], index)
            if best is None or key < best[0]:
                best = key, index, start + seconds, lane
        _, index, end[index], lane = best
        free[lane] = end[index]
        ready.remove(index)
        for later in after[index]:
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
        name, parts = runs[index]
        yield Step("run", lane, (name,), parts)
