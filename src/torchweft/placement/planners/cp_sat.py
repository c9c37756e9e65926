"""CP-SAT: the solver of OR-tools, which proves a bound. It needs the package `ortools`.

    on[group][device]     exactly one device a group; ops of a device do not overlap
    start[op]             after each input's end, and its way from where it is made to here
    load cuts             no device is busy for longer than the makespan
    head and tail cuts    no op starts before, or ends too late for, the shortest way (`heads`,
                          `tails`); both depend on its device

Equal devices without transfers and limits need no device a op: at most so many ops at once
(a cumulative constraint), and devices are given out afterwards. For throughput there are no times:
loads of devices and links, each value once to each device. Times are whole numbers (`ticks`).
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchweft.errors import PlacementError
from torchweft.placement.bounds import heads, tails
from torchweft.placement.draft import run
from torchweft.placement.placement import Placement, placed
from torchweft.placement.planners.stages import best_quick
from torchweft.placement.planners.ticks import in_ticks, to_ticks
from torchweft.placement.problem import INF, Problem

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

DEFAULT_S = 10.0
LOAD_S = 1.2
"""What loading the solver takes, once a process; half of it on a quick machine."""
SIZE_S = 2e-5  # to write one variable or constraint of it


def is_loaded() -> bool:
    """Whether the solver has been loaded in this process."""
    return "ortools.sat.python.cp_model" in sys.modules


def writing_s(problem: Problem) -> float:
    """About what it takes to write a problem down for the solver."""
    return SIZE_S * (problem.num_ops + len(problem.edges)) * problem.num_devices


def cp_sat(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    start: Placement | None = None,
) -> Placement:
    """The best placement found by the deadline (10 s if there is none), with a proven bound.

    Where the deadline leaves no time to load the solver and to write the problem down, this is the
    best of the quick planners. Raises `PlacementError` if ortools is not installed.
    """
    deadline_s = DEFAULT_S if deadline_s is None else deadline_s
    ends_s = time.perf_counter() + deadline_s
    if find_spec("ortools") and deadline_s < writing_s(problem) + (not is_loaded()) * LOAD_S / 2:
        return start or best_quick(problem, ends_s)
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        cure = "pip install ortools (requirements/dev.txt has the version), or use portfolio"
        text = f"cp-sat: the package ortools is not installed: {cure}."
        raise PlacementError(text, rule="cp-sat") from None
    first = start or best_quick(problem, ends_s)
    small, tick_s = in_ticks(problem, first.score_s)
    model: CpModel = cp_model.CpModel()
    writer = _writer(model, small, first, tick_s)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, ends_s - time.perf_counter())
    solver.parameters.num_workers = max(2, min(8, os.cpu_count() or 1))
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return first  # not even the hint was taken in within the time
    found = placed(problem, *writer.answer(solver))
    found = min(found, first, key=lambda item: item.score_s)
    bound_s = max(0.0, solver.best_objective_bound) * tick_s
    return placed(problem, found.device, found.order, bound_s=min(bound_s, found.score_s))


def _writer(model: CpModel, small: Problem, first: Placement, tick_s: float) -> Any:
    if small.objective == "throughput":
        return _Stream(model, small, first, tick_s)
    return (_Equal if _equal(small) else _Unlike)(model, small, first)


def _equal(problem: Problem) -> bool:
    """Whether it does not matter which device runs an op."""
    free = not any(any(map(any, m)) for preds in problem.preds for _, m in preds)
    alike = all(len(set(row)) == 1 for row in (*problem.seconds, *problem.ready_s))
    return free and alike and problem.free


class _Devices:
    """One variable for each group and device, and the memory limits on them."""

    def __init__(self, model: CpModel, problem: Problem, first: Placement) -> None:
        self.model, self.problem = model, problem
        self.on: list[dict[int, Any]] = [{} for _ in problem.ops]
        for group in problem.groups:
            found = {d: model.new_bool_var("") for d in problem.allowed[group[0]]}
            model.add_exactly_one(found.values())
            for op in group:
                self.on[op] = found
            for device, variable in found.items():
                model.add_hint(variable, first.device[group[0]] == device)
        if problem.limited:
            for device, room in enumerate(problem.room_bytes):
                if room < INF:
                    self._limit(device, int(room))

    def _limit(self, device: int, room: int) -> None:
        terms = []
        for hold in self.problem.holds:
            ons = [self.on[op][device] for op in hold.ops if device in self.on[op]]
            ons = list({variable.index: variable for variable in ons}.values())
            if len(ons) > 1:
                there = self.model.new_bool_var("")
                for variable in ons:
                    self.model.add_implication(variable, there)
                ons = [there]
            terms += [math.ceil(hold.num_bytes) * variable for variable in ons]
        self.model.add(sum(terms) <= room)

    def pick(self, op: int, row: Sequence[float]) -> Any:
        """The entry of the row for the op's device, as an expression."""
        return sum(int(row[device]) * variable for device, variable in self.on[op].items())

    def chosen(self, solver: CpSolver) -> list[int]:
        return [
            next(device for device, variable in on.items() if solver.boolean_value(variable))
            for on in self.on
        ]


class _Unlike:
    """Unlike devices: where and when."""

    def __init__(self, model: CpModel, small: Problem, first: Placement) -> None:
        self.problem, self.where = small, _Devices(model, small, first)
        start_hint, end_hint = run(small, first.device, first.order)
        most, pick = int(max(end_hint)), self.where.pick
        self.start = [model.new_int_var(0, most, "") for _ in small.ops]
        makespan = model.new_int_var(0, most, "makespan")
        model.minimize(makespan)
        early, late = heads(small), tails(small)
        lanes: list[list[Any]] = [[] for _ in small.devices]
        ends = []
        for op, start in enumerate(self.start):
            seconds = small.seconds[op]
            model.add_hint(start, int(start_hint[op]))
            ends.append(start + pick(op, seconds))
            model.add(ends[op] >= pick(op, early[op]))  # head cut
            model.add(ends[op] + pick(op, late[op]) <= makespan)  # tail cut
            for device, on in self.where.on[op].items():
                size = int(seconds[device])
                lanes[device].append(
                    model.new_optional_fixed_size_interval_var(start, size, on, "")
                )
        for device, intervals in enumerate(lanes):
            model.add_no_overlap(intervals)
            loads = [
                int(small.seconds[op][device]) * on[device]
                for op, on in enumerate(self.where.on)
                if device in on
            ]
            model.add(sum(loads) <= makespan)  # load cut
        for op, preds in enumerate(small.preds):
            for source, ways in preds:
                model.add(self.start[op] >= ends[source])
                for device, on in self.where.on[source].items():
                    if any(ways[device]):
                        way = pick(op, ways[device])
                        model.add(self.start[op] >= ends[source] + way).only_enforce_if(on)

    def answer(self, solver: CpSolver) -> tuple[list[int], list[int]]:
        """Devices, and the order of the starts."""
        devices = self.where.chosen(solver)
        keys = []
        for op, start in enumerate(self.start):
            at = solver.value(start)
            keys.append((at, at + self.problem.seconds[op][devices[op]], op))
        return devices, [op for _, _, op in sorted(keys)]


class _Equal:
    """Equal devices without transfers: only when."""

    def __init__(self, model: CpModel, small: Problem, first: Placement) -> None:
        self.problem = small
        start_hint, end_hint = run(small, first.device, first.order)
        most = int(max(end_hint))
        self.start = [model.new_int_var(0, most, "") for _ in small.ops]
        makespan = model.new_int_var(0, most, "makespan")
        model.minimize(makespan)
        size = [int(row[0]) for row in small.seconds]
        early, late = heads(small), tails(small)
        for op, start in enumerate(self.start):
            model.add_hint(start, int(start_hint[op]))
            model.add(start + size[op] >= int(early[op][0]))
            model.add(start + size[op] + int(late[op][0]) <= makespan)
            for source, _ in small.preds[op]:
                model.add(start >= self.start[source] + size[source])
        intervals = [
            model.new_fixed_size_interval_var(start, size[op], "")
            for op, start in enumerate(self.start)
            if size[op]
        ]
        model.add_cumulative(intervals, [1] * len(intervals), small.num_devices)
        model.add(sum(size) <= makespan * small.num_devices)

    def answer(self, solver: CpSolver) -> tuple[list[int], list[int]]:
        """The device that is free first, for each op in the order of the starts."""
        at = [solver.value(start) for start in self.start]
        size = [row[0] for row in self.problem.seconds]
        order = sorted(range(self.problem.num_ops), key=lambda op: (at[op], at[op] + size[op], op))
        free, devices = [0.0] * self.problem.num_devices, [0] * self.problem.num_ops
        for op in order:
            devices[op] = free.index(min(free))
            free[devices[op]] = at[op] + size[op]
        return devices, order


class _Stream:
    """Throughput: only where; what each device and each link has to do for one input."""

    def __init__(self, model: CpModel, small: Problem, first: Placement, tick_s: float) -> None:
        self.problem, self.where = small, _Devices(model, small, first)
        most = int(first.period_s / tick_s) + 1
        period = model.new_int_var(0, most, "period")
        model.minimize(period)
        for device in range(small.num_devices):
            loads = [
                int(small.seconds[op][device]) * on[device]
                for op, on in enumerate(self.where.on)
                if device in on
            ]
            model.add(sum(loads) <= period)
        readers: dict[tuple[int, int, str], list[int]] = {}
        for edge in small.edges:
            if edge.value:
                readers.setdefault((edge.source, edge.num_bytes, edge.value), []).append(
                    edge.target
                )
        links: dict[tuple[int, int], list[Any]] = {}
        for (source, num_bytes, _), targets in readers.items():
            for a, made in self.where.on[source].items():
                for b in range(small.num_devices):
                    ticks = int(to_ticks(small.transfer_s(num_bytes, a, b), tick_s))
                    ons = [self.where.on[op][b] for op in targets if b in self.where.on[op]]
                    if a != b and ticks and ons:
                        sent = model.new_bool_var("")
                        for on in ons:
                            model.add_bool_or(made.negated(), on.negated(), sent)
                        links.setdefault((a, b), []).append(ticks * sent)
        for terms in links.values():
            model.add(sum(terms) <= period)

    def answer(self, solver: CpSolver) -> tuple[list[int], list[int]]:
        """Devices, and program order."""
        return self.where.chosen(solver), list(range(self.problem.num_ops))
