"""The random plan: a safe draft, dealt to lanes in a random order, with the necessary waits.

    Graph --draft--> steps in program order --deal--> any order that keeps conflicts, on any lane
                                                      that takes it, with a wait where lanes meet

Nothing is taken from `lower`: the oracle's reading of the draft tells, pair by pair, which steps
conflict. There are just enough waits, or more than enough. A seed determines a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

from torchweft.plan.context import Cut
from torchweft.plan.graph import USES, Graph
from torchweft.plan.kernels.declaration import Declaration
from torchweft.plan.machine import Lane
from torchweft.plan.plan import Plan, Range, Step
from torchweft_tools.bench.cases.random_drafts import (
    Drafter,
    ImpossibleError,
    PlanDraft,
    Ranges,
    random_ranges,
)
from torchweft_tools.bench.cases.random_graphs import mirror, random_graph
from torchweft_tools.bench.oracle.content import Action, conflict

FUSED = "fused"
Talked = list[tuple[str, Range | None]]
MAX_DRAWS = 12


def random_plan(
    rng: Random,
    graph: Graph,
    *,
    cut: Cut | None = None,
    ranges: Ranges | None = None,
    talked: Talked | None = None,
) -> Plan:
    """A safe plan of a graph; `ranges` and `talked` (an order of collectives) may be given."""
    cut = cut or random_cut(rng)
    for number in range(MAX_DRAWS):
        lanes = random_lanes(rng, graph, 1 if number > MAX_DRAWS // 2 else rng.choice((1, 1, 2)))
        try:
            all_ranges = dict(ranges or {})
            for name, parts in random_ranges(rng, graph, cut.num_parts).items():
                all_ranges.setdefault(name, parts)
            draft = Drafter(rng, graph, cut, _takers(lanes, graph), all_ranges).run()
            return _Deal(rng, draft, lanes, talked or []).plan()
        except ImpossibleError:
            continue
    return random_plan(rng, graph, cut=cut, ranges={op.name: [None] for op in graph.ops})


def random_pair(rng: Random) -> list[Plan]:
    """The plans of two ranks, mostly with one order of collectives."""
    graph = random_graph(rng, num_ops=rng.choice((1, 2, 2, 3, 4)), talks=0.7)
    first = random_plan(rng, graph)
    ranges: Ranges = {}
    talked: Talked = []
    for step in first.steps:
        for name in step.names if step.kind in ("run", "issue") else ():
            if graph.op[name].collective is not None:
                ranges.setdefault(name, []).append(step.parts)
                talked.append((name, step.parts))
    ranges = {name: sorted(parts, key=lambda r: r or (0, 0)) for name, parts in ranges.items()}
    keep = rng.random() < 0.8
    second = random_plan(
        rng, mirror(graph), cut=first.cut, ranges=ranges, talked=talked if keep else None
    )
    return [first, second]


def random_cut(rng: Random) -> Cut:
    """One to three parts, even or not."""
    num_parts = rng.choice((1, 2, 2, 2, 3))
    if rng.random() < 0.7:
        return Cut.even(num_parts)
    return Cut.sizes([rng.randint(1, 3) for _ in range(num_parts)])


def random_lanes(rng: Random, graph: Graph, num_devices: int) -> tuple[Lane, ...]:
    """One to four lanes, some of them hosted, that take all ops of the graph between them."""
    count = rng.choice((1, 2, 2, 2, 3, 3, 4)) if num_devices == 1 else rng.choice((2, 2, 3, 4))
    lanes: list[Lane] = []
    hosted = count > 1 and rng.random() < 0.5
    for number in range(count - hosted):
        uses = USES if rng.random() < 0.6 else tuple(u for u in USES if rng.random() < 0.5)
        device = "cpu" if number % num_devices == 0 else "gpu0"
        lanes.append(Lane(f"lane{number}", device, uses or ("compute",)))
    if hosted:
        host = rng.choice(lanes)
        uses = rng.choice((("network",), ("network", "io"), USES))
        lanes.append(Lane("network", host.device, uses, via=host.name))
    for op in graph.ops:
        if not any(op.uses in lane.uses and (lane.via is None or op.two_phase) for lane in lanes):
            at = rng.choice([at for at, lane in enumerate(lanes) if lane.via is None])
            taken = tuple(use for use in USES if use in (*lanes[at].uses, op.uses))
            lanes[at] = Lane(lanes[at].name, lanes[at].device, taken)
    if rng.random() < 0.2:
        rng.shuffle(lanes)
    return tuple(lanes)


def _takers(lanes: Sequence[Lane], graph: Graph) -> dict[str, set[str]]:
    """For each device, that of the first lane first, the ops that one of its lanes takes."""
    takers: dict[str, set[str]] = {lane.device: set() for lane in lanes}
    for lane in lanes:
        for op in graph.ops:
            if op.uses in lane.uses and (lane.via is None or op.two_phase):
                takers[lane.device].add(op.name)
    return takers


@dataclass
class _Node:
    """A step to be dealt; `items` are the draft's steps in it, `ends` those that end with it."""

    step: Step
    items: list[int]
    ends: list[int]
    before: set[int] = field(default_factory=set)  # items that must have ended
    starts: set[int] = field(default_factory=set)  # items that must have started


class _Deal:
    """Deals the steps of a draft to lanes."""

    def __init__(
        self, rng: Random, draft: PlanDraft, lanes: tuple[Lane, ...], talked: Talked
    ) -> None:
        self.rng, self.draft, self.lanes, self.graph = rng, draft, lanes, draft.graph
        reading = draft.reading()
        self.actions: tuple[Action, ...] = reading.actions
        self.overlaps = reading.overlaps
        self.before: list[set[int]] = [set() for _ in self.actions]
        self.starts: list[set[int]] = [set() for _ in self.actions]
        self.order: list[set[int]] = [set() for _ in self.actions]
        for late, action in enumerate(self.actions):
            for early in range(late):
                if conflict(self.actions[early], action, self.overlaps) is not None:
                    self.before[late].add(early)
        self.chain(talked)

    def chain(self, talked: Talked) -> None:
        """Order collectives: as another rank did, or those of one communicator by program order."""
        steps = self.draft.steps
        runs = {(s.names[0], s.parts): at for at, s in enumerate(steps) if s.kind == "run"}
        for early, late in pairwise(runs[talk] for talk in talked if talk in runs):
            self.order[late].add(early)

    def shuffled(self) -> list[int]:
        """The draft's steps in a random order that keeps all conflicts."""
        chaos = self.rng.choice((0.0, 0.3, 0.7, 1.0))
        left, order = list(range(len(self.actions))), list[int]()
        while left:
            done = set(order)
            ready = [at for at in left if not (self.before[at] | self.order[at]) - done]
            if not ready:
                raise ImpossibleError
            order.append(self.rng.choice(ready) if self.rng.random() < chaos else ready[0])
            left.remove(order[-1])
        for number, late in enumerate(order):
            keys = {talk.key for talk in self.actions[late].talks}
            for early in order[:number]:
                if keys & {talk.key for talk in self.actions[early].talks}:
                    self.starts[late].add(early)
        return order

    def plan(self) -> Plan:
        nodes = self.with_phases(self.grouped(self.shuffled()))
        steps = self.with_waits(nodes)
        labels = [step.label for step in steps if step.kind != "wait"]
        if len(set(labels)) == len(labels) and self.rng.random() < 0.3:
            position = {lane.name: number for number, lane in enumerate(self.lanes)}
            steps.sort(key=lambda step: position[step.lane])
        draft = self.draft
        facts = (self.graph.name, self.graph.digest, draft.cut, self.lanes, tuple(steps))
        talking = sorted({step.by for step in steps if step.by and step.by != FUSED})
        kinds = [(name, name.removeprefix(f"{FUSED}_")) for name in talking]
        declared = [Declaration(name, talks=((kind, "issue"),)) for name, kind in kinds]
        return Plan(
            *facts, tuple(draft.buffers), tuple(draft.places), declared=tuple(declared),
            bound=self.graph,
        )  # fmt: skip

    # Steps become nodes: kernels for several ops, issues and completes for two-phase ops.

    def threads(self, device: str, ops: Sequence[str]) -> list[str]:
        """The lanes of a device that have a thread and take these ops."""
        uses = {self.graph.op[name].uses for name in ops}
        return [
            lane.name
            for lane in self.lanes
            if lane.via is None and lane.device == device and uses <= set(lane.uses)
        ]

    def grouped(self, order: list[int]) -> list[_Node]:
        """One node a step; some adjacent runs over the same parts become one kernel."""
        nodes: list[_Node] = []
        share = self.rng.choice((0.0, 0.0, 0.15, 0.5))
        for item in order:
            step = self.draft.steps[item]
            node = _Node(step, [item], [item], set(self.before[item]), set(self.starts[item]))
            last = next((one for one in reversed(nodes) if one.step.kind != "copy"), None)
            between = nodes[nodes.index(last) + 1 :] if last is not None else []
            if last is None or self.rng.random() >= share or not self.fits(last, node, between):
                nodes.append(node)
                continue
            names = last.step.names + step.names
            last.step = last.step._replace(names=names, by=self.by(names))
            last.items.append(item)
            last.ends.append(item)
            copies = {item for copy in between for item in copy.items}
            last.before |= node.before - set(last.items) - copies
            last.starts |= node.starts - set(last.items)
        return nodes

    def fits(self, last: _Node, node: _Node, copies: list[_Node]) -> bool:
        """Whether a run can join the kernel before it, and the copies between come after both.

        They can if they move what the kernel makes into its place: the run then reads it where it
        was made. A view of it would be left behind, so the run must not make one.
        """
        one, two = last.step, node.step
        if {one.kind, two.kind} != {"run"} or (one.lane, one.parts) != (two.lane, two.parts):
            return False
        if not self.may_be_kernel(one.names + two.names):
            return False
        made = {name for op in one.names for name in self.graph.op[op].makes}
        aliased = {self.graph.root[name] for name in self.graph.op[two.names[0]].makes}
        for copy in copies:
            name = copy.step.names[0]
            if copy.step.on is not None or name not in made or name in aliased:
                return False
        actions = [self.actions[item] for item in last.items + node.items]
        if sum(len(action.talks) for action in actions) > 1:
            return False
        touched = {cell for action in actions for cell in action.touches}
        apart = not any(near in touched for cell in touched for near in self.overlaps.get(cell, ()))
        return apart and bool(self.threads(one.lane, one.names + two.names))

    def may_be_kernel(self, names: Sequence[str]) -> bool:
        """Whether no op writes into a place, for a kernel does not and then there would be a copy,
        and what is said can be said by a kernel.
        """
        made = {name for op in names for name in self.graph.op[op].makes}
        placed = made & {place.value for place in self.draft.places}
        talks = [talk for op in names if (talk := self.graph.op[op].collective) is not None]
        if len(talks) > 1 or any(talk.peer is not None for talk in talks):
            return False
        return not any(self.graph.value[name].placeable for name in placed)

    def by(self, names: Sequence[str]) -> str:
        """The name of a kernel: with the kind of what it says in the place of a collective."""
        talks = [talk for op in names if (talk := self.graph.op[op].collective) is not None]
        return "_".join([FUSED, *(talk.kind for talk in talks)])

    def with_phases(self, nodes: list[_Node]) -> list[_Node]:
        """Every node on a lane; two-phase ops on a hosted lane become an issue and a complete."""
        dealt: list[_Node] = []
        for node in nodes:
            device, names, kind = node.step.lane, node.step.names, node.step.kind
            ops = names if kind == "run" else ()
            threads, hosted = self.threads(device, ops), self.hosted(device, ops)
            if hosted and (not threads or self.rng.random() < 0.6):
                lane = self.rng.choice(hosted)
                issue = node.step._replace(kind="issue", lane=lane.via or "", on=lane.name)
                dealt.append(_Node(issue, node.items, [], node.before, node.starts))
                continue
            if not threads:
                raise ImpossibleError
            node.step = node.step._replace(lane=self.rng.choice(threads))
            if kind == "run" and self.rng.random() < 0.05 and self.may_be_kernel(names):
                node.step = node.step._replace(by=self.by(names))
            dealt.append(node)
        for issue_node in [node for node in dealt if node.step.kind == "issue"]:
            self.insert_complete(dealt, issue_node)
        return dealt

    def hosted(self, device: str, ops: Sequence[str]) -> list[Lane]:
        if not ops or not all(self.graph.op[name].two_phase for name in ops):
            return []
        uses = {self.graph.op[name].uses for name in ops}
        return [
            lane
            for lane in self.lanes
            if lane.via is not None and lane.device == device and uses <= set(lane.uses)
        ]

    def insert_complete(self, nodes: list[_Node], issue: _Node) -> None:
        """Put the complete anywhere between the issue and the first step that needs its end."""
        first = nodes.index(issue) + 1
        last = first
        while last < len(nodes) and not nodes[last].before & set(issue.items):
            last += 1
        lane = self.rng.choice([lane.name for lane in self.lanes if lane.via is None])
        step = issue.step._replace(kind="complete", lane=lane, on=None)
        nodes.insert(self.rng.randint(first, last), _Node(step, [], list(issue.items)))

    # Waits.

    def with_waits(self, nodes: list[_Node]) -> list[Step]:
        """The steps with a wait where one lane needs what another did.

        `known` holds, per lane, the nodes that have ended before its next step can start.
        """
        extra = self.rng.choice((0.0, 0.0, 0.2, 0.6))
        known: dict[str, set[int]] = {lane.name: set() for lane in self.lanes}
        closed: list[set[int]] = []
        start_of: dict[int, int] = {}
        end_of: dict[int, int] = {}
        first_of: dict[str, int] = {}
        steps: list[Step] = []
        for number, node in enumerate(nodes):
            lane = node.step.lane
            first_of.setdefault(node.step.label, number)
            needs = {end_of[item] for item in node.before} | {start_of[i] for i in node.starts}
            some = sorted(needs, reverse=True)
            if self.rng.random() < 0.3:
                self.rng.shuffle(some)
            for target in some:
                if target not in known[lane] or self.rng.random() < extra:
                    label = nodes[target].step.label
                    if first_of[label] != target:
                        raise ImpossibleError
                    steps.append(Step("wait", lane, target=label))
                    known[lane] |= closed[target]
            steps.append(node.step)
            for item in node.items:
                start_of[item] = number
            for item in node.ends:
                end_of[item] = number
                known[lane] |= closed[start_of[item]] if start_of[item] != number else set()
            known[lane].add(number)
            closed.append(set(known[lane]))
        return steps
