"""The simulator: runs a `Plan` on a virtual clock and gives the `Trace` that it would leave.

    plan, context, machine, costs --simulate--> Trace          nothing runs, no clock is read

Each step is an *activity* that takes its cost at full rate; splits, merges, frees and waits take
nothing. An issued op is a second activity, in flight on its hosted lane; those of one lane follow each
other in the order of issue. Activities lean on resources of their device:

    run, copy             1 of each of its `uses` (a copy: memory, or the link between the devices)
    network op in flight  1 of network, and `network_share` of compute

`capacity` lanes' worth of compute, memory and io are there, one of network and of each link. If more
is asked for, all who ask get the same share of their full rate; an activity goes as fast as its
scarcest resource. One rank is simulated; the others are taken to be as fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from torchweft.context import Context
from torchweft.cost import Costs
from torchweft.errors import MachineError, PlanError, unknown
from torchweft.graph import Op
from torchweft.machine import Machine
from torchweft.plan import Plan, Range, Step
from torchweft.trace import Span, Trace

Demands = tuple[tuple[str, float], ...]
_INSTANT = ("split", "merge", "free", "wait")
_MISSING = -1


def simulate(
    plan: Plan,
    context: Context,
    machine: Machine,
    costs: Costs | None = None,
    *,
    contention: bool = True,
) -> Trace:
    """The trace of one call. Without contention every step takes exactly its cost.

    Raises `PlanError` (rule "deadlock", with where each lane stands) for a plan that cannot end.
    """
    return _Simulation(plan, context, machine, costs or Costs(machine), contention).run()


class _Price(NamedTuple):
    """What an activity asks for: seconds at full rate, resources, and what its span `uses`."""

    busy_s: float
    demands: Demands = ()
    uses: str = ""


@dataclass(slots=True, eq=False)
class _Activity:
    """Something under way: `left_s` at full rate were left at `since_s`."""

    node: int
    lane: str
    price: _Price
    left_s: float
    since_s: float
    end_s: float
    rate: float = 1.0


class _Rows:
    """The rows of each part, and what ranges of parts cost in seconds and bytes."""

    def __init__(self, plan: Plan, context: Context, machine: Machine, costs: Costs) -> None:
        self.plan, self.graph, self.context = plan, plan.graph, context
        self.machine, self.costs = machine, costs
        one = plan.num_parts == 1
        self.bounds = (
            (0, context.batch)
            if one
            else plan.cut.bounds(context.batch, context.tokens_per_request)
        )
        self.known: dict[object, _Price] = {}
        self.bytes: dict[tuple[str, int], int] = {}

    def count(self, parts: Range | None) -> int:
        first, last = parts or (0, self.plan.num_parts)
        return self.bounds[last] - self.bounds[first]

    def num_bytes(self, name: str, parts: Range | None) -> int:
        key = name, self.count(parts)
        if key not in self.bytes:
            env = self.context.env(self.graph.batch, key[1])
            self.bytes[key] = max(0, self.graph.value[name].bytes.evaluate(env))
        return self.bytes[key]

    def price(self, step: Step, device: str) -> _Price:
        """What a run (or the flight of an issued op) or a copy asks for, alone."""
        rows = self.count(step.parts)
        key = (
            step.kind == "copy",
            step.names,
            rows,
            step.on if step.kind == "copy" else step.by,
            device,
        )
        if key not in self.known:
            self.known[key] = self._copy(step, device) if key[0] else self._run(step, rows, device)
        return self.known[key]

    def _copy(self, step: Step, device: str) -> _Price:
        target = step.on or device
        seconds = self.costs.copy_s(self.num_bytes(step.names[0], step.parts), device, target)
        if target == device:
            return _Price(seconds, ((f"{device} memory", 1.0),), "memory")
        return _Price(seconds, ((f"{device} to {target}", 1.0),), "io")

    def _run(self, step: Step, rows: int, device: str) -> _Price:
        ops = [self.graph.op[name] for name in step.names]
        env = self.context.env(self.graph.batch, rows)
        if step.by is not None:
            seconds = self.costs.group_s(self.graph, ops, step.by, env, device)
        else:
            seconds = sum(self.costs.run_s(self.graph, op, env, device) for op in ops)
        uses = next((op.uses for op in ops if op.uses != "network"), "network")
        return _Price(seconds, self._demands(ops, device), uses)

    def _demands(self, ops: list[Op], device: str) -> Demands:
        asked = {f"{device} {op.uses}": 1.0 for op in ops}
        share = self.machine.device[device].network_share
        if share > 0 and f"{device} network" in asked:
            asked.setdefault(f"{device} compute", share)
        return tuple(asked.items())


class _Memory:
    """Live bytes: loose pieces and places alone until they are freed, buffers all the time."""

    def __init__(self, plan: Plan, rows: _Rows) -> None:
        self.plan, self.rows, self.value = plan, rows, plan.graph.value
        self.places = {place.value: place for place in plan.places}
        self.live: dict[tuple[str, str, int], int] = {}
        self.alone: dict[tuple[str, str], set[int]] = {}
        self.family: dict[str, list[str]] = {}
        for name, root in plan.graph.root.items():
            self.family.setdefault(root, []).append(name)
        self.total = sum(map(self._buffer_bytes, (buffer.name for buffer in plan.buffers)))
        self.samples = [(0.0, self.total)]

    def _buffer_bytes(self, buffer: str) -> int:
        env = self.rows.context.env(self.rows.graph.batch)
        unit = next(item.unit for item in self.plan.buffers if item.name == buffer).evaluate(env)
        inside = [place for place in self.plan.places if place.buffer == buffer]
        ends = [place.offset * unit + self.rows.num_bytes(place.value, None) for place in inside]
        return max(ends, default=0)

    def starts(self, step: Step, device: str, now_s: float) -> None:
        """Count what a step makes, from its start."""
        before = self.total
        if step.kind in ("run", "issue"):
            for op in step.names:
                for name in self.plan.graph.op[op].makes:
                    if self.value[name].alias_of is None:
                        in_place = name in self.places and self.value[name].placeable
                        self._make(name, step.parts, device, in_place)
        elif step.kind == "copy":
            self._make(step.names[0], step.parts, step.on or device, step.on is None)
        self._sample(before, now_s)

    def ends(self, step: Step, device: str, now_s: float) -> None:
        """Drop what a step leaves behind: the loose piece that a copy moved, what a free frees."""
        before = self.total
        name = step.names[0] if step.names else ""
        if step.kind == "copy" and step.on is None:
            self._drop(name, step.parts, device)
        elif step.kind == "free":
            for member in self.family[name]:
                self._drop(member, step.parts, device)
            cells = self.alone.get((device, name))
            if cells is not None:
                cells.difference_update(self._cells(name, step.parts))
                if not cells:
                    self.total -= self.rows.num_bytes(name, None)
                    del self.alone[device, name]
        self._sample(before, now_s)

    def _cells(self, name: str, parts: Range | None) -> range:
        batched = self.value[name].batch is not None
        return range(*(parts or (0, self.plan.num_parts))) if batched else range(1)

    def _make(self, name: str, parts: Range | None, device: str, in_place: bool) -> None:
        if in_place:
            place = self.places.get(name)
            if place is not None and place.buffer is None and (device, name) not in self.alone:
                self.alone[device, name] = set(self._cells(name, None))
                self.total += self.rows.num_bytes(name, None)
            return
        batched = self.value[name].batch is not None
        for cell in self._cells(name, parts):
            if (
                device,
                name,
                cell,
            ) not in self.live:  # the parts of an additive op add to one piece
                num_bytes = self.rows.num_bytes(name, (cell, cell + 1) if batched else None)
                self.live[device, name, cell] = num_bytes
                self.total += num_bytes

    def _drop(self, name: str, parts: Range | None, device: str) -> None:
        for cell in self._cells(name, parts):
            self.total -= self.live.pop((device, name, cell), 0)

    def _sample(self, before: int, now_s: float) -> None:
        if self.total != before:
            self.samples.append((now_s, self.total))


@dataclass(slots=True)
class _Line:
    """A lane at work: its steps, where it stands, since when, and the last thing that ended on it."""

    device: str
    queue: list[int] = field(default_factory=list)
    at: int = 0
    since_s: float = 0.0
    tail: int = _MISSING
    flights: deque[int] = field(default_factory=deque)
    flying: bool = False


class _Simulation:
    """The virtual clock. A node is a step, or (number of steps + n) the flight that step n issued."""

    def __init__(
        self, plan: Plan, context: Context, machine: Machine, costs: Costs, contention: bool
    ) -> None:
        self.plan, self.machine, self.costs, self.contention = plan, machine, costs, contention
        self.lines = {lane.name: _Line(lane.device) for lane in plan.lanes}
        self.labels: dict[str, int] = {}
        self.issues: dict[tuple[tuple[str, ...], Range | None], int] = {}
        for lane in plan.lanes:
            if lane.device not in machine.device:
                raise MachineError(f"lane: {unknown('device', lane.device, machine.device)}")
        for number, step in enumerate(plan.steps):
            self._check(number, step)
            self.lines[step.lane].queue.append(number)
            self.labels.setdefault(step.label, number)
            if step.kind == "issue":
                self.issues.setdefault((step.names, step.parts), number)
        self.rows = _Rows(plan, context, machine, costs)
        self.memory = _Memory(plan, self.rows)
        self.now_s = 0.0
        self.ready = deque(self.lines)
        self.active: list[_Activity] = []
        self.waiting: dict[int, list[str]] = {}
        self.reach_s: dict[int, float] = {_MISSING: 0.0}  # longest chain that ends with a node
        self.before: dict[int, int] = {}
        self.spans: dict[int, Span] = {}

    def _check(self, number: int, step: Step) -> None:
        """Refuse names that mean nothing; all else is left to `verify`."""
        graph, why = self.plan.graph, ""
        known = graph.op if step.kind in ("run", "issue", "complete") else graph.value
        for name in step.names:
            if name not in known:
                why = unknown("op" if known is graph.op else "value", name, known)
        for lane in (step.lane, step.on if step.kind == "issue" else None):
            if lane is not None and lane not in self.lines:
                why = unknown("lane", lane, self.lines)
        if step.parts is not None and not 0 <= step.parts[0] < step.parts[1] <= self.plan.num_parts:
            why = f"there are parts 0 to {self.plan.num_parts - 1} only."
        if why:
            text = f"name: {why}\n{self.plan.excerpt(number)}"
            raise PlanError(text, rule="name", lane=step.lane, step=number)

    def run(self) -> Trace:
        """Let lanes go until nothing is under way any more."""
        while True:
            while self.ready:
                self._go(self.ready.popleft())
            if not self.active:
                break
            if self.contention:
                self._share()
            activity = min(self.active, key=lambda activity: activity.end_s)
            self.active.remove(activity)
            self.now_s = max(self.now_s, activity.end_s)
            self._end(activity)
        if any(line.at < len(line.queue) for line in self.lines.values()):
            self._deadlock()
        path, node = [], max(self.reach_s, key=lambda node: self.reach_s[node])
        while node != _MISSING:
            path += [self.spans[node]] if node in self.spans else []
            node = self.before[node]
        spans = sorted(self.spans.values(), key=lambda span: (span.start_s, span.end_s))
        name = " ".join([self.plan.graph_name, *self.plan.history[:1]])
        lanes = tuple((lane.name, lane.device) for lane in self.plan.lanes)
        samples = tuple(self.memory.samples)
        return Trace(name, tuple(spans), samples, True, tuple(reversed(path)), lanes)

    def _go(self, lane: str) -> None:
        """Take the lane's steps until one takes time or has to wait."""
        line = self.lines[lane]
        while line.at < len(line.queue):
            number = line.queue[line.at]
            step = self.plan.steps[number]
            if (
                step.kind in ("wait", "complete")
                and (cause := self._cause(step)) not in self.before
            ):
                self.waiting.setdefault(cause, []).append(lane)
                return
            if step.kind not in _INSTANT:
                self._start(number, lane, self._price(step, line.device))
                self.memory.starts(step, line.device, self.now_s)
                return
            self._ended(number, lane, _Price(0.0))

    def _cause(self, step: Step) -> int:
        """The node that must have ended before a wait or a complete."""
        if step.kind == "wait":
            return self.labels.get(step.target or "", _MISSING)
        issue = self.issues.get((step.names, step.parts), _MISSING)
        return issue if issue == _MISSING else issue + len(self.plan.steps)

    def _price(self, step: Step, device: str) -> _Price:
        if step.kind == "issue":
            return _Price(self.costs.issue_s(device), uses="network")
        if step.kind == "complete":
            return _Price(self.costs.complete_s(device), uses="network")
        return self.rows.price(step, device)

    def _start(self, node: int, lane: str, price: _Price) -> None:
        end_s = self.now_s + price.busy_s
        self.active.append(_Activity(node, lane, price, price.busy_s, self.now_s, end_s))

    def _fly(self, lane: str) -> None:
        """Start the next flight of a hosted lane if none is under way."""
        line = self.lines[lane]
        if line.flights and not line.flying:
            number = line.flights.popleft()
            line.flying, line.since_s = True, self.now_s
            price = self.rows.price(self.plan.steps[number], line.device)
            self._start(number + len(self.plan.steps), lane, price)

    def _share(self) -> None:
        """Set every rate by what is asked of each resource now."""
        asked: dict[str, float] = {}
        for activity in self.active:
            for resource, amount in activity.price.demands:
                asked[resource] = asked.get(resource, 0.0) + amount
        for activity in self.active:
            rate = 1.0
            for resource, _ in activity.price.demands:
                rate = min(rate, self._capacity(resource) / asked[resource])
            if rate != activity.rate:
                done_s = (self.now_s - activity.since_s) * activity.rate
                activity.left_s = max(0.0, activity.left_s - done_s)
                activity.since_s, activity.rate = self.now_s, rate
                activity.end_s = self.now_s + activity.left_s / rate

    def _capacity(self, resource: str) -> float:
        device, _, uses = resource.rpartition(" ")
        return self.machine.device[device].capacity if uses in ("compute", "memory", "io") else 1.0

    def _end(self, activity: _Activity) -> None:
        node, lane = activity.node, activity.lane
        self._ended(node, lane, activity.price)
        if node >= len(self.plan.steps):
            self.lines[lane].flying = False
            self._fly(lane)
            return
        step = self.plan.steps[node]
        if step.kind == "issue" and step.on is not None:
            self.lines[step.on].flights.append(node)
            self._fly(step.on)
        self.ready.append(lane)

    def _ended(self, node: int, lane: str, price: _Price) -> None:
        """Write down that a node has ended, how, and after what; wake who waits for it."""
        line, num_steps = self.lines[lane], len(self.plan.steps)
        step = self.plan.steps[node % num_steps]
        causes = [line.tail]
        if node >= num_steps:
            causes.append(node - num_steps)
        elif step.kind in ("wait", "complete"):
            causes.append(self._cause(step))
        cause = max(causes, key=lambda cause: self.reach_s[cause])
        self.before[node], self.reach_s[node] = cause, self.reach_s[cause] + price.busy_s
        if step.kind not in _INSTANT or (step.kind == "wait" and self.now_s > line.since_s):
            self.spans[node] = self._span(node, lane, price)
        if node < num_steps:
            line.at += 1
            self.memory.ends(step, line.device, self.now_s)
        line.tail, line.since_s = node, self.now_s
        self.ready.extend(self.waiting.pop(node, ()))

    def _span(self, node: int, lane: str, price: _Price) -> Span:
        line, num_steps = self.lines[lane], len(self.plan.steps)
        step = self.plan.steps[node % num_steps]
        flight = node >= num_steps
        kind = "transfer" if flight else step.kind
        label = step.label.removeprefix("issue ") if flight else step.label
        op = " ".join(step.names) if step.kind in ("run", "issue", "complete") else ""
        times = line.since_s, self.now_s, price.busy_s
        return Span(kind, label, lane, line.device, price.uses, op, step.parts, *times)

    def _deadlock(self) -> NoReturn:
        stuck = [(name, line) for name, line in self.lines.items() if line.at < len(line.queue)]
        lines = []
        for name, line in stuck:
            step = self.plan.steps[line.queue[line.at]]
            missing = self._cause(step) == _MISSING
            why = "which is not in the plan" if missing else "which cannot end before it"
            lines.append(
                f"  lane {name!r} stands at step {line.queue[line.at]}, {step.label!r}, {why}"
            )
        lane, first = stuck[0][0], stuck[0][1].queue[stuck[0][1].at]
        raise PlanError(
            "deadlock: no lane can go on.\n" + "\n".join(lines) + f"\n{self.plan.excerpt(first)}"
            "\n  Order the steps so that what is waited for comes first, or run lower(plan) again.",
            rule="deadlock",
            lane=lane,
            step=first,
        )
