"""The simulator: runs a `Plan` on a virtual clock and gives the `Trace` that it would leave.

    plan, context, machine, costs --simulate--> Trace          nothing runs, no clock is read

What is known of a runtime beyond the rates of a machine comes in as costs: a `Costs` of its own.

A step takes its cost at full rate; splits, merges, frees and waits take nothing. An issued op is
then *in flight* on its hosted lane, one after another in the order of issue. What is under way
leans on resources of its device:

    run, copy             1 of each of its `uses` (a copy: memory, or the link between the devices)
    network op in flight  1 of network, and `network_share` of compute

There are `capacity` lanes' worth of compute, memory and io, and one of network and of each link. If
more is asked for, all who ask get the same share of their full rate, and each goes as fast as its
scarcest resource lets it. On top, work that a device's `slowdowns` name takes so many times as long
beside work of the other kind. Without contention nobody slows another down: every step takes
exactly its cost, and the lane of a link takes any number of copies at once, each as soon as what it
waits for is there. One rank is simulated; the others are taken to be as fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple, NoReturn

from torchweft.errors import PlanError, unknown
from torchweft.plan.context import Context
from torchweft.plan.machine import Costs, Machine
from torchweft.plan.plan import KINDS, Plan, Range, Step
from torchweft.plan.trace import Span, Trace

Piece = tuple[set[int], int, bool]  # its cells that are not freed yet, its bytes, is it a place
_MISSING = _BEGIN = -1


def simulate(
    plan: Plan,
    context: Context,
    machine: Machine,
    costs: Costs | None = None,
    *,
    contention: bool = True,
) -> Trace:
    """The trace of one call, with contention or without.

    Raises `PlanError` (rule "deadlock", with where each lane stands) for a plan that cannot end.
    """
    _check(plan)
    prices = _Prices(plan, context, machine, costs or Costs(machine))
    return _Simulation(plan, prices, contention).run()


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


class _Price(NamedTuple):
    """What a step asks for: seconds at full rate, amounts of resources, what its span uses."""

    busy_s: float = 0.0
    demands: tuple[tuple[str, float], ...] = ()
    uses: str = ""


_NOTHING = _Price()


class _Prices:
    """Seconds and bytes of steps over ranges of parts, each worked out once."""

    def __init__(self, plan: Plan, context: Context, machine: Machine, costs: Costs) -> None:
        self.plan, self.graph, self.context = plan, plan.graph, context
        self.machine, self.costs = machine, costs
        self.bounds: tuple[int, ...] = (0, context.batch)
        if plan.num_parts > 1:
            self.bounds = plan.cut.bounds(context.batch, context.tokens_per_request)
        self.known: dict[object, _Price] = {}

    def rows(self, parts: Range | None) -> int:
        first, last = parts or (0, self.plan.num_parts)
        return self.bounds[last] - self.bounds[first]

    def num_bytes(self, name: str, parts: Range | None = None) -> int:
        value = self.graph.value[name]
        env = self.context.env(self.graph.batch, self.rows(parts if value.batch else None))
        return max(0, value.bytes.evaluate(env))

    def of(self, step: Step, device: str, *, flight: bool) -> _Price:
        """The price of a step on a device; `flight`: of the op that it issued."""
        if step.kind in ("split", "merge", "free", "wait"):
            return _NOTHING
        if step.kind in ("issue", "complete") and not flight:
            return _Price(self.costs.host_s(device), uses="network")
        key = step.kind, step.names, self.rows(step.parts), step.on, step.by, device
        if key not in self.known:
            work = self._copy if step.kind == "copy" else self._run
            self.known[key] = work(step, device)
        return self.known[key]

    def _copy(self, step: Step, device: str) -> _Price:
        name, target = step.names[0], step.on or device
        num_bytes = self.num_bytes(name, step.parts)
        if target == device:
            seconds = self.costs.copy_s(num_bytes, device, target)
            return _Price(seconds, ((f"{device} memory", 1.0),), "memory")
        seconds = self.costs.send_s(name, num_bytes, device, target)
        return _Price(seconds, ((f"{device} to {target}", 1.0),), "io")

    def _run(self, step: Step, device: str) -> _Price:
        ops = [self.graph.op[name] for name in step.names]
        env = self.context.env(self.graph.batch, self.rows(step.parts))
        if step.by is None:
            seconds = sum(self.costs.run_s(self.graph, op, env, device) for op in ops)
        else:
            seconds = self.costs.group_s(self.graph, ops, step.by, env, device)
        asked = {f"{device} {op.uses}": 1.0 for op in ops}
        share = self.machine.device[device].network_share
        if share > 0 and f"{device} network" in asked:
            asked.setdefault(f"{device} compute", share)
        uses = next((op.uses for op in ops if op.uses != "network"), "network")
        return _Price(seconds, tuple(asked.items()), uses)


class _Memory:
    """Live bytes: loose pieces and places alone until they are freed, buffers all the time."""

    def __init__(self, plan: Plan, prices: _Prices) -> None:
        self.graph, self.prices, self.num_parts = plan.graph, prices, plan.num_parts
        self.copied = plan.copied
        self.places = {place.value: place.buffer for place in plan.places}
        self.pieces: dict[tuple[str, str], list[Piece]] = {}  # by device and root
        self.total = 0
        for buffer in plan.buffers:
            unit = buffer.unit.evaluate(prices.context.env(self.graph.batch))
            inside = [place for place in plan.places if place.buffer == buffer.name]
            ends = [place.offset * unit + prices.num_bytes(place.value) for place in inside]
            self.total += max(ends, default=0)
        self.samples = [(0.0, self.total)]

    def start(self, step: Step, device: str, now_s: float) -> None:
        """Count what a step makes, from its start."""
        if step.kind == "copy":
            self._make(step.on or device, step.names[0], step.parts, placed=step.on is None)
        elif step.kind in ("run", "issue"):
            for name in (name for op in step.names for name in self.graph.op[op].makes):
                value = self.graph.value[name]
                if value.alias_of is None:
                    placed = name in self.places and name not in self.copied
                    self._make(device, name, step.parts, placed=placed)
        self._sample(now_s)

    def end(self, step: Step, device: str, now_s: float) -> None:
        """Drop what a free frees, and the loose piece that a copy has put in its place."""
        if step.kind != "free" and (step.kind != "copy" or step.on is not None):
            return
        root = self.graph.root[step.names[0]]
        pieces = self.pieces.pop((device, root), [])
        for cells, num_bytes, placed in pieces:
            if step.kind == "free" or not placed:
                cells -= self._cells(root, step.parts)
                self.total -= 0 if cells else num_bytes
        self.pieces[device, root] = [piece for piece in pieces if piece[0]]
        self._sample(now_s)

    def _make(self, device: str, name: str, parts: Range | None, *, placed: bool) -> None:
        root = self.graph.root[name]
        parts = None if placed else parts
        pieces, cells = self.pieces.setdefault((device, root), []), self._cells(root, parts)
        # A place is made once for all parts, and the parts of an additive op add to one piece.
        if not any(piece[2] == placed and piece[0] & cells for piece in pieces):
            in_buffer = placed and self.places.get(name) is not None
            num_bytes = 0 if in_buffer else self.prices.num_bytes(name, parts)
            pieces.append((cells, num_bytes, placed))
            self.total += num_bytes

    def _cells(self, root: str, parts: Range | None) -> set[int]:
        batched = self.graph.value[root].batch is not None
        return set(range(*(parts or (0, self.num_parts)))) if batched else {0}

    def _sample(self, now_s: float) -> None:
        if self.total != self.samples[-1][1]:
            self.samples.append((now_s, self.total))


@dataclass(slots=True, eq=False)
class _Line:
    """A lane at work: node `at` of its queue is next, or (busy) under way."""

    name: str
    device: str
    queue: list[int] = field(default_factory=list)
    at: int = 0
    tail: int = _MISSING  # the last node that ended here
    since_s: float = 0.0  # when it came to this node
    busy: bool = False
    price: _Price = _NOTHING
    left_s: float = 0.0  # at full rate, at the time paced_s
    paced_s: float = 0.0
    rate: float = 1.0
    end_s: float = 0.0


class _Simulation:
    """The virtual clock. Node n is step n; node (number of steps + n) is the flight it issued."""

    def __init__(self, plan: Plan, prices: _Prices, contention: bool) -> None:
        self.plan, self.prices, self.contention, self.now_s = plan, prices, contention, 0.0
        self.num_steps, self.labels = len(plan.steps), [step.label for step in plan.steps]
        self.memory = _Memory(plan, prices)
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
        self.ready: deque[_Line] = deque()
        self.active: list[_Line] = []
        for line in self.lines.values():
            line.end_s = prices.costs.begin_s(line.device)
            if line.end_s > 0:
                line.at, line.busy = _BEGIN, True
            (self.active if line.busy else self.ready).append(line)
        self.waiting: dict[int, list[_Line]] = {}
        self.cause: dict[int, int] = {}  # what must have ended before a wait, complete or flight
        self.before: dict[int, int] = {}  # ended nodes, each with the one before it in its chain
        self.reach_s = {_MISSING: 0.0}  # seconds at full rate of the longest chain to a node
        self.spans: dict[int, Span] = {}
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
        if not contention:
            self._widen_links()

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
                self.ready.append(alone)
                if last != _MISSING:
                    self.cause[number] = last

    def run(self) -> Trace:
        """Let the lanes go until nothing is under way any more."""
        while True:
            while self.ready:
                self._go(self.ready.popleft())
            if not self.active:
                break
            if self.contention:
                self._share()
            line = min(self.active, key=lambda line: line.end_s)
            self.active.remove(line)
            self.now_s, line.busy = max(self.now_s, line.end_s), False
            if line.at == _BEGIN:
                line.at, line.since_s = 0, self.now_s
            else:
                self._end(line)
            self.ready.append(line)
        if stuck := [line for line in self.lines.values() if line.at < len(line.queue)]:
            self._deadlock(stuck)
        path, node = [], max(self.reach_s, key=lambda node: self.reach_s[node])
        while node != _MISSING:
            path += [self.spans[node]] if node in self.spans else []
            node = self.before[node]
        spans = sorted(self.spans.values(), key=lambda span: (span.start_s, span.end_s))
        name = " ".join([self.plan.graph_name, *self.plan.history[:1]])
        lanes = tuple((lane.name, lane.device) for lane in self.plan.lanes)
        return Trace(name, tuple(spans), tuple(self.memory.samples), True, tuple(path[::-1]), lanes)

    def _go(self, line: _Line) -> None:
        """Take the nodes of a lane until one takes time or has to wait."""
        while line.at < len(line.queue) and not line.busy:
            node = line.queue[line.at]
            cause = self.cause.get(node)
            if cause is not None and cause not in self.before:
                self.waiting.setdefault(cause, []).append(line)
                return
            step, flight = self.plan.steps[node % self.num_steps], node >= self.num_steps
            line.price = price = self.prices.of(step, line.device, flight=flight)
            if price is _NOTHING:
                self._end(line)
                continue
            if flight:
                line.since_s = self.now_s
            else:
                self.memory.start(step, line.device, self.now_s)
            line.left_s, line.paced_s, line.rate = price.busy_s, self.now_s, 1.0
            line.busy, line.end_s = True, self.now_s + price.busy_s
            self.active.append(line)

    def _share(self) -> None:
        """Set every rate by what is asked of each resource now."""
        asked: dict[str, float] = {}
        for line in self.active:
            for resource, amount in line.price.demands:
                asked[resource] = asked.get(resource, 0.0) + amount
        shares = {name: self.capacity.get(name, 1.0) / amount for name, amount in asked.items()}
        for line in self.active:
            rate = min([1.0] + [shares[resource] for resource, _ in line.price.demands])
            rate /= self._slowdown(line) if self.slowdowns else 1.0
            if rate != line.rate:
                line.left_s = max(0.0, line.left_s - (self.now_s - line.paced_s) * line.rate)
                line.paced_s, line.rate = self.now_s, rate
                line.end_s = self.now_s + line.left_s / rate

    def _slowdown(self, line: _Line) -> float:
        """How many times as long a step takes beside what is under way on other lanes."""
        others = chain(*(other.price.demands[:1] for other in self.active if other is not line))
        pairs = product(line.price.demands[:1], others)
        return max((self.slowdowns.get((a, b), 1.0) for (a, _), (b, _) in pairs), default=1.0)

    def _end(self, line: _Line) -> None:
        """Write down that a lane's node has ended, and after what; wake whoever waits for it."""
        node, price = line.queue[line.at], line.price
        step, label = self.plan.steps[node % self.num_steps], self.labels[node % self.num_steps]
        cause = self.cause.get(node, _MISSING)
        if self.reach_s[line.tail] >= self.reach_s[cause]:
            cause = line.tail
        self.before[node], self.reach_s[node] = cause, self.reach_s[cause] + price.busy_s
        kind = step.kind
        if node >= self.num_steps:
            kind, label = "transfer", label.removeprefix("issue ")
        else:
            self.memory.end(step, line.device, self.now_s)
        if price.uses or self.now_s > line.since_s:
            op = "" if kind in ("copy", "wait") else " ".join(step.names)
            where = kind, label, line.name, line.device, price.uses, op, step.parts
            self.spans[node] = Span(*where, line.since_s, self.now_s, price.busy_s)
        if kind == "issue" and step.on is not None:
            self.lines[step.on].queue.append(node + self.num_steps)
            self.ready.append(self.lines[step.on])
        line.at, line.tail, line.since_s = line.at + 1, node, self.now_s
        self.ready.extend(self.waiting.pop(node, ()))

    def _deadlock(self, stuck: list[_Line]) -> NoReturn:
        lines, step = [], stuck[0].queue[stuck[0].at]
        for line in stuck:
            number = line.queue[line.at]
            why = "which is missing" if self.cause[number] == _MISSING else "which cannot end first"
            lines.append(f"  {line.name} stands at step {number}: {self.labels[number]}, {why}")
        cure = "  Let what is waited for come first, in the order of its own lane."
        text = "\n".join(["deadlock: no lane can go on.", *lines, self.plan.excerpt(step), cure])
        raise PlanError(text, rule="deadlock", lane=stuck[0].name, step=step)
