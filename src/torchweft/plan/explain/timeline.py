"""The `Timeline`: one step of one rank, as works that compute, talk over the network or read (io).

    Trace, perhaps its Plan --timeline_of--> Timeline           traces of other systems: formats/

A work is *launched* by a host (on a CPU lane: nobody has to) and *ready* when what it reads is
there. What is not known is None, and whoever looks at it says so instead of guessing. A network
work is in flight from the moment it was handed over until it has landed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torchweft.plan.explain.intervals import Interval, common, union, without
from torchweft.plan.graph import Graph, Op
from torchweft.plan.plan import Plan, Range
from torchweft.plan.trace import Span, Trace

MIN_SHARE = 0.1
"""A lane with less than this share of all compute does not count as one that computes."""


class TimedWork(NamedTuple):
    """Something that took time on a lane.

    uses: compute, network or io. key: works of equal key do equal things of equal size.
    needs: the numbers of the network and io works that it had to wait for; None: not known.
    """

    label: str
    lane: str
    uses: str
    start_s: float
    end_s: float
    ready_s: float | None = None
    launched_s: float | None = None
    communicator: str = ""
    key: str = ""
    needs: tuple[int, ...] | None = None

    @property
    def time(self) -> Interval:
        """From start to end."""
        return self.start_s, self.end_s


@dataclass(frozen=True)
class Timeline:
    """The works of one step of one rank, by their starts, and what its host did meanwhile.

    launches: when the host was busy launching. memory: when it waited for memory to be made free.
    has_host: whether lanes are those of a device, whose works somebody else launches.
    """

    name: str
    works: tuple[TimedWork, ...]
    start_s: float
    end_s: float
    rank: int = 0
    step: str = ""
    launches: tuple[Interval, ...] = ()
    memory: tuple[Interval, ...] = ()
    has_host: bool = False
    launch_s: float = 5e-6

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return max(0.0, self.end_s - self.start_s)

    @cached_property
    def window(self) -> list[Interval]:
        """The step as a union of one interval."""
        return union([(self.start_s, self.end_s)])

    def busy(self, uses: str) -> list[Interval]:
        """When at least one work of this kind was under way, within the step."""
        return common(union(work.time for work in self.works if work.uses == uses), self.window)

    @cached_property
    def compute(self) -> list[Interval]:
        """When something was computed."""
        return self.busy("compute")

    @cached_property
    def network(self) -> list[Interval]:
        """When something was in flight."""
        return self.busy("network")

    @cached_property
    def gaps(self) -> list[Interval]:
        """When nothing was computed."""
        return without(self.window, self.compute)

    @cached_property
    def own(self) -> tuple[TimedWork, ...]:
        """The works that begin within the step; a reader may know the next ones too."""
        return tuple(work for work in self.works if work.start_s < self.end_s - 1e-9)

    @cached_property
    def mixed_lanes(self) -> frozenset[str]:
        """Lanes that compute; a stream of flights with a few small kernels around them is none."""
        taken_s: dict[str, float] = {}
        for work in self.works:
            if work.uses == "compute":
                taken_s[work.lane] = taken_s.get(work.lane, 0.0) + work.end_s - work.start_s
        least_s = MIN_SHARE * sum(taken_s.values())
        return frozenset(lane for lane, seconds in taken_s.items() if seconds >= least_s)


def timeline_of(trace: Trace, plan: Plan | None = None, *, rank: int = 0) -> Timeline:
    """A measured or simulated trace as a timeline; with its plan, dependencies are exact."""
    graph = plan.graph if plan is not None and plan.bound is not None else None
    spans = [span for span in trace.spans if span.kind in ("run", "copy", "transfer")]
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    knows = _by_graph(spans, graph) if graph is not None else _by_lanes(spans, trace)
    works = []
    for number, span in enumerate(spans):
        uses = "compute" if span.uses == "memory" else span.uses or "compute"
        ready_s, needs = knows[number]
        op = graph.op.get(span.op) if graph is not None else None
        talk = op.collective if op is not None else None
        communicator = (talk.communicator if talk else "network") if uses == "network" else ""
        launched_s = span.start_s if span.kind == "transfer" else None
        key = f"{op.body or op.name if op else span.op} {span.parts}"
        where = span.label, span.lane, uses, span.start_s, span.end_s
        works.append(TimedWork(*where, ready_s, launched_s, communicator, key, needs))
    launches = union((s.start_s, s.end_s) for s in trace.spans if s.kind == "issue")
    return Timeline(trace.name, tuple(works), 0.0, trace.makespan_s, rank, launches=tuple(launches))


Knowledge = Sequence[tuple[float | None, tuple[int, ...] | None]]
"""For each span when it was ready, and what it had to wait for."""


def _by_graph(spans: Sequence[Span], graph: Graph) -> Knowledge:
    makers: dict[str, list[int]] = {}
    for number, span in enumerate(spans):
        for name in span.op.split():
            for made in graph.op[name].makes if name in graph.op else ():
                makers.setdefault(made, []).append(number)
    known: list[tuple[float | None, tuple[int, ...] | None]] = []
    for span in spans:
        ops = [graph.op[name] for name in span.op.split() if name in graph.op]
        if not ops:
            known.append((None, None))
            continue
        before = _sources(span, ops, spans, makers)
        ready_s = max((spans[number].end_s for number in before), default=0.0)
        waits = tuple(number for number in before if spans[number].uses in ("network", "io"))
        known.append((min(ready_s, span.start_s), waits))
    return known


def _sources(
    span: Span, ops: Sequence[Op], spans: Sequence[Span], makers: Mapping[str, list[int]]
) -> list[int]:
    """The spans that made what these ops read, of the same parts."""
    inside = {made for op in ops for made in op.makes}
    reads = dict.fromkeys(name for op in ops for name in op.touched if name not in inside)
    numbers = [number for name in reads for number in makers.get(name, ())]
    return [n for n in dict.fromkeys(numbers) if _meet(spans[n].parts, span.parts)]


def _meet(one: Range | None, other: Range | None) -> bool:
    return one is None or other is None or (one[0] < other[1] and other[0] < one[1])


def _by_lanes(spans: Sequence[Span], trace: Trace) -> Knowledge:
    """Without a graph: a flight was ready when the last run of its parts before it had ended, and
    a run had to wait for what its lane completed just before it."""
    flights = {s.label: n for n, s in enumerate(spans) if s.kind == "transfer"}
    place = {id(span): number for number, span in enumerate(spans)}
    known: list[tuple[float | None, tuple[int, ...] | None]] = [(None, None)] * len(spans)
    ended: dict[Range | None, float] = {}
    issued: dict[str, float | None] = {}
    waits: dict[str, list[int]] = {}
    for span in sorted(trace.spans, key=lambda span: (span.start_s, span.end_s)):
        label = span.label.partition(" ")[2]
        if span.kind == "issue":
            issued[label] = ended.get(span.parts)
        elif span.kind == "complete" and label in flights:
            waits.setdefault(span.lane, []).append(flights[label])
        elif span.kind == "transfer":
            known[place[id(span)]] = issued.get(span.label), None
        elif span.kind in ("run", "copy"):
            known[place[id(span)]] = None, tuple(waits.pop(span.lane, ()))
            ended[span.parts] = max(span.end_s, ended.get(span.parts, 0.0))
    return known
