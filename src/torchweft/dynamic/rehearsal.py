"""A rehearsal: how long a plan would take, at the prices of this moment, as the workers run it.

    plan, its drawing, the problem --rehearse--> Trace        nothing runs, no clock is read

The planners' problem, with what is known once the plan is there:

    begin      the driver writes one part after another, each device reads its own; then it begins
    messages   all that a group sends to one device is one message; it takes time from the groups
               of the device that sends it and of the one that gets it (none if they have cores to
               spare), and is that much less on its way
    jitter     single runs are early or late, as was seen, and devices that wait for each other wait
               for whoever is late: several rehearsals with drawn jitter, of which the middle counts
    end        what comes home last is followed by the end of the call

The seed is fixed: the same prices, the same trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from torchweft.dynamic.graphing import HOME, Drawing
from torchweft.dynamic.prices import Prices
from torchweft.placement.explain import trace_of
from torchweft.placement.placement import placed
from torchweft.placement.problem import Problem
from torchweft.plan import Plan
from torchweft.trace import Trace

NUM_DRAWN = 15


def rehearse(plan: Plan, drawing: Drawing, problem: Problem, prices: Prices) -> Trace:
    """The trace that a plan of these groups would leave."""
    runs = [step for step in plan.steps if step.kind == "run"]
    number = {name: at for at, name in enumerate(problem.devices)}
    order = [problem.number[step.names[0]] for step in runs]
    devices = [0] * problem.num_ops
    for op, step in zip(order, runs, strict=True):
        devices[op] = number[plan.lane[step.lane].device]
    known = _with_starts(problem, prices, order, devices)
    num_messages, draw, found = _messages(problem, order, devices), Random(0), []
    for _ in range(NUM_DRAWN):
        drawn = _with_seconds(known, drawing, prices, devices, num_messages, draw)
        found.append((drawn, placed(drawn, devices, order)))
    found.sort(key=lambda item: item[1].makespan_s)
    return trace_of(*found[NUM_DRAWN // 2])


def _with_starts(
    problem: Problem, prices: Prices, order: Sequence[int], devices: Sequence[int]
) -> Problem:
    """The problem whose devices begin when their part is there, and whose messages are on their
    way without what they take at both ends."""
    num_groups: dict[str, int] = {}
    for op in order:
        if devices[op] != problem.home:
            name = problem.devices[devices[op]]
            num_groups[name] = num_groups.get(name, 0) + 1
    begins_s = prices.begins_s(num_groups)
    row = tuple(begins_s.get(name, 0.0) for name in problem.devices)
    ends_s = [prices.message_s.get(name, 0.0) for name in problem.devices]
    latency_s = tuple(
        tuple(max(0.0, seconds - ends_s[a] - ends_s[b]) for b, seconds in enumerate(each))
        for a, each in enumerate(problem.latency_s)
    )
    return replace(problem, ready_s=(row,) * problem.num_ops, latency_s=latency_s)


def _messages(problem: Problem, order: Sequence[int], devices: Sequence[int]) -> list[int]:
    """How many messages each op sends, or is the first on its device to need."""
    found = [0] * problem.num_ops
    place = {op: at for at, op in enumerate(order)}
    known: set[tuple[int, int]] = set()
    for edge in sorted(problem.edges, key=lambda edge: place[edge.target]):
        message = edge.source, devices[edge.target]
        if edge.value and devices[edge.source] != message[1] and message not in known:
            known.add(message)
            found[edge.source] += 1
            found[edge.target] += 1
    return found


def _with_seconds(
    problem: Problem, drawing: Drawing, prices: Prices, devices: Sequence[int],
    num_messages: Sequence[int], draw: Random,
) -> Problem:  # fmt: skip
    """The problem with the seconds of each op where it is."""
    rows = []
    for op, row in enumerate(problem.seconds):
        device, name = problem.devices[devices[op]], problem.ops[op]
        if device == HOME:
            seconds = prices.finish_s
        else:
            group = drawing.groups[name]
            seconds = prices.of(group.cell, group.num_rows, device)
            seconds *= draw.choice(prices.jitter.get((group.cell.name, device)) or (1.0,))
            seconds += num_messages[op] * prices.message_s.get(device, 0.0)
        rows.append((*row[: devices[op]], seconds, *row[devices[op] + 1 :]))
    return replace(problem, seconds=tuple(rows))
