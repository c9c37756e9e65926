"""A rehearsal: how long a plan would take, at the prices of this moment, as the workers run it.

    plan, its drawing, the problem --rehearse--> Trace        nothing runs, no clock is read

The planners' model, with what is known once the plan is there:

    begin      the driver writes one part after another, each device reads its own; then it begins
    messages   all that a group sends to one device is one message; it takes time from the groups
               of the device that sends it and of the one that gets it (none if they have cores to
               spare), and is that much less on its way
    jitter     single runs and messages are early or late, as was seen, and devices that wait for
               each other wait for whoever is late: several rehearsals with drawn jitter, of which
               the middle one counts
    end        what comes home last is followed by the end of the call

The seed is fixed: the same prices, the same trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from torchweft.placement.problem import Problem
from torchweft.plan.plan import Plan
from torchweft.plan.trace import Span, Trace
from torchweft.run.workers.drift import FROM
from torchweft.run.workers.graphing import HOME, Drawing
from torchweft.run.workers.prices import Prices

NUM_DRAWN = 15
Message = tuple[int, int]  # the op that sends it, the device that gets it


@dataclass(eq=False)
class Rehearsal:
    """A plan on the devices of a problem: where its ops run, in which order, what they send."""

    problem: Problem
    drawing: Drawing
    prices: Prices
    order: list[int]
    device: list[int]
    values: dict[Message, dict[str, int]] = field(default_factory=dict)  # and their bytes
    needs: list[list[Message | int]] = field(default_factory=list)  # of each op; int: an op here
    num_messages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = {op: at for at, op in enumerate(self.order)}
        self.needs = [[] for _ in self.order]
        self.num_messages = [0 for _ in self.order]
        for edge in sorted(self.problem.edges, key=lambda edge: place[edge.target]):
            target = self.device[edge.target]
            if self.device[edge.source] == target:
                self.needs[edge.target].append(edge.source)
                continue
            message = edge.source, target
            if message not in self.values:  # it is handled once at both ends
                self.num_messages[edge.source] += 1
                self.num_messages[edge.target] += 1
            self.values.setdefault(message, {})[edge.value] = edge.num_bytes
            self.needs[edge.target].append(message)

    def run_s(self, op: int, draw: Random) -> float:
        """Seconds of an op, with the messages that it sends or needs first."""
        name = self.problem.devices[self.device[op]]
        if name == HOME:
            return self.prices.finish_s
        group = self.drawing.groups[self.problem.ops[op]]
        seconds = self.prices.of(group.cell, group.num_rows, name)
        seconds *= _drawn(self.prices, (group.cell.name, name), draw)
        return seconds + self.num_messages[op] * self.prices.message_s.get(name, 0.0)

    def way_s(self, message: Message, draw: Random) -> float:
        """Seconds of a message on its way."""
        source, target = self.device[message[0]], message[1]
        names = self.problem.devices[source], self.problem.devices[target]
        num_bytes = sum(self.values[message].values())
        seconds = self.problem.transfer_s(num_bytes, source, target)
        seconds *= _drawn(self.prices, (FROM + names[0], names[1]), draw)
        return max(0.0, seconds - sum(self.prices.message_s.get(name, 0.0) for name in names))

    def spans(self, draw: Random) -> list[Span]:
        """What would happen when."""
        names, found = self.problem.devices, []
        num_groups = dict[str, int]()
        for op in self.order:
            name = names[self.device[op]]
            num_groups[name] = num_groups.get(name, 0) + 1
        num_groups.pop(HOME, None)
        free_s = self.prices.begins_s(num_groups)
        end_s: dict[int | Message, float] = {}
        for op in self.order:
            name = names[self.device[op]]
            for need in self.needs[op]:
                if isinstance(need, tuple) and need not in end_s:
                    start_s = end_s[need[0]]
                    end_s[need] = start_s + self.way_s(need, draw)
                    found += self._copies(need, start_s, end_s[need])
            start_s = max([free_s.get(name, 0.0), *(end_s[need] for need in self.needs[op])])
            seconds = self.run_s(op, draw)
            free_s[name] = end_s[op] = start_s + seconds
            label = self.problem.ops[op]
            what = "run", label, name, name, "compute", label, None
            found.append(Span(*what, start_s, end_s[op], seconds))
        return sorted(found, key=lambda span: (span.start_s, span.end_s))

    def _copies(self, message: Message, start_s: float, end_s: float) -> list[Span]:
        source = self.problem.devices[self.device[message[0]]]
        target = self.problem.devices[message[1]]
        where = f"{source}.to.{target}", source, "io", "", None
        return [
            Span("copy", f"copy {value} to {target}", *where, start_s, end_s, end_s - start_s)
            for value in self.values[message]
        ]


def rehearse(plan: Plan, drawing: Drawing, problem: Problem, prices: Prices) -> Trace:
    """The trace that a plan of these groups would leave."""
    runs = [step for step in plan.steps if step.kind == "run"]
    number = {name: at for at, name in enumerate(problem.devices)}
    order = [problem.number[step.names[0]] for step in runs]
    device = [0] * problem.num_ops
    for op, step in zip(order, runs, strict=True):
        device[op] = number[plan.lane[step.lane].device]
    rehearsal, draw = Rehearsal(problem, drawing, prices, order, device), Random(0)
    found = [
        Trace("rehearsal", tuple(rehearsal.spans(draw)), simulated=True) for _ in range(NUM_DRAWN)
    ]
    return sorted(found, key=lambda trace: trace.makespan_s)[NUM_DRAWN // 2]


def _drawn(prices: Prices, key: tuple[str, str], draw: Random) -> float:
    seen = prices.jitter.get(key)
    return draw.choice(seen) if seen else 1.0
