"""The search: changes a plan until the simulator says that it is quicker, within a budget.

    plan, context, machine, costs --improve--> Plan       never slower than it was, if simulated

A candidate is data, its `Genes`: the cut, and the runs, the most urgent first, each with its parts
(several: a merged run) and its lane. `from_genes` writes it: of the runs that are ready it records
the most urgent one, so every order is legal. Phases:

    1. cuts       even, and with a small first or last part, which nothing covers; in the order of
                  `overlap`, and by list scheduling: the run that can start first goes first, of
                  several the one with the longest way to the end, on the lane where it ends first
    2. merges     of the best of these: all ops of a kind in one run, kind by kind, where parts cost
                  more than they bring
    3. annealing  move a border, a run, a lane; merge or part the runs of an op, or of all ops of
                  its kind; more parts, fewer parts; a new list. A worse one may be kept, the less
                  the more is done

A candidate is written, lowered and simulated: the budget is how many are. The search ends early
where the bound is met. One takes about 0.1 ms a run: 8 layers of a transformer (33 ops) in two
parts 7 ms, in four 12 ms, in eight 24 ms. So 200 take 2 to 5 seconds there; phases 1 and 2 need
about 40 and bring most of it; `searched` ends after MAX_RUNS runs. What is the best so far is
verified. No clock is read: equal seeds, equal plans.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise

from torchweft.errors import MemoryPlanError, PlanError, StrategyError
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Op
from torchweft.plan.improve.bound import INF, bound
from torchweft.plan.improve.genes import Genes, from_genes, genes_of, ranges_of
from torchweft.plan.improve.lists import Lists
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, Machine
from torchweft.plan.plan import Plan, Range
from torchweft.plan.simulator import within_memory
from torchweft.plan.trace import format_s
from torchweft.plan.verify import verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy

BUDGET = 200
MAX_RUNS = 25_000  # of all plans that `searched` simulates: some seconds, whatever the graph
HEAT = 0.01  # of the best makespan: what a move may cost at the start
GRAINS = 64  # borders move by a 64th of the batch, and no part is smaller
NEAR = 0.005  # of the bound: near enough, costs are not known any better


def improve(
    plan: Plan,
    context: Context,
    machine: Machine,
    costs: Costs | None = None,
    *,
    budget: int = BUDGET,
    seed: int = 0,
    max_parts: int = 8,
    max_runs: float = INF,
) -> Plan:
    """A bare plan that takes no longer than this bare plan, in this context, if simulated. One
    that fits the machine's memory, if the search finds one.

    budget: how many plans are simulated; max_runs: how many runs they may have, all together.
    max_parts: how many parts a new plan may have.
    Raises `StrategyError` for a plan that is lowered already.
    """
    if plan.is_lowered:
        raise StrategyError("improve: this plan is lowered; give the plan as it was written.")
    search = _Search(plan, context, machine, costs or Costs(machine), budget, seed, max_parts)
    first_s, search.runs_left = search.best_s, max_runs
    search.go()
    if search.best_s >= first_s:
        return plan
    return replace(search.best, history=(*plan.history, search.note(first_s)))


@strategy
def searched(s: Scheduler, *, budget: int = BUDGET, seed: int = 0, parts: int = 8) -> None:
    """What the search makes of the ops one by one; up to so many parts."""
    plain = Scheduler(s.graph, s.context, s.machine, s.costs)
    plain.sequential()
    search = _Search(plain.finish(""), s.context, s.machine, s.costs, budget, seed, parts)
    search.runs_left = MAX_RUNS
    first_s = search.best_s
    search.go()
    s.notes.append(search.note(first_s))
    from_genes(s, genes_of(search.best))


class _Search:
    """The best plan so far, and what is left of the budget."""

    def __init__(
        self,
        plan: Plan,
        context: Context,
        machine: Machine,
        costs: Costs,
        budget: int,
        seed: int,
        max_parts: int,
    ) -> None:
        # Plain numbers: what is compared here must not cut the buckets of a plan.
        self.context = replace(
            context, batch=int(context.batch), num_tokens=int(context.num_tokens)
        )
        self.graph, self.machine, self.costs = plan.graph, machine, costs
        self.kernels, self.budget, self.left = plan.kernels, budget, budget
        self.runs_left: float = INF
        self.draw = random.Random(seed)
        self.lists = Lists(self.graph, self.context, machine, costs)
        # Kernels and edges stay where they are: their parts and their ops are their author's.
        chosen = any(step.by or step.after for step in plan.steps)
        self.splits = plan.graph.batch is not None and not chosen
        self.max_parts = min(max_parts, self.context.batch) if self.splits else 1
        self.rule = plan.cut.rule
        self.least_s = bound(self.graph, self.context, machine, costs).seconds
        self.grain = Fraction(1, max(1, min(GRAINS, self.context.batch)))
        self.known: dict[Genes, float] = {}
        self.best, self.genes = plan, genes_of(plan)
        self.num_large = 0  # candidates that need more memory than there is
        try:
            self.best_s = self._time(lower(plan))
        except MemoryPlanError as error:
            if error.rule != "memory":
                raise
            self.best_s = INF  # what fits is better
        self.known[self.genes] = self.best_s
        self.kinds: dict[int, list[Op]] = {}
        for op in self.graph.ops:
            self.kinds.setdefault(self.graph.structure[op.name], []).append(op)

    @property
    def over(self) -> bool:
        used_up = self.left <= 0 or self.runs_left <= 0
        return used_up or self.best_s <= self.least_s * (1 + NEAR)

    def note(self, first_s: float) -> str:
        """A line for the history of the plan."""
        tried = f"{self.budget - self.left} plans simulated"
        near = f"bound {format_s(self.least_s)}"
        if self.num_large:
            tried += f", {self.num_large} of them too large for the memory"
        first, best = (
            format_s(s) if s < INF else "no plan that fits" for s in (first_s, self.best_s)
        )
        return f"improve: {first} to {best}, {near}, {tried}"

    def go(self) -> None:
        """All phases, until the budget is used up or the bound is met."""
        cuts: list[tuple[float, Cut]] = []
        for cut in self._cuts() if self.splits else ():
            for ordered in (self.lists.by_op, self.lists.by_urgency):
                cuts.append((self._try(ordered(cut, {}))[0], cut))
        if cuts:
            self._merge_kinds(min(cuts, key=lambda item: item[0])[1])
        # From the best in parts first: from one part it is far to any other plan.
        parted = {g: s for g, s in self.known.items() if g.cut.num_parts > 1 and s < INF}
        if parted and self.genes.cut.num_parts == 1:
            self._anneal(min(parted, key=lambda genes: parted[genes]), self.left // 2)
        self._anneal(self.genes, 0)

    def _time(self, lowered: Plan) -> float:
        return within_memory(lowered, self.context, self.machine, self.costs).makespan_s

    def _try(self, genes: Genes) -> tuple[float, Genes]:
        """The makespan of a candidate (infinite if it cannot be), and the genes in its order."""
        if all(step.parts is None for step in genes.runs):
            genes = replace(genes, cut=Cut())
        if self.over or genes in self.known:
            return self.known.get(genes, INF), genes
        scheduler = Scheduler(self.graph, self.context, self.machine, self.costs)
        try:
            from_genes(scheduler, genes, self.kernels)
            plan = scheduler.finish("search")
            written = genes_of(plan)
            if written not in self.known:
                self.known[written] = INF
                self.known[written] = self._look(plan, written)
        except (StrategyError, MemoryPlanError, PlanError) as error:
            # Too few rows for a part; or a value would be needed in one piece that comes in two
            # from a device; or the memory does not hold it.
            self.known[genes] = INF
            self.num_large += error.rule == "memory" and isinstance(error, MemoryPlanError)
            return INF, genes
        seconds = self.known[genes] = self.known[written]
        return seconds, written

    def _look(self, plan: Plan, genes: Genes) -> float:
        """The makespan of a plan; verified and kept if it is the best so far."""
        self.left, self.runs_left = self.left - 1, self.runs_left - len(genes.runs)
        lowered = lower(plan)
        seconds = self._time(lowered)
        if seconds < self.best_s:
            verify(lowered)
            self.best, self.best_s, self.genes = plan, seconds, genes
        return seconds

    # 1. and 2.: what is tried in any case.

    def _cuts(self) -> Iterator[Cut]:
        for number in sorted({2, 3, 4, 6, self.max_parts}):
            if 1 < number <= self.max_parts:
                yield Cut.even(number, self.rule)
                small = Fraction(1, 2 * number - 1)
                yield Cut((small, *[2 * small] * (number - 1)), self.rule)
                yield Cut((*[2 * small] * (number - 1), small), self.rule)

    def _merge_kinds(self, cut: Cut) -> None:
        """Kind by kind: in one run if that is quicker, given what was found for the others. The
        kind whose parts cost most comes first."""
        once: dict[str, Sequence[Range | None]] = {}
        least_s, _ = self._try(self.lists.by_urgency(cut, once))
        kinds = [ops for ops in self.kinds.values() if not all(op.whole for op in ops)]
        for chosen in sorted(kinds, key=lambda ops: -sum(self.lists.extra_s(cut, o) for o in ops)):
            more = {**once, **{op.name: (None,) for op in chosen}}
            seconds, _ = self._try(self.lists.by_urgency(cut, more))
            if seconds < least_s:
                once, least_s = more, seconds

    # 3.

    def _anneal(self, here: Genes, until: int) -> None:
        """Walk from here until so much of the budget is left."""
        start, here_s, tries = self.left, self.known[here], 0
        while not self.over and self.left > until and tries < 3 * self.budget:
            tries += 1
            seconds, genes = self._try(self._move(here))
            heat_s = HEAT * self.best_s * (self.left - until) / (start - until)
            if seconds <= here_s + heat_s * self.draw.expovariate(1.0):
                here, here_s = genes, seconds

    def _move(self, genes: Genes) -> Genes:
        moves = [self._shift, self._lane, self._relist]
        if self.splits and self.max_parts > 1:
            moves += [self._border, self._merge, self._merge, self._parts]
        return self.draw.choice(moves)(genes)

    def _shift(self, genes: Genes) -> Genes:
        """A run, or all of a kind, more or less urgent."""
        runs, far = list(genes.runs), max(2, len(genes.runs) // 8)
        at = self.draw.randrange(len(runs))
        step = runs.pop(at)
        runs.insert(max(0, at + self.draw.randint(-far, far)), step)
        return replace(genes, runs=tuple(runs))

    def _lane(self, genes: Genes) -> Genes:
        chosen = {op.name for op in self._some_ops()}
        lanes = self.machine.lanes_for(self.graph.op[min(chosen)])
        lane = self.draw.choice(lanes).name
        runs = [
            step._replace(lane=lane) if chosen.issuperset(step.names) and not step.by else step
            for step in genes.runs
        ]
        return replace(genes, runs=tuple(runs))

    def _relist(self, genes: Genes) -> Genes:
        return self.lists.by_urgency(genes.cut, ranges_of(genes)) if self.splits else genes

    def _border(self, genes: Genes) -> Genes:
        """A border between two parts to another row."""
        borders = [Fraction(0), *accumulate(genes.cut.fractions)]
        if len(borders) < 3:
            return self._parts(genes)
        at, far = self.draw.randrange(1, len(borders) - 1), self.draw.choice((-8, -3, -1, 1, 3, 8))
        border = (round(borders[at] / self.grain) + far) * self.grain
        low, high = borders[at - 1] + self.grain, borders[at + 1] - self.grain
        if low > high:
            return self._shift(genes)
        borders[at] = min(max(border, low), high)
        shares = tuple(end - start for start, end in pairwise(borders))
        return replace(genes, cut=Cut(shares, self.rule))

    def _merge(self, genes: Genes) -> Genes:
        """Merge two runs of some ops, or all of them; or run them part by part again."""
        number, merged = genes.cut.num_parts, dict(ranges_of(genes))
        if number < 2:
            return self._parts(genes)
        at, how = self.draw.randrange(number - 1), self.draw.random()
        for op in self._some_ops():
            if op.whole:
                continue
            parts: list[Range | None] = [(part, part + 1) for part in range(number)]
            if how < 0.4:
                parts[at : at + 2] = [(at, at + 2)]
            merged[op.name] = [None] if how > 0.7 or len(parts) == 1 else parts
        return self.lists.by_urgency(genes.cut, merged)

    def _parts(self, genes: Genes) -> Genes:
        """A part more, or one less. Ops that ran once still do; out of one part, drawn kinds do."""
        shares = list(genes.cut.fractions)
        if len(shares) == 1:
            first = self.draw.randint(1, max(1, int(1 / self.grain) - 1)) * self.grain
            kinds = [ops for ops in self.kinds.values() if self.draw.random() < 0.5]
            once = {op.name: (None,) for ops in kinds for op in ops}
            return self.lists.by_urgency(Cut((first, 1 - first), self.rule), once)
        at = self.draw.randrange(len(shares))
        more = self.draw.random() < 0.5
        if more and len(shares) < self.max_parts and shares[at] >= 2 * self.grain:
            shares[at : at + 1] = [shares[at] / 2] * 2
        else:
            at = min(at, len(shares) - 2)
            shares[at : at + 2] = [shares[at] + shares[at + 1]]
        once = {n: (None,) for n, parts in ranges_of(genes).items() if list(parts) == [None]}
        return self.lists.by_urgency(Cut(tuple(shares), self.rule), once)

    def _some_ops(self) -> list[Op]:
        """An op, or all ops of its kind."""
        op = self.draw.choice(self.graph.ops)
        return [op] if self.draw.random() < 0.5 else self.kinds[self.graph.structure[op.name]]
