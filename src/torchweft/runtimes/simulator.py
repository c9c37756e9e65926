"""The simulator: runs a `Plan` on a virtual clock and gives the `Trace` that it would leave.

    plan, context, machine, costs --simulate--> Trace          nothing runs, no clock is read

A step takes its cost at full rate; splits, merges, frees and waits take nothing. An issued op is
then *in flight* on its hosted lane, one after another in the order of issue. What is under way
leans on resources of its device:

    run, copy             1 of each of its `uses` (a copy: memory, or the link between the devices)
    network op in flight  1 of network, and `network_share` of compute

There are `capacity` lanes' worth of compute, memory and io, and one of network and of each link. If
more is asked for, all who ask get the same share of their full rate, and each goes as fast as its
scarcest resource lets it. One rank is simulated; the others are taken to be as fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from torchweft.context import Context
from torchweft.cost import Costs
from torchweft.errors import MachineError, PlanError, unknown
from torchweft.machine import Machine
from torchweft.plan import KINDS, Plan, Range, Step
from torchweft.trace import Span, Trace

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
    _check(plan, machine)
    prices = _Prices(plan, context, machine, costs or Costs(machine))
    return _Simulation(plan, prices, contention).run()


def _check(plan: Plan, machine: Machine) -> None:
    """Refuse names that mean nothing here; whether the plan is safe is left to `verify`."""
    for lane in plan.lanes:
        if lane.device not in machine.device:
            raise MachineError(f"lane: {unknown('device', lane.device, machine.device)}")
    for number, step in enumerate(plan.steps):
        ops = step.kind in ("run", "issue", "complete")
        what, names = ("op", plan.graph.op) if ops else ("value", plan.graph.value)
        asked: list[tuple[str, object, Collection[str]]] = [("lane", step.lane, plan.lane)]
        asked.append(("kind of step", step.kind, KINDS))
        asked += [("lane", step.on, plan.lane)] if step.kind == "issue" else []
        asked += [(what, name, names) for name in step.names]
        wrong = [unknown(what, name, known) for what, name, known in asked if name not in known]
        if step.parts and not 0 <= step.parts[0] < step.parts[1] <= plan.num_parts:
            wrong.append(f"the plan has {plan.num_parts} parts only.")
        if wrong:
            text = f"name: {wrong[0]}\n{plan.excerpt(number)}"
            raise PlanError(text, rule="name", lane=step.lane, step=number)


class _Price(NamedTuple):
    """What a step asks for: seconds at full rate, amounts of resources, what its span uses."""

    busy_s: float = 0.0
    demands: tuple[tuple[str, float], ...] = ()
    uses: str = ""


class _Prices:
    """Seconds and bytes of steps over ranges of parts, each worked out once."""

    def __init__(self, plan: Plan, context: Context, machine: Machine, costs: Costs) -> None:
        self.plan, self.graph, self.context = plan, plan.graph, context
        self.machine, self.costs = machine, costs
        self.bounds: tuple[int, ...] = (0, context.batch)
        if plan.num_parts > 1:
            self.bounds = plan.cut.bounds(context.batch, context.tokens_per_request)
        self.known: dict[object, _Price] = {}
        self.bytes: dict[tuple[str, int], int] = {}

    def rows(self, parts: Range | None) -> int:
        first, last = parts or (0, self.plan.num_parts)
        return self.bounds[last] - self.bounds[first]

    def num_bytes(self, name: str, parts: Range | None = None) -> int:
        key = name, self.rows(parts)
        if key not in self.bytes:
            env = self.context.env(self.graph.batch, key[1])
            self.bytes[key] = max(0, self.graph.value[name].bytes.evaluate(env))
        return self.bytes[key]

    def of(self, step: Step, device: str, *, flight: bool) -> _Price:
        """The price of a step on a device; `flight`: of the op that it issued."""
        if step.kind == "issue" and not flight:
            return _Price(self.costs.issue_s(device), uses="network")
        if step.kind == "complete":
            return _Price(self.costs.complete_s(device), uses="network")
        if step.kind not in ("run", "copy", "issue"):
            return _Price()
        work = self._copy if step.kind == "copy" else self._run
        key = work is self._copy, step.names, self.rows(step.parts), step.on, step.by, device
        if key not in self.known:
            self.known[key] = work(step, device)
        return self.known[key]

    def _copy(self, step: Step, device: str) -> _Price:
        target = step.on or device
        seconds = self.costs.copy_s(self.num_bytes(step.names[0], step.parts), device, target)
        if target == device:
            return _Price(seconds, ((f"{device} memory", 1.0),), "memory")
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
        self.places = {place.value: place for place in plan.places}
        self.loose: dict[tuple[str, str, int], int] = {}
        self.alone: dict[tuple[str, str], set[int]] = {}  # places alone, with their live cells
        self.family: dict[str, list[str]] = {}
        for name, root in self.graph.root.items():
            self.family.setdefault(root, []).append(name)
        env, ends = (
            prices.context.env(self.graph.batch),
            {buffer.name: 0 for buffer in plan.buffers},
        )
        units = {buffer.name: buffer.unit.evaluate(env) for buffer in plan.buffers}
        for value, buffer, offset in plan.places:
            if buffer in units:
                end = offset * units[buffer] + prices.num_bytes(value)
                ends[buffer] = max(ends[buffer], end)
        self.total = sum(ends.values())
        self.samples = [(0.0, self.total)]

    def start(self, step: Step, device: str, now_s: float) -> None:
        """Count what a step makes, from its start."""
        if step.kind == "copy":
            self._make(step.names[0], step, step.on or device, placed=step.on is None)
        elif step.kind in ("run", "issue"):
            for name in (name for op in step.names for name in self.graph.op[op].makes):
                value = self.graph.value[name]
                if value.alias_of is None:
                    placed = name in self.places and value.placeable
                    self._make(name, step, device, placed=placed)
        self._sample(now_s)

    def end(self, step: Step, device: str, now_s: float) -> None:
        """Drop what a free frees, and the loose piece that a copy has put in its place."""
        name = step.names[0] if step.names else ""
        moved = step.kind == "copy" and step.on is None
        for member in self.family[name] if step.kind == "free" else [name] * moved:
            for cell in self._cells(member, step.parts):
                self.total -= self.loose.pop((device, member, cell), 0)
        if step.kind == "free" and (device, name) in self.alone:
            cells = self.alone[device, name]
            cells.difference_update(self._cells(name, step.parts))
            if not cells:
                del self.alone[device, name]
                self.total -= self.prices.num_bytes(name)
        self._sample(now_s)

    def _make(self, name: str, step: Step, device: str, *, placed: bool) -> None:
        if placed:
            alone = name in self.places and self.places[name].buffer is None
            if alone and (device, name) not in self.alone:
                self.alone[device, name] = set(self._cells(name, None))
                self.total += self.prices.num_bytes(name)
            return
        batched = self.graph.value[name].batch is not None
        for cell in self._cells(name, step.parts):
            if (device, name, cell) not in self.loose:  # parts of an additive op share one piece
                num_bytes = self.prices.num_bytes(name, (cell, cell + 1) if batched else None)
                self.loose[device, name, cell] = num_bytes
                self.total += num_bytes

    def _cells(self, name: str, parts: Range | None) -> range:
        batched = self.graph.value[name].batch is not None
        return range(*(parts or (0, self.num_parts))) if batched else range(1)

    def _sample(self, now_s: float) -> None:
        if self.total != self.samples[-1][1]:
            self.samples.append((now_s, self.total))


@dataclass(slots=True)
class _Line:
    """A lane at work: where it stands, since when, and the last node that ended on it."""

    device: str
    queue: list[int] = field(default_factory=list)
    at: int = 0
    since_s: float = 0.0
    tail: int = _MISSING
    busy: bool = False


@dataclass(slots=True, eq=False)
class _Activity:
    """A node under way: `left_s` at full rate were left at `since_s`."""

    node: int
    lane: str
    price: _Price
    left_s: float
    since_s: float
    end_s: float
    rate: float = 1.0


class _Simulation:
    """The virtual clock. Node n is step n; node (number of steps + n) is the flight it issued."""

    def __init__(self, plan: Plan, prices: _Prices, contention: bool) -> None:
        self.plan, self.prices, self.contention = plan, prices, contention
        self.memory = _Memory(plan, prices)
        self.lines = {lane.name: _Line(lane.device) for lane in plan.lanes}
        self.capacity = {
            f"{device.name} {uses}": device.capacity
            for device in prices.machine.devices
            for uses in ("compute", "memory", "io")
        }
        self.labels = [step.label for step in plan.steps]
        self.cause = self._causes()
        self.now_s = 0.0
        self.ready = deque(self.lines)
        self.active: list[_Activity] = []
        self.waiting: dict[int, list[str]] = {}
        self.before: dict[int, int] = {}  # ended nodes, each with the one before it in its chain
        self.reach_s = {_MISSING: 0.0}  # seconds at full rate of the longest chain to a node
        self.spans: dict[int, Span] = {}

    def _causes(self) -> dict[int, int]:
        """Fill the lanes; for each wait, complete and flight, the node that must have ended."""
        first: dict[str, int] = {}
        for number, (step, label) in enumerate(zip(self.plan.steps, self.labels, strict=True)):
            self.lines[step.lane].queue.append(number)
            first.setdefault(label, number)
        causes, num_steps = {}, len(self.plan.steps)
        for number, step in enumerate(self.plan.steps):
            if step.kind == "wait":
                causes[number] = first.get(step.target or "", _MISSING)
            elif step.kind == "complete":
                issue = first.get(self.labels[number].replace("complete", "issue", 1))
                causes[number] = _MISSING if issue is None else issue + num_steps
            elif step.kind == "issue":
                causes[number + num_steps] = number
        return causes

    def run(self) -> Trace:
        """Let the lanes go until nothing is under way any more."""
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
            self.lines[activity.lane].busy = False
            self._end(activity.node, activity.lane, activity.price)
            self.ready.append(activity.lane)
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
        """Take the nodes of a lane until one takes time or has to wait."""
        line, num_steps = self.lines[lane], len(self.plan.steps)
        while line.at < len(line.queue) and not line.busy:
            node = line.queue[line.at]
            cause = self.cause.get(node)
            if cause is not None and cause not in self.before:
                self.waiting.setdefault(cause, []).append(lane)
                return
            step, flight = self.plan.steps[node % num_steps], node >= num_steps
            price = self.prices.of(step, line.device, flight=flight)
            if step.kind in ("split", "merge", "free", "wait"):
                self._end(node, lane, price)
                continue
            if flight:
                line.since_s = self.now_s
            else:
                self.memory.start(step, line.device, self.now_s)
            end_s = self.now_s + price.busy_s
            self.active.append(_Activity(node, lane, price, price.busy_s, self.now_s, end_s))
            line.busy = True

    def _share(self) -> None:
        """Set every rate by what is asked of each resource now."""
        asked: dict[str, float] = {}
        for activity in self.active:
            for resource, amount in activity.price.demands:
                asked[resource] = asked.get(resource, 0.0) + amount
        shares = {name: self.capacity.get(name, 1.0) / amount for name, amount in asked.items()}
        for activity in self.active:
            rate = min([1.0] + [shares[resource] for resource, _ in activity.price.demands])
            if rate != activity.rate:
                done_s = (self.now_s - activity.since_s) * activity.rate
                activity.left_s = max(0.0, activity.left_s - done_s)
                activity.since_s, activity.rate = self.now_s, rate
                activity.end_s = self.now_s + activity.left_s / rate

    def _end(self, node: int, lane: str, price: _Price) -> None:
        """Write down that a node has ended, and after what; wake whoever waits for it."""
        line, num_steps = self.lines[lane], len(self.plan.steps)
        step, flight = self.plan.steps[node % num_steps], node >= num_steps
        cause = self.cause.get(node, _MISSING)
        if self.reach_s[line.tail] >= self.reach_s[cause]:
            cause = line.tail
        self.before[node], self.reach_s[node] = cause, self.reach_s[cause] + price.busy_s
        if price.uses or self.now_s > line.since_s:
            kind, label = step.kind, self.labels[node % num_steps]
            if flight:
                kind, label = "transfer", label.removeprefix("issue ")
            op = " ".join(step.names) if kind not in ("copy", "wait") else ""
            where = kind, label, lane, line.device, price.uses, op, step.parts
            self.spans[node] = Span(*where, line.since_s, self.now_s, price.busy_s)
        if not flight:
            self.memory.end(step, line.device, self.now_s)
        if step.kind == "issue" and not flight and step.on is not None:
            self.lines[step.on].queue.append(node + num_steps)
            self.ready.append(step.on)
        line.at, line.tail, line.since_s = line.at + 1, node, self.now_s
        self.ready.extend(self.waiting.pop(node, ()))

    def _deadlock(self) -> NoReturn:
        lines, where = [], []
        for name, line in self.lines.items():
            if line.at < len(line.queue):
                number = line.queue[line.at]
                missing = self.cause[number] == _MISSING
                why = "which is not in the plan" if missing else "which cannot end before it"
                lines.append(
                    f"  lane {name!r} stands at step {number}: {self.labels[number]}, {why}"
                )
                where.append((name, number))
        (lane, step), shown = where[0], "\n".join(lines)
        raise PlanError(
            f"deadlock: no lane can go on.\n{shown}\n{self.plan.excerpt(step)}\n"
            "  Let what is waited for come first, on its own lane or before a wait of that lane.",
            rule="deadlock",
            lane=lane,
            step=step,
        )
