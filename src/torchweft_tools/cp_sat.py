"""CP-SAT: the solver of OR-tools, which proves a bound. It needs the package `ortools`.

    on[group][device]     exactly one device a group; ops of a device do not overlap
    start[op]             after each input's end, and its way from where it is made to here
    load cuts             no device is busy for longer than the makespan
    head and tail cuts    no op starts before, or ends too late for, the shortest way (`heads`,
                          `tails`); both depend on its device

Equal devices without transfers and limits need no device a op: at most so many ops at once
(a cumulative constraint), and devices are given out afterwards. For throughput there are no times:
loads of devices and links, each value once to each device.

Times are whole numbers of ticks. If all seconds are multiples of one decimal or binary unit,
nothing is lost. Else they are rounded down to a billionth of the horizon: then an optimum in ticks
is a lower bound in seconds, and an answer in ticks is timed again in seconds.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchweft.errors import PlacementError
from torchweft.placement.placement import Placement, best, placed, run
from torchweft.placement.planners.lists import best_quick
from torchweft.placement.problem import INF, Matrix, Problem, heads, tails

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

ReadSolution = Callable[["CpSolver"], tuple[list[int], list[int]]]  # its devices, and an order
DEFAULT_S = 10.0
LOAD_S = 1.2
"""What loading the solver takes, once a process; half of it on a quick machine."""
SIZE_S = 2e-5  # to write one variable or constraint of it
MAX_TICKS = 1e9
UNITS = (*(10.0**-k for k in range(10)), *(2.0**-k for k in range(1, 31)))


def is_loaded() -> bool:
    """Whether the solver has been loaded in this process."""
    return "ortools.sat.python.cp_model" in sys.modules


def loading_s(problem: Problem, load_s: float = LOAD_S) -> float:
    """About what it takes to load the solver, once, and to write a problem down for it."""
    writing_s = SIZE_S * (problem.num_ops + len(problem.edges)) * problem.num_devices
    return writing_s + (0.0 if is_loaded() else load_s)


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
    if find_spec("ortools") and deadline_s < loading_s(problem, LOAD_S / 2):
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
    answer: ReadSolution
    if small.objective == "throughput":
        answer = _write_stream(model, small, first, tick_s)
    else:
        answer = (_write_equal if _equal(small) else _write_unlike)(model, small, first)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, ends_s - time.perf_counter())
    solver.parameters.num_workers = max(2, min(8, os.cpu_count() or 1))
    solver.parameters.random_seed = seed
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return first  # not even the hint was taken in within the time
    known = best([placed(problem, *answer(solver)), first])
    bound_s = max(0.0, solver.best_objective_bound) * tick_s
    return placed(problem, known.device, known.order, bound_s=min(bound_s, known.score_s))


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
            choices = {d: model.new_bool_var("") for d in problem.allowed[group[0]]}
            model.add_exactly_one(choices.values())
            for op in group:
                self.on[op] = choices
            for device, variable in choices.items():
                model.add_hint(variable, first.device[group[0]] == device)
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

    def load(self, device: int) -> Any:
        """The ticks of all ops on the device, as an expression."""
        return sum(
            int(self.problem.seconds[op][device]) * on[device]
            for op, on in enumerate(self.on)
            if device in on
        )

    def chosen(self, solver: CpSolver) -> list[int]:
        return [
            next(device for device, variable in on.items() if solver.boolean_value(variable))
            for on in self.on
        ]


def _starts(model: CpModel, small: Problem, first: Placement) -> tuple[list[Any], Any]:
    """A start for each op, and the makespan; both within the first placement, which is the hint."""
    start_hint, end_hint = run(small, first.device, first.order)
    most = int(max(end_hint))
    starts = [model.new_int_var(0, most, "") for _ in small.ops]
    makespan = model.new_int_var(0, most, "makespan")
    model.minimize(makespan)
    for start, hint in zip(starts, start_hint, strict=True):
        model.add_hint(start, int(hint))
    return starts, makespan


def _order(small: Problem, at: Sequence[int], devices: Sequence[int]) -> list[int]:
    """The ops by their starts."""
    ends = [at[op] + row[devices[op]] for op, row in enumerate(small.seconds)]
    return sorted(range(small.num_ops), key=lambda op: (at[op], ends[op], op))


def _write_unlike(model: CpModel, small: Problem, first: Placement) -> ReadSolution:
    """Unlike devices: where and when."""
    starts, makespan = _starts(model, small, first)
    where = _Devices(model, small, first)
    pick, early, late = where.pick, heads(small), tails(small)
    lanes: list[list[Any]] = [[] for _ in small.devices]
    ends = []
    for op, start in enumerate(starts):
        seconds = small.seconds[op]
        ends.append(start + pick(op, seconds))
        model.add(ends[op] >= pick(op, early[op]))  # head cut
        model.add(ends[op] + pick(op, late[op]) <= makespan)  # tail cut
        for device, on in where.on[op].items():
            size = int(seconds[device])
            lanes[device].append(model.new_optional_fixed_size_interval_var(start, size, on, ""))
    for device, intervals in enumerate(lanes):
        model.add_no_overlap(intervals)
        model.add(where.load(device) <= makespan)  # load cut
    for op, preds in enumerate(small.preds):
        for source, ways in preds:
            model.add(starts[op] >= ends[source])
            for device, on in where.on[source].items():
                if any(ways[device]):
                    way = pick(op, ways[device])
                    model.add(starts[op] >= ends[source] + way).only_enforce_if(on)

    def answer(solver: CpSolver) -> tuple[list[int], list[int]]:
        devices = where.chosen(solver)
        return devices, _order(small, [solver.value(start) for start in starts], devices)

    return answer


def _write_equal(model: CpModel, small: Problem, first: Placement) -> ReadSolution:
    """Equal devices without transfers: only when. Each op in the order of the starts gets the
    device that is free first."""
    starts, makespan = _starts(model, small, first)
    size = [int(row[0]) for row in small.seconds]
    early, late = heads(small), tails(small)
    for op, start in enumerate(starts):
        model.add(start + size[op] >= int(early[op][0]))
        model.add(start + size[op] + int(late[op][0]) <= makespan)
        for source, _ in small.preds[op]:
            model.add(start >= starts[source] + size[source])
    intervals = [
        model.new_fixed_size_interval_var(start, size[op], "")
        for op, start in enumerate(starts)
        if size[op]
    ]
    model.add_cumulative(intervals, [1] * len(intervals), small.num_devices)
    model.add(sum(size) <= makespan * small.num_devices)

    def answer(solver: CpSolver) -> tuple[list[int], list[int]]:
        at = [solver.value(start) for start in starts]
        free, devices = [0] * small.num_devices, [0] * small.num_ops
        order = _order(small, at, devices)
        for op in order:
            devices[op] = free.index(min(free))
            free[devices[op]] = at[op] + size[op]
        return devices, order

    return answer


def _write_stream(model: CpModel, small: Problem, first: Placement, tick_s: float) -> ReadSolution:
    """Throughput: only where; what each device and each link has to do for one input."""
    where = _Devices(model, small, first)
    period = model.new_int_var(0, int(first.period_s / tick_s) + 1, "period")
    model.minimize(period)
    for device in range(small.num_devices):
        model.add(where.load(device) <= period)
    links: dict[tuple[int, int], list[Any]] = {}
    for source, num_bytes, targets in small.values:
        for a, made in where.on[source].items():
            for b in range(small.num_devices):
                ticks = int(to_ticks(small.transfer_s(num_bytes, a, b), tick_s))
                ons = [where.on[op][b] for op in targets if b in where.on[op]]
                if a != b and ticks and ons:
                    sent = model.new_bool_var("")
                    for on in ons:
                        model.add_bool_or(made.negated(), on.negated(), sent)
                    links.setdefault((a, b), []).append(ticks * sent)
    for terms in links.values():
        model.add(sum(terms) <= period)
    return lambda solver: (where.chosen(solver), list(range(small.num_ops)))


def in_ticks(problem: Problem, horizon_s: float) -> tuple[Problem, float]:
    """The problem with every time a whole number of ticks, and the seconds of a tick.

    Transfers are rounded in `preds` and `succs`, pair by pair; latencies and bytes stay.
    """
    ways = {id(m): m for preds in problem.preds for _, m in preds}
    matrices = problem.seconds, problem.ready_s, *ways.values()
    times_s = {s for matrix in matrices for row in matrix for s in row if s < INF}
    units = (u for u in UNITS if horizon_s / u <= MAX_TICKS and all(_fits(s, u) for s in times_s))
    tick_s = next(units, horizon_s / MAX_TICKS if horizon_s > 0 else 1.0)

    def ticks(rows: Matrix) -> Matrix:
        return tuple(tuple(to_ticks(item, tick_s) for item in row) for row in rows)

    small = replace(problem, seconds=ticks(problem.seconds), ready_s=ticks(problem.ready_s))
    known = {key: ticks(matrix) for key, matrix in ways.items()}
    for name in ("preds", "succs"):
        near = getattr(problem, name)
        small.__dict__[name] = tuple(tuple((op, known[id(m)]) for op, m in row) for row in near)
    return small, tick_s


def to_ticks(seconds: float, tick_s: float) -> float:
    """Seconds in ticks, rounded down (but a hair below a whole number is that number)."""
    return seconds if seconds == INF else float(math.floor(seconds / tick_s * (1 + 1e-12) + 1e-9))


def _fits(seconds: float, unit: float) -> bool:
    whole = seconds / unit
    return abs(whole - round(whole)) <= 1e-9 * max(1.0, whole)
