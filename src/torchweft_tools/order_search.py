"""The best order for a given cut, by CP-SAT: a plan, and seconds that no plan of this cut can beat.

    graph, cut, context, machine, costs --bound_by_search--> OrderBound: seconds, plan

For small graphs, where `plan.improve.bound` leaves a gap. It needs the package `ortools`. A plan
chooses for each op how its parts are grouped into runs, and for each run a lane and a start:

    run, way      one of them for each part; a way is a lane, or one that another lane issues for
    lanes         a lane does one thing at a time: runs, issues, completes, flights
    precedence    a part of an op starts behind the parts that it comes behind
    load          no resource does more work than its capacity allows

Where lanes share a resource their runs are taken at full rate, and copies between devices as free:
so the optimum is a lower bound in any case, and is met where nothing is shared. Times are rounded
down to whole ticks, a billionth of the makespan. The plan that is found is simulated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torchweft.errors import PlacementError
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Graph, Op
from torchweft.plan.improve import Genes, from_genes
from torchweft.plan.improve.bound import bound
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs, Lane, Machine
from torchweft.plan.plan import Plan, Range, Step
from torchweft.plan.precedence import precedence
from torchweft.plan.simulator import simulate
from torchweft.plan.verify import verify
from torchweft.plan.write.scheduler import Scheduler
from torchweft_tools.cp_sat import DEFAULT_S, MAX_TICKS, to_ticks

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver


@dataclass(frozen=True)
class OrderBound:
    """The best plan that was found for a cut, and seconds that no plan of the cut can beat."""

    seconds: float
    plan: Plan
    plan_s: float

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven to be the best of its cut, but for rounding."""
        return self.plan_s <= self.seconds * (1 + 1e-6)


def bound_by_search(
    graph: Graph,
    cut: Cut,
    context: Context,
    machine: Machine,
    costs: Costs | None = None,
    limit_s: float = DEFAULT_S,
) -> OrderBound:
    """A bound for all plans of a cut, and the best plan found within `limit_s` seconds.

    Raises `PlacementError` if ortools is not installed, `StrategyError` if the batch cannot be cut.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        cure = "pip install ortools (requirements/dev.txt has the version), or use bound"
        text = f"cp-sat: the package ortools is not installed: {cure}."
        raise PlacementError(text, rule="cp-sat") from None
    costs = costs or Costs(machine)
    first = _plan(graph, context, machine, costs, Genes(cut, tuple(_by_op(graph, cut, machine))))
    first_s = simulate(lower(first), context, machine, costs).makespan_s
    least_s = bound(graph, context, machine, costs).seconds  # of all cuts, so of this one
    model: CpModel = cp_model.CpModel()
    tick_s = first_s / MAX_TICKS if first_s > 0 else 1.0
    orders = _Orders(model, graph, cut, context, machine, costs, tick_s, int(first_s / tick_s) + 2)
    model.add(orders.makespan >= int(to_ticks(least_s, tick_s)))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = max(2, min(8, os.cpu_count() or 1))
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return OrderBound(min(least_s, first_s), first, first_s)
    plan = _plan(graph, context, machine, costs, Genes(cut, orders.runs(solver)))
    plan_s = simulate(lower(plan), context, machine, costs).makespan_s
    if plan_s > first_s:
        plan, plan_s = first, first_s
    bound_s = max(least_s, solver.best_objective_bound * tick_s)
    verify(lower(plan))
    return OrderBound(min(bound_s, plan_s), plan, plan_s)


def _plan(graph: Graph, context: Context, machine: Machine, costs: Costs, genes: Genes) -> Plan:
    scheduler = Scheduler(graph, context, machine, costs)
    from_genes(scheduler, genes)
    return scheduler.finish("bound_by_search")


def _by_op(graph: Graph, cut: Cut, machine: Machine) -> Iterator[Step]:
    """Each op on all its parts before the next op."""
    for op in graph.ops:
        once = op.whole or cut.num_parts == 1
        for parts in [None] if once else [(part, part + 1) for part in range(cut.num_parts)]:
            yield Step("run", machine.lane_for(op).name, (op.name,), parts)


class _Choice(NamedTuple):
    """A run of an op on a lane that a plan may choose."""

    op: Op
    parts: Range
    lane: Lane
    chosen: Any
    start: Any


class _Orders:
    """The model: what a plan chooses, and what holds for every plan."""

    def __init__(
        self,
        model: CpModel,
        graph: Graph,
        cut: Cut,
        context: Context,
        machine: Machine,
        costs: Costs,
        tick_s: float,
        most: int,
    ) -> None:
        self.model, self.graph, self.context, self.machine = model, graph, context, machine
        self.costs, self.tick_s, self.most, self.number = costs, tick_s, most, cut.num_parts
        self.bounds: tuple[int, ...] = (0, context.batch)
        if cut.num_parts > 1:
            requests = context.tokens_per_request
            self.bounds = cut.bounds(context.batch, requests, graph.row_unit)
        self.makespan = self._time()
        self.lanes: dict[str, list[Any]] = {lane.name: [] for lane in machine.lanes}
        self.asked: dict[tuple[str, str], list[Any]] = {}
        self.choices: list[_Choice] = []
        self.start: dict[tuple[str, int], Any] = {}
        self.end: dict[tuple[str, int], Any] = {}
        self.within: dict[tuple[str, int], list[Any]] = {}  # of runs with this part and the next
        for op in graph.ops:
            self._add_op(op)
        for intervals in self.lanes.values():
            model.add_no_overlap(intervals)
        self._add_precedence()
        self._add_loads()
        model.minimize(self.makespan)

    def runs(self, solver: CpSolver) -> tuple[Step, ...]:
        """The chosen runs, by their starts."""
        chosen = [item for item in self.choices if solver.boolean_value(item.chosen)]
        chosen.sort(key=lambda item: (solver.value(item.start), item.parts))
        steps = []
        for op, parts, lane, _, _ in chosen:
            whole = op.whole or parts == (0, self.number)
            steps.append(Step("run", lane.name, (op.name,), None if whole else parts))
        return tuple(steps)

    def _time(self) -> Any:
        return self.model.new_int_var(0, self.most, "")

    def _ticks(self, seconds: float) -> int:
        return int(to_ticks(seconds, self.tick_s))

    def _add_op(self, op: Op) -> None:
        count = 1 if op.whole else self.number
        ranges = [(i, j) for i in range(count) for j in range(i + 1, count + 1)]
        covers: list[list[Any]] = [[] for _ in range(count)]
        for part in range(count):
            self.start[op.name, part], self.end[op.name, part] = self._time(), self._time()
            self.model.add(self.end[op.name, part] <= self.makespan)
            self.within[op.name, part] = []
        for parts in ranges:
            span = (0, self.number) if op.whole else parts
            env = self.context.env(self.graph.batch, self.bounds[span[1]] - self.bounds[span[0]])
            for lane in self.machine.lanes_for(op):
                chosen = self.model.new_bool_var("")
                seconds = self.costs.run_s(self.graph, op, env, lane.device)
                self._add_run(_Choice(op, parts, lane, chosen, self._time()), seconds)
                for part in range(*parts):
                    covers[part].append(chosen)
                    if part + 1 < parts[1]:
                        self.within[op.name, part].append(chosen)
        for some in covers:
            self.model.add_exactly_one(some)

    def _add_run(self, run: _Choice, seconds: float) -> None:
        """Its intervals on lanes: a run, or an issue, a flight and a complete."""
        model, (op, parts, lane, chosen, start) = self.model, run
        size = self._ticks(seconds)
        self.choices.append(run)
        self.asked.setdefault((lane.device, op.uses), []).append(size * chosen)
        if share := self.machine.device[lane.device].network_share if op.uses == "network" else 0:
            eaten = self._ticks(share * seconds) * chosen
            self.asked.setdefault((lane.device, "compute"), []).append(eaten)
        model.add(start >= self._ticks(self.costs.begin_s(lane.device)))
        if lane.via is None:
            end = start + size
            self._occupy(lane.name, start, size, chosen)
        else:
            host, flight, complete = self._ticks(self.costs.host_s(lane.device)), *self._times(2)
            model.add(flight >= start + host)
            model.add(complete >= flight + size)
            end = complete + host
            self._occupy(lane.via, start, host, chosen)
            self._occupy(lane.name, flight, size, chosen)
            self._occupy(lane.via, complete, host, chosen)
        for part in range(*parts):
            model.add(self.start[op.name, part] == start).only_enforce_if(chosen)
            model.add(self.end[op.name, part] == end).only_enforce_if(chosen)

    def _times(self, count: int) -> list[Any]:
        return [self._time() for _ in range(count)]

    def _occupy(self, lane: str, start: Any, size: int, chosen: Any) -> None:
        interval = self.model.new_optional_fixed_size_interval_var(start, size, chosen, "")
        self.lanes[lane].append(interval)

    def _add_precedence(self) -> None:
        for pair, ahead in precedence(self.graph, self.number).items():
            for other in ahead:
                rule = self.model.add(self.start[pair] >= self.end[other])
                if other[0] == pair[0]:  # parts in turn, unless one run has both
                    rule.only_enforce_if([run.negated() for run in self.within[other]])

    def _add_loads(self) -> None:
        """Capacities in thousandths, rounded up."""
        for (device, uses), terms in self.asked.items():
            capacity = 1.0 if uses == "network" else self.machine.device[device].capacity
            self.model.add(1000 * sum(terms) <= int(1000 * capacity + 1) * self.makespan)
