"""Lowering: pure passes that turn a bare plan into one that can run. Each leaves a history line.

    issue    ops of a lane without a thread become issue and complete, issued as early as possible
    send     values that a step needs on another device are copied there, over lanes of links
    place    values that are needed whole but made in pieces get a place; copies where needed
    wait     steps of different lanes that touch the same bytes are ordered, by few waits; so are
             those that their author gave an edge
    free     bytes are given back after their last use

The last one asks the plan's clocks: what is ordered behind what, by lanes and waits. It adds no
wait, so no lane is slowed down to save bytes.

`lower(plan)` runs them all. Nothing here is trusted: `verify` looks at the result by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchweft.errors import MemoryPlanError
from torchweft.plan.graph import Graph
from torchweft.plan.machine import Lane
from torchweft.plan.plan import Place, Plan, Range, Step, holds
from torchweft.plan.precedence import Ledger


def lower(plan: Plan) -> Plan:
    """A plan that can run: all passes in order. One with waits, copies or frees stays as it is.

    Raises `MemoryPlanError` if a value cannot be where it is needed.
    """
    if any(step.kind in ("wait", "copy", "free") for step in plan.steps):
        return plan
    return add_frees(add_waits(place_wholes(send_values(issue_early(plan)))))


def issue_early(plan: Plan) -> Plan:
    """Two-phase ops on lanes without a thread: issued when their inputs are there, completed late.

    The issue goes right behind the last step of the issuing lane that it needs or comes after; the
    complete right before the first step that needs it or comes after it. Messages of one direction
    stay in their order: the other rank has it too.
    """
    hosted = {i for i, s in enumerate(plan.steps) if s.kind == "run" and plan.lane[s.lane].via}
    if not hosted:
        return plan
    ledger = Ledger(plan.graph, plan.num_parts, plan.lanes)
    before: list[list[int]] = []  # of each step, all that it comes behind
    users: dict[int, list[int]] = {index: [] for index in hosted}
    for index, step in enumerate(plan.steps):
        before.append(ledger.before(step))
        ledger.note(index, step)
        for other in set(before[-1]) & hosted:
            users[other].append(index)
    # Sort keys: (step, 0) where it was recorded, (step, 1, i) right behind a step.
    keys: list[tuple[tuple[float, ...], Step]] = []
    at: dict[int, tuple[float, ...]] = {}
    said: dict[object, float] = {}  # behind which step the last message of a direction goes
    for index, step in enumerate(plan.steps):
        at[index] = (index, 0, 0)
        if index in hosted:
            last = max(before[index], default=-1)
            host = plan.lane[step.lane].via
            if last < 0 or (last not in hosted and plan.steps[last].lane == host):
                at[index] = (last, 1, index)
            for talk in [talk for talk in plan.talks(step) if talk.peer is not None]:
                direction = talk.communicator, talk.peer, talk.kind
                at[index] = max(at[index], (said.get(direction, -1), 1, index))
                said[direction] = at[index][0]
    for index, step in enumerate(plan.steps):
        if index not in hosted:
            keys.append((at[index], step))
            continue
        host = plan.lane[step.lane].via or ""
        first = min((at[user] for user in users[index]), default=(len(plan.steps), 0, 0))
        keys.append((at[index], step._replace(kind="issue", lane=host, on=step.lane)))
        late = (*first[:2], first[2] - 0.5, index)
        keys.append((late, step._replace(kind="complete", lane=host, after=())))
    keys.sort(key=lambda item: item[0])
    return plan.then(f"issue: {len(hosted)} two-phase ops", steps=tuple(step for _, step in keys))


def send_values(plan: Plan) -> Plan:
    """Copies of values that a step needs on another device than the one that made them.

    A value goes once to each device, right behind the step that wrote it, on the lane of the link
    between the two (`cpu.to.gpu0`): links work beside the devices that they join.
    """
    if len({lane.device for lane in plan.lanes}) == 1:
        return plan
    sender = _Sender(plan, plan.graph)
    for index, step in enumerate(plan.steps):
        sender.look(index, step)
    steps = list(sender.behind.get(AHEAD, ()))
    for index, step in enumerate(plan.steps):
        steps += step, *sender.behind.get(index, ())
    links = tuple(lane for name, lane in sender.links.items() if name not in plan.lane)
    note = f"send: {len(sender.sent)} copies"
    return plan.then(note, steps=tuple(steps), lanes=(*plan.lanes, *links))


AHEAD = -1


class _Sender:
    """Knows on which devices each piece of a value is, and which step wrote it last."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        home = plan.lanes[0].device
        self.pieces: dict[str, list[tuple[Range | None, str, int]]] = {
            name: [(None, home, AHEAD)] for name in graph.inputs
        }
        self.written: dict[str, int] = {}  # the last change of a root, or the end of its flight
        self.sent: set[tuple[str, Range | None, str]] = set()
        self.behind: dict[int, list[Step]] = {}  # the copies behind each step
        self.links: dict[str, Lane] = {}

    def look(self, index: int, step: Step) -> None:
        """Send what a step needs, and see what it writes."""
        graph, device = self.graph, self.plan.lane[step.lane].device
        if step.kind == "merge":
            self._send(step.names[0], step.parts, device)
        if step.kind not in ("run", "issue", "complete"):
            return
        for op in map(graph.op.__getitem__, step.names):
            if step.kind != "complete":
                for name in op.touched:
                    self._send(name, step.parts, device)
                for name in op.makes:
                    self.pieces.setdefault(name, []).append((step.parts, device, index))
            else:
                self.written |= {graph.root[name]: index for name in op.makes}
            for name in op.mutates:
                self.written[graph.root[name]] = index
                elsewhere = any(where != device for _, where, _ in self.pieces.get(name, ()))
                if elsewhere or any(name == other for other, *_ in self.sent):
                    where = f"op {op.name!r} on {device!r}"
                    raise MemoryPlanError(f"send: {where} changes {name!r}, which others hold too.")

    def _send(self, name: str, wanted: Range | None, device: str) -> None:
        for parts, source, made_at in self.pieces.get(name, ()):
            known = source == device or (name, parts, device) in self.sent
            if known or not _meet(parts, wanted):
                continue
            self.sent.add((name, parts, device))
            link = f"{source}.to.{device}"
            self.links.setdefault(link, Lane(link, source, ("io",), to=device))
            after = max(made_at, self.written.get(self.graph.root[name], AHEAD))
            self.behind.setdefault(after, []).append(Step("copy", link, (name,), parts, on=device))


def _meet(left: Range | None, right: Range | None) -> bool:
    return left is None or right is None or (left[0] < right[1] and right[0] < left[1])


def place_wholes(plan: Plan) -> Plan:
    """Places for values that some step needs in one piece although they are made in several."""
    if plan.num_parts == 1:
        return plan
    graph = plan.graph
    needed = sorted(_torn(plan, graph), key=[value.name for value in graph.values].index)
    moved = plan.copied.intersection(needed)
    steps: list[Step] = []
    for step in plan.steps:
        steps.append(step)
        made = made_by(plan, step, "run", "complete")
        steps += [Step("copy", step.lane, (n,), step.parts) for n in made if n in moved]
    places = (*plan.places, *(Place(name) for name in needed))
    note = f"place: {len(needed)} values whole, {len(moved)} of them by copies"
    return plan.then(note, steps=tuple(steps), places=places) if needed else plan


def made_by(plan: Plan, step: Step, *kinds: str) -> list[str]:
    """What the ops of a step make, if it is of these kinds (by default one that starts ops)."""
    ops = step.names if step.kind in (kinds or ("run", "issue")) else ()
    return [name for op in ops for name in plan.graph.op[op].makes]


def _torn(plan: Plan, graph: Graph) -> set[str]:
    """Roots that are made piece by piece and touched by a step across pieces."""
    pieces: dict[str, set[Range | None]] = {}
    for step in plan.steps:
        for name in made_by(plan, step) if step.parts is not None else ():
            if graph.value[name].batch is not None and graph.value[name].alias_of is None:
                pieces.setdefault(name, set()).add(step.parts)
    torn = set()
    for step in plan.steps:
        if step.kind in ("run", "issue"):
            names = [n for op in step.names for n in graph.op[op].touched]
        elif step.kind in ("merge", "copy"):
            names = list(step.names)
        else:
            continue
        for name in names:
            root = graph.root[name]
            wide = None if graph.value[name].batch is None else step.parts
            if root in pieces and not any(holds(piece, wide) for piece in pieces[root]):
                torn.add(root)
    return torn


def add_waits(plan: Plan) -> Plan:
    """Waits between lanes, as few as keep conflicts, edges and collectives in recorded order.

    Each lane has a clock: how far it knows the other lanes to have come. A step waits for the last
    step it needs of each other lane, unless its clock or another of its waits implies it. Copies of
    a link may be under way at once: the arrival of one says nothing about those before it.
    """
    ledger = Ledger(plan.graph, plan.num_parts, plan.lanes)
    talked: dict[object, int] = {}
    clocks: dict[str, dict[str, int]] = {lane.name: {} for lane in plan.lanes}
    ends: list[dict[str, int]] = []
    counts: dict[str, int] = {}
    steps: list[Step] = []
    at: list[tuple[str, int]] = []  # the queue of a step, and its place there
    num_waits = 0
    for index, step in enumerate(plan.steps):
        clock = clocks[step.lane]
        sent = step.kind == "copy" and step.on is not None
        queue = f"{step.lane} {index}" if sent else step.lane
        needs: dict[str, int] = {}
        ahead = [] if step.kind == "complete" else ledger.before(step)
        for talk in plan.talks(step):  # start after start, on each channel
            channel = (talk.communicator, talk.peer, talk.peer is None or talk.kind)
            ahead += [talked[channel]] if talked.get(channel, index) != index else []
            talked[channel] = index
        for other in ahead:
            lane, count = at[other]
            if plan.steps[other].lane != step.lane and count > clock.get(lane, 0):
                needs[lane] = max(needs.get(lane, -1), other)
        for lane, other in sorted(needs.items()):
            known = (ends[o].get(lane, 0) for other_lane, o in needs.items() if other_lane != lane)
            if max(known, default=0) < at[other][1]:
                steps.append(Step("wait", step.lane, target=plan.steps[other].label))
                num_waits += 1
        for other in needs.values():
            for lane, count in ends[other].items():
                clock[lane] = max(clock.get(lane, 0), count)
        counts[queue] = counts.get(queue, 0) + 1
        at.append((queue, counts[queue]))
        ends.append(clock if len(plan.lanes) == 1 else {**clock, queue: counts[queue]})
        if not sent:
            clock[queue] = counts[queue]
        steps.append(step)
        if step.kind != "issue":
            ledger.note(index, step)
    return plan.then(f"wait: {num_waits} waits", steps=tuple(steps)) if num_waits else plan


Clock = Mapping[str, int]


def clocks(plan: Plan) -> tuple[list[Clock], list[int]]:
    """For each step how far each lane is known to be when it ends, and its place on its lane.

    The steps must stand in an order in which they could run one by one, as `lower` leaves them.
    """
    now: dict[str, dict[str, int]] = {lane.name: {} for lane in plan.lanes}
    ended: dict[str, Clock] = {}
    ends: list[Clock] = []
    at: list[int] = []
    targets = {step.target for step in plan.steps if step.kind == "wait"}
    for step in plan.steps:
        before = now[step.lane]
        now[step.lane] = clock = {**before, step.lane: before.get(step.lane, 0) + 1}
        for lane, count in ended.get(step.target or "", {}).items():
            clock[lane] = max(clock.get(lane, 0), count)
        ends.append(clock)
        at.append(clock[step.lane])
        if targets and step.label in targets:
            ended.setdefault(step.label, clock)
    return ends, at


@dataclass
class Life:
    """The steps that touch one location of a root, and those that write it first."""

    root: str
    parts: Range | None
    first: int
    uses: list[int] = field(default_factory=list)


def lives(plan: Plan) -> list[Life]:
    """Every location that an op makes, with all its uses, in the order of making."""
    graph, ledger = plan.graph, Ledger(plan.graph, plan.num_parts, plan.lanes)
    placed = {place.value for place in plan.places}
    locations: list[Life] = []
    where: dict[tuple[str, int], Life] = {}
    for index, step in enumerate(plan.steps):
        if step.kind == "free":
            continue
        makes = set(made_by(plan, step))
        opened: dict[str, Life] = {}
        for name, part, _ in ledger.touched(step):
            life = where.get((name, part))
            if life is None and name in makes:
                if name not in opened:
                    whole = name in placed or graph.value[name].batch is None
                    opened[name] = Life(name, None if whole else step.parts, index)
                    locations.append(opened[name])
                life = opened[name]
                count = 1 if graph.value[name].batch is None else plan.num_parts
                for each in range(*(life.parts or (0, count))):
                    where[name, each] = life
            if life is not None and (not life.uses or life.uses[-1] != index):
                life.uses.append(index)
    return locations


def over(plan: Plan, life: Life, at: list[int]) -> Clock:
    """How far each lane must have come for all uses to be over."""
    needs: dict[str, int] = {}
    for use in life.uses:
        needs[plan.steps[use].lane] = max(needs.get(plan.steps[use].lane, 0), at[use])
    return needs


def add_frees(plan: Plan) -> Plan:
    """A free behind the last use of each location, on a lane that knows all uses to be over."""
    graph = plan.graph
    kept = {graph.root[name] for name in graph.outputs}
    kept |= {place.value for place in plan.places if place.buffer is not None}  # dead by reuse
    ends, at = clocks(plan)
    after: dict[int, list[Step]] = {}
    rows: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        rows.setdefault(step.lane, []).append(index)
    foreign = {step.names[0] for step in plan.steps if step.kind == "copy" and step.on is not None}
    for life in lives(plan):
        if life.root in kept or life.root in foreign:
            continue
        lane, needs = plan.steps[life.uses[-1]].lane, over(plan, life, at)
        for index in rows[lane][at[life.uses[-1]] - 1 :]:
            if all(ends[index].get(other, 0) >= count for other, count in needs.items()):
                after.setdefault(index, []).append(Step("free", lane, (life.root,), life.parts))
                break
    steps = [s for index, step in enumerate(plan.steps) for s in (step, *after.get(index, ()))]
    return plan.then(f"free: {len(steps) - len(plan.steps)} frees", steps=tuple(steps))
