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
from torchweft.placement.problem import Problem

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
    slack_s = SLACK * max(1e-30, max(placement.end_s))
    lanes: dict[int, list[tuple[float, float, str]]] = {}
    for number, name in enumerate(problem.ops):
        device = placement.device[number]
        start_s, end_s = placement.start_s[number], placement.end_s[number]
        seconds = problem.seconds[number][device]
        if seconds == float("inf"):
            yield "device", f"device {problem.devices[device]!r} cannot run op {name!r}."
            continue
        if abs(end_s - start_s - seconds) > slack_s or start_s < -slack_s:
            yield "time", f"op {name!r} takes {seconds:g} s, not from {start_s:g} to {end_s:g}."
        if start_s < problem.ready_s[number][device] - slack_s:
            yield "order", f"op {name!r} starts before its inputs are there."
        lanes.setdefault(device, []).append((start_s, end_s, name))
    for edge in problem.edges:
        source, target = placement.device[edge.source], placement.device[edge.target]
        there_s = placement.end_s[edge.source]
        if source != target:
            there_s += problem.latency_s[source][target]
            there_s += edge.num_bytes * problem.byte_s[source][target]
        if placement.start_s[edge.target] < there_s - slack_s:
            names = f"{problem.ops[edge.target]!r} starts before {problem.ops[edge.source]!r}"
            yield "order", f"{names} is there, at {there_s:g} s."
    for device, spans in lanes.items():
        spans.sort()
        for (_, end_s, first), (start_s, _, second) in pairwise(spans):
            if start_s < end_s - slack_s:
                where = f"on device {problem.devices[device]!r} at once"
                yield "overlap", f"ops {first!r} and {second!r} run {where}."
    for ops in problem.together:
        if len({placement.device[op] for op in ops}) > 1:
            yield "together", f"op {problem.ops[ops[0]]!r} is not with all it must be with."
    needs = [0.0] * problem.num_devices
    for hold in problem.holds:
        for device in {placement.device[op] for op in hold.ops}:
            needs[device] += hold.num_bytes
    for device, need in enumerate(needs):
        if need > problem.room_bytes[device]:
            room = f"has {problem.room_bytes[device]:.6g} bytes, its ops need {need:.6g}"
            yield "memory", f"device {problem.devices[device]!r} {room}."
