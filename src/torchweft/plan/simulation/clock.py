"""The `VirtualClock` of all ranks of a call, and the `SimulatedRank`: its lanes, at work or not.

    ready lanes go on until all are busy or wait; the clock jumps to the next end; and so on

A rank says to the clock what it has reached (a collective, a message: its channel and how many were
before it), and waits on it for what others have not reached. What all this means: `simulator.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple, NoReturn

from torchweft.errors import PlanError
from torchweft.plan.plan import Plan, Step
from torchweft.plan.simulation.memory import LiveBytes
from torchweft.plan.simulation.prices import NOTHING, StepPrice, StepPrices
from torchweft.plan.trace import Span, Trace

_MISSING = _BEGIN = -1
LEAST_S = 1e-9


class ChainLink(NamedTuple):
    """The longest chain, at full rate, of nodes that had to end before one could: its last link."""

    reach_s: float = 0.0
    rank: int = 0
    span: Span | None = None
    before: ChainLink | None = None


_START = ChainLink()
Meeting = tuple[tuple[object, ...], int]  # a channel (a communicator, or a direction), and how many


@dataclass(slots=True, eq=False)
class _Line:
    """A lane at work: node `at` of its queue is next, or (busy) under way."""

    name: str
    device: str
    queue: list[int] = field(default_factory=list)
    at: int = 0
    tail: ChainLink = _START  # to the last node that ended here
    since_s: float = 0.0  # when it came to this node
    busy: bool = False
    price: StepPrice = NOTHING
    left_s: float = 0.0  # at full rate, at the time paced_s
    paced_s: float = 0.0
    rate: float = 1.0
    end_s: float = 0.0

    def weight(self, resource: str) -> float:
        """Its claim on a resource that is short: equal ones, but on the network by length."""
        return max(self.price.busy_s, LEAST_S) if resource.endswith(" network") else 1.0


class VirtualClock:
    """The virtual clock of all ranks, which lanes may go, and who waits for whom to reach what."""

    def __init__(self, contention: bool) -> None:
        self.contention, self.now_s = contention, 0.0
        self.ranks: list[SimulatedRank] = []
        self.ready: deque[tuple[SimulatedRank, _Line]] = deque()
        self.absent: dict[tuple[int, Meeting], list[tuple[SimulatedRank, _Line]]] = {}

    def add(self, plan: Plan, prices: StepPrices) -> None:
        """One more rank, with a plan whose names mean something."""
        self.ranks.append(SimulatedRank(self, plan, prices))

    def run(self) -> list[Trace]:
        """Let the lanes go until nothing is under way any more."""
        while True:
            while self.ready:
                rank, line = self.ready.popleft()
                rank.go(line)
            active = [(line, rank) for rank in self.ranks for line in rank.active]
            if not active:
                break
            if self.contention:
                for rank in self.ranks:
                    rank.share()
            line, rank = min(active, key=lambda pair: pair[0].end_s)
            self.now_s = max(self.now_s, line.end_s)
            rank.leave(line)
        if any(rank.stuck for rank in self.ranks):
            self.deadlock()
        ways = chain([_START], *(rank.ended.values() for rank in self.ranks))
        way: ChainLink | None = max(ways, key=lambda way: way.reach_s)
        paths: list[list[Span]] = [[] for _ in self.ranks]
        while way is not None:
            paths[way.rank] += [way.span] if way.span is not None else []
            way = way.before
        return [rank.trace(path) for rank, path in zip(self.ranks, paths, strict=True)]

    def deadlock(self) -> NoReturn:
        """Say where each lane stands, with the steps of each rank around it."""
        several, lines, shown = len(self.ranks) > 1, list[str](), list[str]()
        for rank in self.ranks:
            lines += [f"  {f'rank {rank.number} ' * several}{text}" for text in rank.stand()]
        stuck = [rank for rank in self.ranks if rank.stuck]
        for rank in stuck:
            shown += [f"rank {rank.number}:"] if several else []
            shown.append(rank.plan.excerpt(rank.stuck_step))
        cure = "  Let what is waited for come first, in the order of its own lane."
        if several:
            cure += " Ranks that meet several times must meet in one order."
        text = "\n".join(["deadlock: no lane can go on.", *lines, *shown, cure])
        first = stuck[0]
        raise PlanError(text, rule="deadlock", lane=first.stuck[0].name, step=first.stuck_step)


class SimulatedRank:
    """One rank. Node n is step n; node (number of steps + n) is the flight it issued."""

    def __init__(self, clock: VirtualClock, plan: Plan, prices: StepPrices) -> None:
        self.clock, self.plan, self.prices, self.number = clock, plan, prices, len(clock.ranks)
        self.num_steps, self.labels = len(plan.steps), [step.label for step in plan.steps]
        self.memory = LiveBytes(plan, prices)
        self.capacity = {
            f"{device.name} {uses}": device.capacity
            for device in prices.machine.devices
            for uses in ("compute", "memory", "io")
        }
        self.slowdowns = {
            (f"{device.name} {each.uses}", f"{device.name} {each.beside}"): each.factor
            for device in prices.machine.devices
            for each in device.slowdowns
        }
        self.lines = {lane.name: _Line(lane.name, lane.device) for lane in plan.lanes}
        self.active: list[_Line] = []
        for line in self.lines.values():
            line.end_s = prices.costs.begin_s(line.device)
            if line.end_s > 0:
                line.at, line.busy = _BEGIN, True
                self.active.append(line)
            else:
                clock.ready.append((self, line))
        self.waiting: dict[int, list[_Line]] = {}
        self.cause: dict[int, int] = {}  # what must have ended before a wait, complete or flight
        self.ended: dict[int, ChainLink] = {}
        self.spans: list[Span] = []
        self.reached: dict[
            Meeting, ChainLink
        ] = {}  # which collectives and messages, and how it came
        self.meetings: dict[int, list[tuple[int, Meeting]]] = {}  # of a node: the rank to meet
        self.said: dict[tuple[object, ...], int] = {}
        first = {label: number for number, label in reversed(list(enumerate(self.labels)))}
        for number, step in enumerate(plan.steps):
            self.lines[step.lane].queue.append(number)
            if step.kind == "wait":
                self.cause[number] = first.get(step.target or "", _MISSING)
            elif step.kind == "complete":
                issue = first.get(self.labels[number].replace("complete", "issue", 1))
                self.cause[number] = _MISSING if issue is None else issue + self.num_steps
            elif step.kind == "issue":
                self.cause[number + self.num_steps] = number
        if not clock.contention:
            self._widen_links()

    @property
    def stuck(self) -> list[_Line]:
        """Lines that have not come to their end."""
        return [line for line in self.lines.values() if line.at < len(line.queue)]

    @property
    def stuck_step(self) -> int:
        """The step at which the first of them stands."""
        return self.stuck[0].queue[self.stuck[0].at] % self.num_steps

    def trace(self, path: list[Span]) -> Trace:
        """What has been seen of this rank."""
        spans = sorted(self.spans, key=lambda span: (span.start_s, span.end_s))
        name = " ".join([self.plan.graph_name, *self.plan.history[:1]])
        lanes = tuple((lane.name, lane.device) for lane in self.plan.lanes)
        return Trace(name, tuple(spans), tuple(self.memory.samples), True, tuple(path[::-1]), lanes)

    def _widen_links(self) -> None:
        """Each copy on the lane of a link gets a line of its own, behind the last wait before it:
        what is made on a device is waited for in the order in which it is made."""
        for name in [lane.name for lane in self.plan.lanes if lane.to is not None]:
            line, last = self.lines[name], _MISSING
            for number in tuple(line.queue):
                if self.plan.steps[number].kind != "copy":
                    last = number
                    continue
                line.queue.remove(number)
                alone = self.lines[f"{name} {number}"] = _Line(name, line.device, [number])
                self.clock.ready.append((self, alone))
                if last != _MISSING:
                    self.cause[number] = last

    def leave(self, line: _Line) -> None:
        """End what a line was doing."""
        self.active.remove(line)
        line.busy = False
        if line.at == _BEGIN:
            line.at, line.since_s = 0, self.clock.now_s
        else:
            self._end(line)
        self.clock.ready.append((self, line))

    def go(self, line: _Line) -> None:
        """Take the nodes of a lane until one takes time or has to wait."""
        while line.at < len(line.queue) and not line.busy:
            node = line.queue[line.at]
            cause = self.cause.get(node)
            if cause is not None and cause not in self.ended:
                self.waiting.setdefault(cause, []).append(line)
                return
            step, flight = self.plan.steps[node % self.num_steps], node >= self.num_steps
            if len(self.clock.ranks) > 1 and not self._met(line, node, step):
                return
            line.price = price = self.prices.of(step, line.device, flight=flight)
            if price is NOTHING:
                self._end(line)
                continue
            now_s = self.clock.now_s
            if flight or self.meetings.get(node):
                line.since_s = now_s
            if not flight:
                self.memory.start(step, line.device, now_s)
            line.left_s, line.paced_s, line.rate = price.busy_s, now_s, 1.0
            line.busy, line.end_s = True, now_s + price.busy_s
            self.active.append(line)

    def _met(self, line: _Line, node: int, step: Step) -> bool:
        """Whether all other ranks have reached what a node says to them."""
        if node not in self.meetings:
            self._reach(node, step, self._way(line, node))
        for rank, meeting in self.meetings[node]:
            if meeting not in self.clock.ranks[rank].reached:
                self.clock.absent.setdefault((rank, meeting), []).append((self, line))
                return False
        return True

    def _reach(self, node: int, step: Step, way: ChainLink) -> None:
        """Note what a node says and to whom, and wake those who waited for it."""
        self.meetings[node] = []
        issues = node < self.num_steps and step.kind == "issue"  # its flight will say it
        for talk in [] if issues else self.plan.talks(step):
            channel: tuple[object, ...] = (talk.communicator,)
            ranks = self.plan.graph.members(talk.communicator, len(self.clock.ranks))
            if talk.peer is not None:
                ends = (self.number, talk.peer)
                ranks, channel = ends, (*channel, *(ends if talk.kind == "send" else ends[::-1]))
            number = self.said[channel] = self.said.get(channel, -1) + 1
            self.reached[channel, number] = way
            others = [rank for rank in ranks if rank != self.number]
            if missing := [rank for rank in others if rank >= len(self.clock.ranks)]:
                text = f"{step.label} talks to rank {missing[0]}, which has no plan here."
                raise PlanError(f"ranks: rank {self.number}: {text}", rule="ranks")
            self.meetings[node] += [(rank, (channel, number)) for rank in others]
            woken = self.clock.absent.pop((self.number, (channel, number)), ())
            self.clock.ready.extend(woken)

    def _way(self, line: _Line, node: int) -> ChainLink:
        """The longest of the chains that had to end before a node could start."""
        ways = [line.tail, self.ended.get(self.cause.get(node, _MISSING), _START)]
        ways += [self.clock.ranks[r].reached[m] for r, m in self.meetings.get(node, ())]
        return max(ways, key=lambda way: way.reach_s)

    def share(self) -> None:
        """Set every rate by what is asked of each resource now. Flights share the network by their
        seconds alone, so that those which begin together end together."""
        asked: dict[str, float] = {}
        for line in self.active:
            for resource, amount in line.price.demands:
                asked[resource] = asked.get(resource, 0.0) + amount * line.weight(resource)
        for line in self.active:
            rate = 1.0
            for resource, _ in line.price.demands:
                share = line.weight(resource) / asked[resource]
                rate = min(rate, self.capacity.get(resource, 1.0) * share)
            rate /= self._slowdown(line) if self.slowdowns else 1.0
            if rate != line.rate:
                line.left_s = max(0.0, line.left_s - (self.clock.now_s - line.paced_s) * line.rate)
                line.paced_s, line.rate = self.clock.now_s, rate
                line.end_s = self.clock.now_s + line.left_s / rate

    def _slowdown(self, line: _Line) -> float:
        """How many times as long a step takes beside what is under way on other lanes."""
        others = chain(*(other.price.demands[:1] for other in self.active if other is not line))
        pairs = product(line.price.demands[:1], others)
        named = [f for (a, _), (b, _) in pairs if (f := self.slowdowns.get((a, b))) is not None]
        if named and line.price.factor is not None:
            return line.price.factor
        return max(named, default=1.0)

    def _end(self, line: _Line) -> None:
        """Write down that a lane's node has ended, and after what; wake whoever waits for it."""
        node, price, now_s = line.queue[line.at], line.price, self.clock.now_s
        step, label = self.plan.steps[node % self.num_steps], self.labels[node % self.num_steps]
        kind, before = step.kind, self._way(line, node)
        if node >= self.num_steps:
            kind, label = "transfer", label.removeprefix("issue ")
        else:
            self.memory.end(step, line.device, now_s)
        span = None
        if price.uses or now_s > line.since_s:
            op = "" if kind in ("copy", "wait") else " ".join(step.names)
            where = kind, label, line.name, line.device, price.uses, op, step.parts
            span = Span(*where, line.since_s, now_s, price.busy_s)
            self.spans.append(span)
        way = ChainLink(before.reach_s + price.busy_s, self.number, span, before)
        self.ended[node] = line.tail = way
        line.at, line.since_s = line.at + 1, now_s
        if kind == "issue" and step.on is not None:
            self._take_off(step, step.on, node + self.num_steps, way)
        self.clock.ready.extend((self, other) for other in self.waiting.pop(node, ()))

    def _take_off(self, step: Step, lane: str, flight: int, way: ChainLink) -> None:
        """Put a flight behind those of its lane; a message behind those of its direction. What all
        members of a collective must reach is its issue, for lanes may be behind on some ranks."""
        device = self.lines[lane].device
        peers = [talk for talk in self.plan.talks(step) if talk.peer is not None]
        keys = [f"{lane} {talk.communicator} {talk.kind} {talk.peer}" for talk in peers[-1:]]
        if not peers:
            number = self.prices.machine.device[device].num_flights
            keys = [lane, *(f"{lane} {also}" for also in range(1, number))]
            if len(self.clock.ranks) > 1:
                self._reach(flight, step, way)
        rows = [self.lines.setdefault(key, _Line(lane, device)) for key in keys]
        hosted = rows[0] if len(rows) == 1 else min(rows, key=self._left_s)
        hosted.queue.append(flight)
        self.clock.ready.append((self, hosted))

    def _left_s(self, line: _Line) -> float:
        """Seconds at full rate of the flights that a row still has."""
        steps = [self.plan.steps[node % self.num_steps] for node in line.queue[line.at :]]
        return sum(self.prices.of(step, line.device, flight=True).busy_s for step in steps)

    def stand(self) -> list[str]:
        """Where each lane stands that cannot go on, and why."""
        lines = []
        for line in self.stuck:
            number = line.queue[line.at]
            why = "which is missing" if self.cause.get(number) == _MISSING else ""
            absent = [
                str(rank)
                for rank, meeting in self.meetings.get(number, ())
                if meeting not in self.clock.ranks[rank].reached
            ]
            if absent:
                why = f"which rank {', '.join(absent)} does not reach"
            label = self.labels[number % self.num_steps].removeprefix("issue ")
            label = label if number >= self.num_steps else self.labels[number]
            where = f"{line.name} stands at step {number % self.num_steps}: {label}"
            lines.append(f"{where}, {why or 'which cannot end first'}")
        return lines
