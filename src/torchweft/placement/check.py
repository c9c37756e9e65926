"""The check: whether a placement is legal for a problem, worked out from the two alone.

It shares no code with the planners and the draft: devices, overlaps, arrivals and memory are
recomputed from the problem's own numbers. Rules: `ops`, `device`, `time`, `overlap` (two ops on one
device at once), `order` (an op starts before what it reads has arrived), `together`, `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torchweft.errors import PlacementError
from torchweft.placement.placement import Placement
from torchweft.placement.problem import INF, Problem

SLACK = 1e-9  # relative: what sums of floating-point seconds may be off


def check(problem: Problem, placement: Placement) -> Placement:
    """The same placement, if it is legal. Raises `PlacementError` with the first broken rule."""
    for rule, text in faults(problem, placement):
        head = f"{rule}: the placement by {placement.planner or 'hand'} of {problem.name!r}"
        raise PlacementError(f"{head}: {text}", rule=rule)
    return placement


def faults(problem: Problem, placement: Placement) -> Iterator[tuple[str, str]]:
    """Every broken rule as (rule, text)."""
    if placement.ops != problem.ops or placement.devices != problem.devices:
        yield "ops", "it has other ops or devices than the problem."
        return
    for op, at in enumerate(placement.device):
        if problem.seconds[op][at] == INF:
            yield "device", f"device {problem.devices[at]!r} cannot run op {problem.ops[op]!r}."
    yield from _late(problem, placement, SLACK * max(1e-30, max(placement.end_s)))
    for ops in problem.together:
        if len({placement.device[op] for op in ops}) > 1:
            yield "together", f"op {problem.ops[ops[0]]!r} is not with all it must be with."
    needs = [0.0] * problem.num_devices
    for hold in problem.holds:
        for device in {placement.device[op] for op in hold.ops}:
            needs[device] += hold.num_bytes
    for name, room, need in zip(problem.devices, problem.room_bytes, needs, strict=True):
        if need > room:
            yield "memory", f"device {name!r} has {room:.6g} bytes, its ops need {need:.6g}."


def _late(problem: Problem, placement: Placement, slack_s: float) -> Iterator[tuple[str, str]]:
    """What is wrong with the times: by rule, time, order and overlap."""
    starts_s, ends_s, names = placement.start_s, placement.end_s, problem.ops
    for op, device in enumerate(placement.device):
        start_s, end_s, seconds = starts_s[op], ends_s[op], problem.seconds[op][device]
        wrong = abs(end_s - start_s - seconds) > slack_s or start_s < -slack_s
        if seconds < INF and wrong:
            text = f"takes {seconds:g} s, not from {start_s:g} to {end_s:g}."
            yield "time", f"op {names[op]!r} {text}"
    for op, device in enumerate(placement.device):
        if starts_s[op] < problem.ready_s[op][device] - slack_s:
            yield "order", f"op {names[op]!r} starts before its inputs are there."
    for edge in problem.edges:
        source, target = placement.device[edge.source], placement.device[edge.target]
        there_s = ends_s[edge.source]
        if source != target:
            there_s += problem.latency_s[source][target]
            there_s += edge.num_bytes * problem.byte_s[source][target]
        if starts_s[edge.target] < there_s - slack_s:
            pair = f"{names[edge.target]!r} starts before {names[edge.source]!r}"
            yield "order", f"{pair} is there, at {there_s:g} s."
    lanes: list[list[tuple[float, float, str]]] = [[] for _ in problem.devices]
    for op, device in enumerate(placement.device):
        lanes[device].append((starts_s[op], ends_s[op], names[op]))
    for name, spans in zip(problem.devices, lanes, strict=True):
        for (_, end_s, first), (start_s, _, second) in pairwise(sorted(spans)):
            if start_s < end_s - slack_s:
                yield "overlap", f"ops {first!r} and {second!r} run on device {name!r} at once."
