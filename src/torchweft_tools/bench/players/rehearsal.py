"""A rehearsal: how long a plan would take on the workers, by the simulator of all plans.

    prices = WatchedPrices(placer.executor.prices)      what was measured, and nothing seen since
    prices.ended(job)                                   after each call
    prices.rehearse(script) -> Trace

Its costs (`CallCosts`) are the planners' model, with what is known once there is a plan, all of it
seen in calls before:

    begin      the driver writes one part after another, with the inputs; each device reads its own
               before it begins
    messages   all that a group sends to one device is one message; it takes time from the groups at
               both ends, and is that much less on its way
    jitter     single runs and messages are early or late: drawn from those that were seen
    end        what comes home last is followed by the end of the call
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random

from torchweft.plan.context import Context
from torchweft.plan.graph import Graph, Op
from torchweft.plan.machine import Costs, Env
from torchweft.plan.plan import Plan
from torchweft.plan.simulator import simulate
from torchweft.plan.trace import Trace
from torchweft.run.driver.executor import Job
from torchweft.run.driver.prices import FROM, START_GROUPS, Key, Prices, followed
from torchweft.run.workers.program import HOME, Drawing, Script

NUM_JITTER, NUM_DRAWN = 200, 15


class WatchedPrices(Prices):
    """Prices that also keep what a rehearsal needs, and planners do not."""

    def __init__(self, measured: Prices) -> None:
        super().__init__(measured.pool)
        self.seconds, self.links = dict(measured.seconds), dict(measured.links)
        self.jitter: dict[Key, deque[float]] = {}  # of single runs, 1: as the others
        self.message_s: dict[str, float] = {}  # that one takes from the groups of a device
        self.finish_s = 0.0

    def ratio(self, key: Key, runs: Sequence[tuple[float, float]]) -> float:
        """How far runs were off, all together; how far each was off is kept."""
        ratio = super().ratio(key, runs)
        jitter = self.jitter.setdefault(key, deque(maxlen=NUM_JITTER))
        jitter.extend(seconds / priced / ratio for seconds, priced in runs)
        return ratio

    def ended(self, job: Job) -> None:
        """A placed call ended: what its messages took from groups, and what its end took."""
        copies = [span for span in job.spans if span[0].startswith("copy ")]
        messages = {(lane, start_s) for _, lane, _, start_s, _ in copies}
        num = Counter(end for lane, _ in messages for end in lane.split(".to."))
        home_s = [end_s for _, lane, _, _, end_s in copies if lane.endswith(f".to.{HOME}")]
        taken_s = {name: (num[name], sum(seconds)) for name, seconds in job.taken_s.items()}
        self.follow(taken_s, job.ended_s - max(home_s, default=job.began_s))

    def follow(self, taken_s: Mapping[str, tuple[int, float]], finish_s: float) -> None:
        """taken_s: by device its messages and the seconds that they took from its groups;
        finish_s: from when the last rows were home until the call was over."""
        for device, (num, seconds) in taken_s.items():
            if num:
                self.message_s[device] = followed(self.message_s.get(device), seconds / num)
        self.finish_s = followed(self.finish_s or None, finish_s)

    def begins_s(self, num_groups: Mapping[str, int]) -> dict[str, float]:
        """When devices begin that have so many groups: the driver writes one part after another,
        in this order, and each device reads its own."""
        begins_s, written_s = {}, 0.0
        for device, num in num_groups.items():
            units = START_GROUPS + num
            written_s += (self.write_s or 0.0) * units
            begins_s[device] = max(0.0, written_s + self.read_s.get(device, 0.0) * units)
        return begins_s

    def rehearse(self, script: Script) -> Trace:
        """The trace that a script would leave: of several with drawn jitter, the one in the middle.
        The seed is fixed: the same prices, the same trace."""
        plan, drawing = script.plan, script.drawing
        assert plan is not None and drawing is not None, "it was placed"
        machine, draw, traces = self.machine(), Random(0), []
        for _ in range(NUM_DRAWN):
            costs = CallCosts(machine, prices=self, plan=plan, drawing=drawing, draw=draw)
            traces.append(simulate(plan, Context(), machine, costs, contention=False))
        return sorted(traces, key=lambda trace: trace.makespan_s)[NUM_DRAWN // 2]


@dataclass(frozen=True, eq=False, kw_only=True)
class CallCosts(Costs):
    """What a call by a plan costs on workers."""

    prices: WatchedPrices
    plan: Plan
    drawing: Drawing
    draw: Random
    way_s: dict[tuple[str, str], float] = field(default_factory=dict)  # of messages: (op, device)

    @cached_property
    def num_bytes(self) -> Counter[tuple[str, str]]:
        """Bytes of each message."""
        graph, num_bytes = self.plan.graph, Counter[tuple[str, str]]()
        for step in self.plan.steps:
            if step.kind == "copy" and step.on and (maker := graph.maker.get(step.names[0])):
                spec, _, count = self.drawing.blocks[step.names[0]]
                num_bytes[maker.name, step.on] += count * spec.num_bytes
        return num_bytes

    @cached_property
    def num_messages(self) -> Counter[str]:
        """Messages that an op sends, or is the first to need."""
        graph, handled = self.plan.graph, set[tuple[str, str]]()
        num = Counter(op for op, _ in self.num_bytes)
        for step in self.plan.steps:
            if step.kind == "run":
                makers = (graph.maker.get(value) for value in graph.op[step.names[0]].touched)
                needs = {(maker.name, step.lane) for maker in makers if maker is not None}
                new = needs & self.num_bytes.keys() - handled
                num[step.names[0]] += len(new)
                handled |= new
        return num

    @cached_property
    def begins_s(self) -> dict[str, float]:
        """When devices begin."""
        lanes = [step.lane for step in self.plan.steps if step.kind == "run"]
        return self.prices.begins_s(Counter(lane for lane in lanes if lane != HOME))

    def begin_s(self, device: str) -> float:
        """Seconds until a device has its part, and has read it."""
        return self.begins_s.get(device, 0.0)

    def run_s(self, graph: Graph, op: Op, env: Env, device: str = "cpu") -> float:
        """Seconds of a group, with the messages that it sends or needs first."""
        if device == HOME:
            return self.prices.finish_s
        group = self.drawing.groups[op.name]
        seconds = self.prices.of(group.cell, group.num_rows, device)
        seconds *= self._drawn((group.cell.name, device))
        return seconds + self.num_messages[op.name] * self.prices.message_s.get(device, 0.0)

    def send_s(self, value: str, num_bytes: int, source: str, target: str) -> float:
        """Seconds on its way of the message that a value goes with; inputs come with the part."""
        maker = self.plan.graph.maker.get(value)
        if maker is None:
            return 0.0
        message = maker.name, target
        if message not in self.way_s:
            seconds = self.copy_s(self.num_bytes[message], source, target)
            seconds *= self._drawn((FROM + source, target))
            ends_s = sum(self.prices.message_s.get(name, 0.0) for name in (source, target))
            self.way_s[message] = max(0.0, seconds - ends_s)
        return self.way_s[message]

    def _drawn(self, key: Key) -> float:
        seen = self.prices.jitter.get(key)
        return self.draw.choice(seen) if seen else 1.0
