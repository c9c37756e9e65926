"""What comes before what: calls of all ranks come in; nodes with vector clocks go out.

    order(ranks).before(one, other)     whether `one` has ended when `other` begins, in every run

A node is one piece of work on a lane. Lanes are the streams of each rank, and the streams inside
each graph: a launch puts the graph's calls on them again. A node comes after the last one of its
lane, after the events that its stream waits for, and after everything that the host had waited
for when it was issued. Collectives that meet on several ranks begin together; work that waits for
itself in that way never ends, and is in `stuck`.

    clock of a node: for each lane, how many of its nodes have ended before this one begins
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from torchweft_tools.dryrun.calls import ON_STREAM, DeviceCall, RankCalls

LEGACY, BLOCKING = 2, 1


@dataclass(slots=True, eq=False)
class DeviceWork:
    """A node: a call on a lane, and the nodes that come directly before it."""

    index: int  # among all nodes
    call: DeviceCall
    lane: int
    place: int  # in its lane, from 1
    behind: list[int] = field(default_factory=list)


Frontier = dict[int, int]  # lane -> its last node that counts


@dataclass(slots=True)
class Meeting:
    """Collectives of several ranks that are one: the k-th of a communicator."""

    comm: str
    number: int
    works: dict[int, DeviceWork]  # by rank of the communicator
    size: int


@dataclass(slots=True)
class Message:
    """A send and the recv that meets it; of one that nothing meets the other is None."""

    sent: DeviceWork | None
    got: DeviceWork | None


@dataclass(slots=True)
class IssueEntry:
    """What a rank did, in order of issue: a node, or a call that only matters for lifetimes."""

    call: DeviceCall
    work: DeviceWork | None
    lane: int  # that memory was asked for on, or is kept for; else -1


@dataclass(slots=True)
class Order:
    """All nodes of a run, and which comes before which."""

    works: list[DeviceWork]
    steps: dict[int, list[IssueEntry]]  # by rank
    names: list[str]  # of the lanes
    meetings: list[Meeting]
    empty_waits: list[DeviceCall]  # waits for an event that had not been recorded
    waits: list[
        tuple[DeviceCall, int, DeviceWork]
    ]  # a wait, its lane, and the last work before the record
    messages: list[Message] = field(default_factory=list)
    stuck: list[DeviceWork] = field(default_factory=list)
    clocks: list[array[int]] = field(default_factory=list)

    def before(self, one: DeviceWork, other: DeviceWork) -> bool:
        """Whether one has ended when the other begins, however long anything takes."""
        return self.clocks[other.index][one.lane] >= one.place


def order(ranks: Sequence[RankCalls]) -> Order:
    """The order of all work in a run."""
    made = Order([], {}, [], [], [], [])
    for rank in ranks:
        made.steps[rank.rank] = _Walk(made, rank).walk()
    groups = _groups(made)
    _clocks(made, groups)
    return made


class _Walk:
    """Walks through the calls of one rank, and makes its nodes."""

    def __init__(self, made: Order, rank: RankCalls) -> None:
        self.made, self.rank = made, rank
        self.lanes: dict[tuple[int, int], int] = {}  # (graph, stream) -> lane
        self.last: dict[int, DeviceWork] = {}
        self.counts: dict[int, int] = defaultdict(int)
        self.gates: dict[int, Frontier] = defaultdict(dict)
        self.host: Frontier = {}
        self.events: dict[tuple[int, int], tuple[int, Frontier]] = {}  # of (graph, event): its lane
        self.flags: dict[int, tuple[int, int]] = {}  # stream -> device, blocking
        self.graphs: dict[int, list[DeviceCall]] = {}
        self.capturing: dict[int, int] = {}  # stream -> graph
        self.steps: list[IssueEntry] = []

    def walk(self) -> list[IssueEntry]:
        for call in self.rank.calls:
            if call.kind == "stream":
                self.flags[call.stream] = (call.data["dev"], call.data["blocking"])
            elif call.kind == "capture":
                self.graphs[call.graph], self.capturing[call.stream] = [], call.graph
            elif call.kind == "captured":
                held = self.capturing.items()
                self.capturing = {s: g for s, g in held if g != call.graph}
            elif call.graph:
                self.capturing[call.stream] = call.graph
                self.graphs.setdefault(call.graph, []).append(call)
            elif call.kind not in ("alloc", "keep") or call.stream not in self.capturing:
                self.take(call)  # memory allocated in a capture belongs to the graph
        return self.steps

    def take(self, call: DeviceCall, inside: int = 0) -> None:
        """One call, outside of graphs or in a launch of one."""
        if call.kind == "launch":
            self.launch(call)
        elif call.kind in ON_STREAM:
            self.step(call, self.work(call, self.lane(inside, call.stream)), inside)
        elif call.kind == "record":
            lane = self.lane(inside, call.stream)
            self.events[inside, call.event] = (lane, self.frontier(lane))
        elif call.kind == "wait":
            self.wait(call, inside)
        elif call.kind in ("sync", "query"):
            self.sync(call)
        elif call.kind in ("alloc", "free", "keep"):
            self.step(call, None, inside)

    def lane(self, graph: int, stream: int) -> int:
        key = (graph, stream)
        if key not in self.lanes:
            self.lanes[key] = len(self.made.names)
            where = f"graph {graph} " if graph else ""
            self.made.names.append(f"rank {self.rank.rank} {where}stream {stream}")
        return self.lanes[key]

    def step(self, call: DeviceCall, work: DeviceWork | None, inside: int) -> None:
        lane = self.lane(inside, call.stream) if call.kind in ("alloc", "keep") else -1
        self.steps.append(IssueEntry(call, work, lane))

    def frontier(self, lane: int) -> Frontier:
        """The nodes that have ended when the lane has done all its work so far."""
        front = dict(self.gates[lane])
        if lane in self.last:
            front[lane] = self.last[lane].index
        return front

    def work(self, call: DeviceCall, lane: int) -> DeviceWork:
        self.counts[lane] += 1
        work = DeviceWork(len(self.made.works), call, lane, self.counts[lane])
        self.legacy(call, lane)
        front = self.frontier(lane)
        _join(front, self.host)
        work.behind = sorted(set(front.values()))
        self.gates[lane] = {}
        self.last[lane] = work
        self.made.works.append(work)
        return work

    def legacy(self, call: DeviceCall, lane: int) -> None:
        """The legacy stream and blocking streams of its device wait for each other."""
        device, blocking = self.flags.get(call.stream, (0, 0))
        if blocking:
            for (graph, stream), other in self.lanes.items():
                there, kind = self.flags.get(stream, (0, 0))
                if not graph and there == device and {kind, blocking} == {LEGACY, BLOCKING}:
                    _join(self.gates[lane], self.frontier(other))

    def wait(self, call: DeviceCall, inside: int) -> None:
        lane = self.lane(inside, call.stream)
        if (inside, call.event) not in self.events:
            self.made.empty_waits.append(call)
            return
        source, front = self.events[inside, call.event]
        if source in front and source != lane:
            self.made.waits.append((call, lane, self.made.works[front[source]]))
        _join(self.gates[lane], front)

    def sync(self, call: DeviceCall) -> None:
        if call.event:
            _join(self.host, self.events.get((0, call.event), (0, {}))[1])
            return
        device = call.data.get("dev")
        for (graph, stream), lane in self.lanes.items():
            there = self.flags.get(stream, (0, 0))[0]
            if not graph and (stream == call.stream if device is None else there == device):
                _join(self.host, self.frontier(lane))

    def launch(self, call: DeviceCall) -> None:
        """Put the calls of a graph on its own lanes, between two nodes on the launching stream."""
        graph = call.data["graph"]
        own = self.lane(0, call.stream)
        begin = self.work(call, own)
        self.step(call, begin, 0)
        inner = [lane for (g, _), lane in self.lanes.items() if g == graph]
        for item in self.graphs.get(graph, ()):
            lane = self.lane(graph, item.stream)
            if lane not in inner:
                inner.append(lane)
            self.gates[lane][own] = begin.index
            self.take(item, graph)
        for lane in inner:
            _join(self.gates[own], self.frontier(lane))
        self.step(call, self.work(call, own), 0)


def _join(front: Frontier, other: Frontier) -> None:
    """Nodes of one lane have rising numbers, so the larger is the later."""
    for lane, index in other.items():
        if index > front.get(lane, -1):
            front[lane] = index


def _groups(made: Order) -> list[int]:
    """For each node the first node of its group; collectives that meet form a group."""
    parent = list(range(len(made.works)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def unite(works: Sequence[DeviceWork]) -> None:
        for work in works[1:]:
            parent[root(work.index)] = root(works[0].index)

    talks: dict[str, dict[int, list[DeviceWork]]] = defaultdict(lambda: defaultdict(list))
    messages: dict[tuple[str, int, int, str], list[DeviceWork]] = defaultdict(list)
    grouped: dict[tuple[int, int, int, int], list[DeviceWork]] = defaultdict(list)
    launches: dict[int, int] = defaultdict(int)
    for work in made.works:
        call = work.call
        if call.kind == "launch":
            launches[call.rank] += 1  # a group of a graph is another one at each launch
        if call.kind != "collective":
            continue
        data, kind = call.data, call.data["kind"]
        if data["group"]:
            turn = launches[call.rank] if call.graph else 0
            grouped[call.rank, data["group"], turn, work.lane].append(work)
        if kind in ("send", "recv"):
            ends = (data["rank"], data["peer"])
            sender, receiver = ends if kind == "send" else ends[::-1]
            messages[data["comm"], sender, receiver, kind].append(work)
        else:
            talks[data["comm"]][data["rank"]].append(work)
    for comm, sender, receiver in dict.fromkeys(key[:3] for key in messages):
        sides = [messages.get((comm, sender, receiver, kind), []) for kind in ("send", "recv")]
        for sent, got in zip_longest(*sides):
            made.messages.append(Message(sent, got))
            unite([work for work in (sent, got) if work is not None])
    for works in grouped.values():
        unite(works)
    for comm, by_rank in talks.items():
        size = next(iter(by_rank.values()))[0].call.data["size"]
        for number in range(max(map(len, by_rank.values()))):
            here = {rank: works[number] for rank, works in by_rank.items() if number < len(works)}
            made.meetings.append(Meeting(comm, number, here, size))
            if len({signature(work.call) for work in here.values()}) == 1:
                unite(list(here.values()))
    return [root(index) for index in range(len(parent))]


def signature(call: DeviceCall) -> tuple[object, ...]:
    """What must be the same on all ranks of a collective."""
    data = call.data
    count = data["out"] if data["kind"] in ("broadcast", "scatter") else data["in"]
    root = data["peer"] if data["kind"] in ("broadcast", "reduce", "gather", "scatter") else -1
    return data["kind"], count, data["dtype"], data["reduce"], root


def _clocks(made: Order, groups: Sequence[int]) -> None:
    """The clock of each node, in an order in which the nodes can run; the rest is stuck."""
    members: dict[int, list[DeviceWork]] = defaultdict(list)
    behind: dict[int, set[int]] = defaultdict(set)
    after: dict[int, list[int]] = defaultdict(list)
    for work in made.works:
        group = groups[work.index]
        members[group].append(work)
        behind[group] |= {groups[index] for index in work.behind}
    for group, others in behind.items():
        others.discard(group)
        for other in others:
            after[other].append(group)
    empty = array("I", bytes(4 * len(made.names)))
    made.clocks = [empty] * len(made.works)
    missing = {group: len(behind[group]) for group in members}
    ready = [group for group in members if not missing[group]]
    ended: dict[int, array[int]] = {}
    while ready:
        group = ready.pop()
        sources = [ended[other] for other in behind[group]]
        clock = array("I", map(max, *sources) if len(sources) > 1 else (*sources, empty)[0])
        over = array("I", clock)
        for work in members[group]:
            made.clocks[work.index] = clock
            over[work.lane] = max(over[work.lane], work.place)
        ended[group] = over
        for other in after[group]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    made.stuck = [work for group, count in missing.items() if count > 0 for work in members[group]]
