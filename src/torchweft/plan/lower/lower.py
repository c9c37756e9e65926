"""Lowering: pure passes that turn a bare plan into one that can run. Each leaves a history line.

    issue    ops of a lane without a thread become issue and complete, issued as early as possible
    send     values that a step needs on another device are copied there
    place    values that are needed whole but made in pieces get a place; copies where needed
    wait     steps of different lanes that touch the same bytes are ordered, with as few waits as do
    reuse    (memory.py) values that are never alive together share buffers
    free     (memory.py) bytes are given back after their last use

`lower(plan)` runs them all. Nothing here is trusted: `verify` looks at the result by itself.
"""

from __future__ import annotations

from torchweft.errors import MemoryPlanError
from torchweft.plan.graph import Graph
from torchweft.plan.lower.conflicts import Ledger, conflicts
from torchweft.plan.lower.memory import add_frees, share_buffers
from torchweft.plan.plan import Place, Plan, Range, Step, holds


def lower(plan: Plan, *, buffers: bool = False) -> Plan:
    """A plan that can run: all passes in order. `buffers`: values share bytes of planned buffers.

    Raises `MemoryPlanError` if a value cannot be where it is needed.
    """
    plan = add_waits(place_wholes(send_values(issue_early(plan))))
    return add_frees(share_buffers(plan) if buffers else plan)


def issue_early(plan: Plan) -> Plan:
    """Two-phase ops on lanes without a thread: issued when their inputs are there, completed late.

    The issue goes right behind the last step of the issuing lane that it needs; the complete right
    before the first step that needs it.
    """
    hosted = {i for i, s in enumerate(plan.steps) if s.kind == "run" and plan.lane[s.lane].via}
    if not hosted:
        return plan
    before = conflicts(plan)
    users: dict[int, list[int]] = {index: [] for index in hosted}
    for index, found in enumerate(before):
        for other in set(found) & hosted:
            users[other].append(index)
    # Sort keys: (step, 0) where it was recorded, (step, 1, i) right behind a step.
    keys: list[tuple[tuple[float, ...], Step]] = []
    at: dict[int, tuple[float, ...]] = {}
    for index, step in enumerate(plan.steps):
        at[index] = (index, 0, 0)
        if index in hosted:
            last = max(before[index], default=-1)
            host = plan.lane[step.lane].via
            if last < 0 or (last not in hosted and plan.steps[last].lane == host):
                at[index] = (last, 1, index)
    for index, step in enumerate(plan.steps):
        if index not in hosted:
            keys.append((at[index], step))
            continue
        host = plan.lane[step.lane].via or ""
        first = min((at[user] for user in users[index]), default=(len(plan.steps), 0, 0))
        keys.append((at[index], step._replace(kind="issue", lane=host, on=step.lane)))
        late = (*first[:2], first[2] - 0.5, index)
        keys.append((late, step._replace(kind="complete", lane=host)))
    keys.sort(key=lambda item: item[0])
    return plan.then(f"issue: {len(hosted)} two-phase ops", steps=tuple(step for _, step in keys))


def send_values(plan: Plan) -> Plan:
    """Copies for values that a step needs on another device than the one that made them."""
    if len({lane.device for lane in plan.lanes}) == 1:
        return plan
    sender = _Sender(plan, plan.graph)
    steps: list[Step] = []
    for step in plan.steps:
        steps += sender.copies(step)
        steps.append(step)
    return plan.then(f"send: {sender.num_copies} copies", steps=tuple(steps))


class _Sender:
    """Knows on which devices each piece of a value is."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph, self.num_copies = plan, graph, 0
        home = plan.lanes[0].device
        self.pieces: dict[str, list[tuple[Range | None, str]]] = {
            n: [(None, home)] for n in graph.inputs
        }
        self.sent: set[tuple[str, Range | None, str]] = set()
        self.lanes = {lane.device: lane.name for lane in reversed(plan.lanes) if lane.via is None}

    def copies(self, step: Step) -> list[Step]:
        if step.kind not in ("run", "issue", "merge"):
            return []
        graph, device = self.graph, self.plan.lane[step.lane].device
        names = step.names if step.kind != "merge" else ()
        reads = [n for op in names for n in graph.op[op].touched]
        reads += step.names if step.kind == "merge" else ()
        found: list[Step] = []
        for name in dict.fromkeys(reads):
            found += self._send(name, step, device)
        for op in names:
            for name in graph.op[op].makes:
                self.pieces.setdefault(name, []).append((step.parts, device))
            for name in graph.op[op].mutates:
                if any(other[0] == name for other in self.sent) or self._foreign(name, device):
                    text = f"send: op {op!r} on {device!r} changes {name!r}, which others hold too."
                    raise MemoryPlanError(text)
        self.num_copies += len(found)
        return found

    def _send(self, name: str, step: Step, device: str) -> list[Step]:
        found = []
        for parts, where in self.pieces.get(name, ()):
            known = where == device or (name, parts, device) in self.sent
            if known or not _meet(parts, step.parts):
                continue
            self.sent.add((name, parts, device))
            found.append(Step("copy", self.lanes[where], (name,), parts, on=device))
        return found

    def _foreign(self, name: str, device: str) -> bool:
        return any(where != device for _, where in self.pieces.get(name, ()))


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
        if step.kind in ("run", "complete"):
            for op in step.names:
                for name in graph.op[op].makes:
                    if name in moved:
                        steps.append(Step("copy", step.lane, (name,), step.parts))
    places = (*plan.places, *(Place(name) for name in needed))
    note = f"place: {len(needed)} values whole, {len(moved)} of them by copies"
    return plan.then(note, steps=tuple(steps), places=places) if needed else plan


def _torn(plan: Plan, graph: Graph) -> set[str]:
    """Roots that are made piece by piece and touched by a step across pieces."""
    pieces: dict[str, set[Range | None]] = {}
    for step in plan.steps:
        if step.kind in ("run", "issue") and step.parts is not None:
            for op in step.names:
                for name in graph.op[op].makes:
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
    """Waits between lanes, as few as keep conflicts, and collectives, in their recorded order.

    Each lane has a clock: how far it knows the other lanes to have come. A step waits for the last
    step it needs of each other lane, unless its clock or another of its waits tells already.
    """
    ledger = Ledger(plan, plan.graph)
    talked: dict[object, int] = {}
    clocks: dict[str, dict[str, int]] = {lane.name: {} for lane in plan.lanes}
    ends: list[dict[str, int]] = []
    counts: dict[str, int] = {}
    steps: list[Step] = []
    at: list[int] = []
    num_waits = 0
    for index, step in enumerate(plan.steps):
        clock = clocks[step.lane]
        needs: dict[str, int] = {}
        ahead = [] if step.kind == "complete" else ledger.before(step)
        for name in step.names if step.kind in ("run", "issue") else ():
            if talk := plan.graph.op[name].collective:  # start after start, on each channel
                channel = (talk.communicator, talk.peer, talk.peer is None or talk.kind)
                ahead += [talked[channel]] if channel in talked else []
                talked[channel] = index
        for other in ahead:
            lane = plan.steps[other].lane
            if lane != step.lane and at[other] > clock.get(lane, 0):
                needs[lane] = max(needs.get(lane, -1), other)
        for lane, other in sorted(needs.items()):
            told = (ends[o].get(lane, 0) for other_lane, o in needs.items() if other_lane != lane)
            if max(told, default=0) < at[other]:
                steps.append(Step("wait", step.lane, target=plan.steps[other].label))
                num_waits += 1
        for other in needs.values():
            for lane, count in ends[other].items():
                clock[lane] = max(clock.get(lane, 0), count)
        counts[step.lane] = clock[step.lane] = counts.get(step.lane, 0) + 1
        at.append(counts[step.lane])
        ends.append(dict(clock) if len(plan.lanes) > 1 else clock)
        steps.append(step)
        if step.kind != "issue":
            ledger.note(index, step)
    return plan.then(f"wait: {num_waits} waits", steps=tuple(steps)) if num_waits else plan
