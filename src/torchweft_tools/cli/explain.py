"""An explanation: why a placement takes as long as it does, and what would make it shorter.

critical_path    the chain of ops that ends last; why each of them could not start sooner
utilisation      the share of the makespan that each device works
trace_of         the placement as a trace: a timeline to read, or for Perfetto
with_twin        the same problem with one device more: what another one would bring
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torchweft.placement.placement import Placement, busy_s
from torchweft.placement.problem import Problem
from torchweft.plan.trace import Span, Trace


class Reason(NamedTuple):
    """An op of the critical path, and what it waited for: `behind` another op, on the same device
    (device), for its value (value); or for nothing (start) or the inputs (input)."""

    op: int
    why: str
    behind: int = -1


def critical_path(problem: Problem, placement: Placement) -> list[Reason]:
    """The chain of ops that ends last, the first op first."""
    end_s, start_s, devices = placement.end_s, placement.start_s, placement.device
    lanes: dict[int, list[int]] = {}
    before: dict[int, int] = {}
    for op in placement.order:
        queue = lanes.setdefault(devices[op], [])
        if queue:
            before[op] = queue[-1]
        queue.append(op)
    op = max(range(problem.num_ops), key=lambda item: (end_s[item], -item))
    slack_s = 1e-9 * max(1e-30, end_s[op])
    path: list[Reason] = []
    while True:
        causes = [
            (end_s[source] + seconds[devices[source]][devices[op]], "value", source)
            for source, seconds in problem.preds[op]
        ]
        if op in before:
            causes.append((end_s[before[op]], "device", before[op]))
        cause = max(causes, default=(0.0, "start", -1))
        if cause[0] < start_s[op] - slack_s or start_s[op] <= slack_s:
            waited = start_s[op] > slack_s and problem.ready_s[op][devices[op]] > slack_s
            path.append(Reason(op, "input" if waited else "start"))
            return path[::-1]
        path.append(Reason(op, cause[1], cause[2]))
        op = cause[2]


def utilisation(problem: Problem, placement: Placement) -> list[float]:
    """For each device the share of the makespan in which it runs an op."""
    whole_s = placement.makespan_s
    return [s / whole_s if whole_s else 0.0 for s in busy_s(problem, placement.device)]


def trace_of(problem: Problem, placement: Placement) -> Trace:
    """The placement as a simulated trace: a lane a device, and one a link."""
    runs = []
    for op, name in enumerate(problem.ops):
        where = problem.devices[placement.device[op]]
        start_s, end_s = placement.start_s[op], placement.end_s[op]
        what = "run", name, where, where, "compute", name, None
        runs.append(Span(*what, start_s, end_s, end_s - start_s))
    copies: dict[tuple[int, int, float], Span] = {}
    for edge in problem.edges:
        source, target = placement.device[edge.source], placement.device[edge.target]
        if source != target and edge.value:
            here, there = problem.devices[source], problem.devices[target]
            way = "copy", f"copy {edge.value} to {there}", f"{here}.to.{there}", here, "io"
            start_s = placement.end_s[edge.source]
            seconds = problem.transfer_s(edge.num_bytes, source, target)
            span = Span(*way, "", None, start_s, start_s + seconds, seconds)
            copies[edge.source, target, span.end_s] = span
    path: list[Span] = []
    for reason in critical_path(problem, placement):
        arrive_s, device = placement.start_s[reason.op], placement.device[reason.op]
        if reason.why == "value" and (reason.behind, device, arrive_s) in copies:
            path.append(copies[reason.behind, device, arrive_s])
        path.append(runs[reason.op])
    spans = sorted([*runs, *copies.values()], key=lambda span: (span.start_s, span.end_s))
    name = f"{problem.name} by {placement.planner or 'hand'}"
    devices = [(device, device) for device in problem.devices]
    links = dict.fromkeys((span.lane, span.device) for span in copies.values())
    return Trace(name, tuple(spans), (), True, tuple(path), (*devices, *links))


def with_twin(problem: Problem, device: int) -> Problem:
    """The problem with another device just like this one, as far from it as its farthest other."""

    def wider(matrix: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        away = max(*matrix[device], *(row[device] for row in matrix))
        rows = [(*row, away if at == device else row[device]) for at, row in enumerate(matrix)]
        last = [away if at == device else far for at, far in enumerate(matrix[device])]
        return (*rows, (*last, 0.0))

    at_home = device == problem.home
    return replace(
        problem,
        devices=(*problem.devices, f"{problem.devices[device]}.twin"),
        seconds=tuple((*row, row[device]) for row in problem.seconds),
        latency_s=wider(problem.latency_s),
        byte_s=wider(problem.byte_s),
        room_bytes=(*problem.room_bytes, problem.room_bytes[device]),
        ready_s=tuple((*row, max(row) if at_home else row[device]) for row in problem.ready_s),
    )
