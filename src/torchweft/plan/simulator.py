"""The simulator: runs a `Plan` on a virtual clock and gives the `Trace` that it would leave.

    plan, context, machine, costs --simulate--> Trace          nothing runs, no clock is read
    plans of all ranks, ... --simulate_ranks--> a Trace a rank, all on one clock
    plan, ... --within_memory--> the same Trace, if each device holds the plan's peak

What is known of a runtime beyond the rates of a machine comes in as costs: a `Costs` of its own.

A step takes its cost at full rate; splits, merges, frees and waits take nothing. An issued op is
then *in flight* on its hosted lane, one after another in the order of issue. What is under way
leans on resources of its device:

    run, copy             1 of each of its `uses` (a copy: memory, or the link between the devices)
    network op in flight  1 of network, and `network_share` of compute

There are `capacity` lanes' worth of compute, memory and io, and one of network and of each link. If
more is asked for, all who ask get the same share of their full rate (of the network: one by the
seconds that a flight takes alone), and each goes as fast as its scarcest resource lets it. On top,
work that a device's `slowdowns` name takes so many times as long beside work of the other kind.
Without contention nobody slows another down: every step takes exactly its cost, and the lane of a
link takes any number of copies at once, each as soon as what it waits for is there.

One rank alone takes the others to be as fast. Ranks together meet: a collective starts on a rank
when its last member has reached it (its run, or its issue), a send and its receive start at once.
Messages of one direction between two ranks follow each other; those of others go beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torchweft.errors import PlanError, unknown
from torchweft.plan.context import Context
from torchweft.plan.machine import Costs, Machine
from torchweft.plan.plan import KINDS, Plan
from torchweft.plan.simulation.clock import VirtualClock
from torchweft.plan.simulation.prices import StepPrices
from torchweft.plan.trace import Trace

Item = TypeVar("Item")


def simulate(
    plan: Plan,
    context: Context,
    machine: Machine,
    costs: Costs | None = None,
    *,
    contention: bool = True,
) -> Trace:
    """The trace of one call, with contention or without, whatever memory the machine has.

    Raises `PlanError` (rule "deadlock", with where each lane stands) for a plan that cannot end.
    """
    return simulate_ranks([plan], context, machine, costs, contention=contention)[0]


def simulate_ranks(
    plans: Sequence[Plan],
    context: Context | Sequence[Context],
    machine: Machine | Sequence[Machine],
    costs: Costs | Sequence[Costs] | None = None,
    *,
    contention: bool = True,
) -> list[Trace]:
    """The traces of one call on all ranks together. Context, machine and costs are for all ranks,
    or one a rank. A critical path may pass through several ranks: each trace has its own spans.

    Raises `PlanError` (rule "deadlock", with where each lane stands) for plans that cannot end.
    """
    return _clock(plans, context, machine, costs, contention=contention).run()


def _clock(
    plans: Sequence[Plan],
    context: Context | Sequence[Context],
    machine: Machine | Sequence[Machine],
    costs: Costs | Sequence[Costs] | None,
    *,
    contention: bool,
) -> VirtualClock:
    """The clock of these ranks, before the call begins."""
    if not plans:
        raise PlanError("ranks: there is no plan to simulate.", rule="ranks")
    contexts, machines = _each(context, len(plans)), _each(machine, len(plans))
    given = [Costs(item) for item in machines] if costs is None else _each(costs, len(plans))
    clock = VirtualClock(contention)
    for rank, plan in enumerate(plans):
        _check(plan)
        prices = StepPrices(plan, contexts[rank], machines[rank], given[rank])
        clock.add(plan, prices)
    return clock


def within_memory(
    plan: Plan,
    context: Context,
    machine: Machine,
    costs: Costs | None = None,
    *,
    contention: bool = True,
) -> Trace:
    """The trace of one call, as `simulate` gives it, of a plan that keeps to the machine's memory.

    Raises `MemoryPlanError` (rule "memory", with the step of the peak) for one that holds more at
    once than some device's `memory_bytes`.
    """
    clock = _clock([plan], context, machine, costs, contention=contention)
    (trace,) = clock.run()
    clock.ranks[0].memory.check(machine)
    return trace


def _each(given: Item | Sequence[Item], count: int) -> list[Item]:
    """What is given for each of the ranks, or once for all."""
    items = list(given) if isinstance(given, Sequence) else [given] * count
    if len(items) != count:
        raise PlanError(f"ranks: {len(items)} are given for {count} ranks.", rule="ranks")
    return items


def _check(plan: Plan) -> None:
    """Refuse names that mean nothing here; whether the plan is safe is left to `verify`."""
    if unplaced := [place.value for place in plan.places if place.value not in plan.graph.value]:
        raise PlanError(f"name: place: {unknown('value', unplaced[0], plan.graph.value)}")
    for number, step in enumerate(plan.steps):
        names = plan.graph.op if step.kind in ("run", "issue", "complete") else plan.graph.value
        lanes = {step.lane, step.on if step.kind == "issue" else step.lane}
        good = step.kind in KINDS and plan.lane.keys() >= lanes and names.keys() >= {*step.names}
        first, last = step.parts or (0, plan.num_parts)
        if not good or not 0 <= first < last <= plan.num_parts:
            why = "its kind, lane, part, op or value does not exist; verify(plan) says which."
            text = f"name: step {number}: {why}\n{plan.excerpt(number)}"
            raise PlanError(text, rule="name", lane=step.lane, step=number)
