"""A `Profile`: what the ops of a model take on this machine, alone and beside each other.

    profile = measure(model, [inputs, more], progress=...)     a compiled model
    simulate(plan, context, profile.machine, profile.costs)    what a plan would take here
    save_profile(profile, "costs.json")                        for `torchweft simulate --costs`

Plans are the instrument: a model runs, traced, by two strategies, at several numbers of parts.

    alone     one op after another on one lane, network ops waited for where they start: seconds
              of each op at each size of a part, from the end of the step before it to its own
    overlap   the same ops beside flights: how many times as long, by kinds of work (`Slowdown`)

An entry is an op's structure, the shapes of what it reads and its rows (`cost_key`), so equal
layers share one. The middle half of what was seen counts. Rates of the machine are fitted to all
entries: formulas use them for shapes that were not measured.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from torchweft.api import arguments_of, session_of
from torchweft.errors import WeftError
from torchweft.files import write_json
from torchweft.plan.graph import Op
from torchweft.plan.machine import (
    Costs,
    CostTable,
    Device,
    Machine,
    Slowdown,
    cost_key,
    moved_bytes,
    to_data,
    touched_bytes,
)
from torchweft.plan.strategies import overlap
from torchweft.plan.trace import Span
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import Strategy
from torchweft.serve.piece import CallShape, Piece, PlanEntry
from torchweft.serve.session import context
from torchweft.serve.tuned import processor

VERSION = 1
PARTS = (1, 2, 4, 8)
NUM_WARM, NUM_CALLS = 2, 8
MIN_BESIDE = 0.05  # the share of a run that flights must have for it to count as beside them
MOSTLY = 0.2  # and that which they must have for it to tell the factor of its op
TWIN, TWINS = 0.4, 0.05  # what a flight takes behind its twin, and the share of flights with one
MIN_FACTOR, MAX_FACTOR = 0.5, 10.0
LEAST_S = 1e-9
Key = tuple[str, str]
Told = Callable[[int, int], None]


def _alone(s: Scheduler, *, parts: int = 1) -> None:
    """Each op by itself: on a lane with a thread, where a network op is waited for."""
    if parts > 1:
        s.split(parts)
    while ready := s.ready():
        for op, part in ready:
            s.run(op, part, lane=next(lane for lane in s.lanes(op) if lane.via is None))
    if parts > 1:
        s.merge()


ALONE = Strategy("alone", _alone)


@dataclass(frozen=True)
class Profile:
    """Measured costs, and the machine that they were fitted to.

    about: torch, torchweft, the processor, how many ranks: a profile is good for these alone.
    """

    costs: Costs
    about: str
    num_samples: int = 0

    @property
    def machine(self) -> Machine:
        """The machine with measured rates."""
        return self.costs.machine


class _Run(NamedTuple):
    """One run of an op as it was seen."""

    op: Op
    key: Key
    rows: int
    seconds: float
    flops: int
    num_bytes: int
    call: int = 0


@dataclass
class _Book:
    """All that was seen: seconds by key and rows; sums of what runs took beside others."""

    seen: dict[Key, dict[int, list[_Run]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    issue_s: list[float] = field(default_factory=list)
    beside: dict[tuple[str, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Of each kind beside the other: (seconds beside it, those that it would have taken alone)."""
    mixed: dict[Key, dict[int, list[tuple[float, float, float]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Of runs among others: (seconds, those beside the other kind, those that it takes alone)."""
    behind: list[float] = field(default_factory=list)
    """Of flights that began before another had ended: from end to end, in what one takes alone."""
    call_s: list[float] = field(default_factory=list)
    num_calls: int = 0

    def alone_s(self, run: _Run) -> float | None:
        """What this run takes alone, if that was seen."""
        known = self.seen.get(run.key, {}).get(run.rows)
        return _of_a_run(known) if known else None


def measure(
    model: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    parts: Sequence[int] = PARTS,
    num_calls: int = NUM_CALLS,
    progress: Told = lambda done, total: None,
) -> Profile:
    """The profile of a compiled model over calls with these inputs, each given as for `check`.

    Ranks that the model talks with must make the same calls. Raises `WeftError` if nothing of the
    model was captured.
    """
    session, book = session_of(model), _Book()
    ways = [way(parts=number) for number in parts for way in (ALONE, overlap)]
    done, total = 0, len(inputs) * len(ways)
    with torch.no_grad():
        for args, kwargs in map(arguments_of, inputs):
            for way in ways:
                for seen in _calls(session, model, args, kwargs, way, num_calls, book):
                    (_note_alone if way.name == "alone" else _note_beside)(book, *seen)
                done += 1
                progress(done, total)
    if not book.seen:
        raise WeftError("profile: no captured graph ran in these calls.", rule="profile")
    return Profile(_costs(session.options.resolved_machine, book), about(), _count(book))


def about() -> str:
    """What a profile is good for."""
    from importlib.metadata import version

    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return (
        f"torch {torch.__version__}, torchweft {version('torchweft')}, {processor()}, {ranks} ranks"
    )


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write the profile as a JSON file, whole or not at all."""
    costs = profile.costs
    head = {"weft_costs": VERSION, "about": profile.about, "call_s": costs.call_s}
    tables = {"entries": costs.table.entries, "factors": costs.factors.entries}
    write_json(path, {**head, "machine": to_data(costs.machine), **tables})


def _calls(
    session: Any, model: Any, args: Any, kwargs: Any, way: Strategy, num_calls: int, book: _Book
) -> Iterator[tuple[Piece, PlanEntry, CallShape]]:
    """Each graph of each traced call of a model by a strategy."""
    with context(strategy=way):
        for number in range(NUM_WARM + num_calls):
            for piece in session.pieces:
                piece.traced = None
            model(*args, **kwargs)  # behind it the ranks stand together
            with session.service.collect():
                model(*args, **kwargs)
            call_s, within_s = 0.0, 0.0
            if way.name == "alone":
                model(*args, **kwargs)  # so they do again
                start = time.perf_counter()
                model(*args, **kwargs)
                call_s = time.perf_counter() - start
            book.num_calls += 1
            for piece in session.pieces if number >= NUM_WARM else ():
                for entry in piece.plans.all_entries():
                    if piece.traced is not None and entry.traced is piece.traced:
                        within_s += entry.trace.makespan_s if entry.trace else 0.0
                        yield piece, entry, piece.traced
            if way.name == "alone" and within_s:
                book.call_s.append(call_s - within_s)


def _note_alone(book: _Book, piece: Piece, entry: PlanEntry, shape: CallShape) -> None:
    """Runs of a plan without flights: each from the end of the step before it on its lane."""
    assert entry.trace is not None, "only what was traced is read"
    ends: dict[str, float] = {}
    for span in sorted(entry.trace.spans, key=lambda span: span.end_s):
        if span.kind == "transfer":
            return
        since_s, ends[span.lane] = ends.get(span.lane, span.start_s), span.end_s
        if span.kind == "run" and span.op in piece.graph.op:
            run = _run(piece, entry, shape, span, span.end_s - since_s)
            book.seen[run.key][run.rows].append(run._replace(call=book.num_calls))


def _note_beside(book: _Book, piece: Piece, entry: PlanEntry, shape: CallShape) -> None:
    """How long runs took beside flights, and flights beside runs."""
    assert entry.trace is not None, "only what was traced is read"
    spans = [span for span in entry.trace.spans if span.op in piece.graph.op]
    book.issue_s += [span.end_s - span.start_s for span in spans if span.kind == "issue"]
    flights: list[tuple[Span, float, float]] = []
    shared: set[Span] = set()
    ends: dict[str, float] = {}
    for span in (span for span in spans if span.kind == "transfer"):
        start_s = max(span.start_s, ends.get(span.lane, 0.0))
        shared |= {span} if span.start_s < start_s else set()
        ends[span.lane] = max(span.end_s, start_s)
        flights.append((span, start_s, ends[span.lane]))
    runs = [(span, span.start_s, span.end_s) for span in spans if span.kind == "run"]
    for some, others, pair in (
        (runs, flights, ("compute", "network")),
        (flights, runs, ("network", "compute")),
    ):
        for span, start_s, end_s in some:
            beside_s = sum(max(0.0, min(e, end_s) - max(s, start_s)) for _, s, e in others)
            run = _run(piece, entry, shape, span, end_s - start_s)
            alone_s = book.alone_s(run)
            if alone_s is None:
                continue
            taken_s = end_s - start_s
            book.behind += [taken_s / alone_s] if span in shared and alone_s else []
            book.mixed[run.key][run.rows].append((taken_s, beside_s, alone_s))
            if beside_s > MIN_BESIDE * taken_s:
                book.beside[pair].append((beside_s, alone_s - (taken_s - beside_s)))


def _run(piece: Piece, entry: PlanEntry, shape: CallShape, span: Span, seconds: float) -> _Run:
    graph, op = piece.graph, piece.graph.op[span.op]
    first, last = span.parts or (0, len(shape.bounds) - 1)
    rows = shape.bounds[last] - shape.bounds[first]
    env = shape.context.env(graph.batch, rows)
    count = moved_bytes if op.uses == "network" else touched_bytes
    flops, num_bytes = max(0, op.flops.evaluate(env)), count(graph, op, env)
    return _Run(op, (cost_key(graph, op, env), span.device), rows, seconds, flops, num_bytes)


def _costs(machine: Machine, book: _Book) -> Costs:
    """The costs that the book shows, on a machine with rates that fit it."""
    table = {
        key: {rows: _of_a_run(runs) for rows, runs in by_rows.items()}
        for key, by_rows in book.seen.items()
    }
    factors: dict[Key, dict[int, float]] = {}
    flights = {
        key for key, by_rows in book.seen.items() if _is_flight(next(iter(by_rows.values())))
    }
    for key, mixed in book.mixed.items():
        for rows, seen in mixed.items():
            # Sums: flights that share a link end by twos, and only both together tell something.
            taken_s, beside_s, alone_s = (sum(column) for column in zip(*seen, strict=True))
            if beside_s > MOSTLY * taken_s:
                rest_s = max(alone_s - (taken_s - beside_s), LEAST_S)
                factor = min(MAX_FACTOR, beside_s / rest_s)
                # Small flights, one behind another, take less than each by itself.
                least = MIN_FACTOR if key in flights else 1.0
                factors.setdefault(key, {})[rows] = max(least, factor)
    runs = [
        runs[0]._replace(seconds=table[key][rows])
        for key, by_rows in book.seen.items()
        for rows, runs in by_rows.items()
    ]
    slowdowns = tuple(
        Slowdown(*pair, _factor(pairs)) for pair, pairs in sorted(book.beside.items())
    )
    fitted = []
    for device in machine.devices:
        own = [run for run in runs if run.key[1] == device.name]
        fitted.append(replace(_rates(device, own, book), slowdowns=slowdowns) if own else device)
    call_s = max(0.0, median(book.call_s)) if book.call_s else 0.0
    on = replace(machine, devices=tuple(fitted))
    return Costs(on, CostTable.of(table), call_s, CostTable.of(factors))


def _is_flight(runs: Sequence[_Run]) -> bool:
    return runs[0].op.uses == "network"


def _factor(pairs: Sequence[tuple[float, float]]) -> float:
    """How many times as long work takes beside other work: of all that was seen together."""
    beside_s, alone_s = (sum(column) for column in zip(*pairs, strict=True))
    return float(min(MAX_FACTOR, max(1.0, beside_s / max(alone_s, LEAST_S))))


def _rates(device: Device, runs: Sequence[_Run], book: _Book) -> Device:
    """A device with the rates that these runs show."""
    rates: dict[str, float] = {}
    if book.issue_s:
        rates["overhead_s"] = max(LEAST_S, median(book.issue_s))
    # Two at once end at once: the second of them seems to take next to nothing.
    twins = sum(share < TWIN for share in book.behind)
    num_flights = 2 if twins > TWINS * len(book.behind) else 1
    work = [run for run in runs if run.op.uses in ("compute", "memory")]
    if flops := sum(run.flops for run in work):
        rates["flops_per_s"] = flops / sum(run.seconds for run in work if run.flops)
    plain = [run for run in work if run.num_bytes and not run.flops]
    if plain:
        rates["bytes_per_s"] = sum(r.num_bytes for r in plain) / sum(r.seconds for r in plain)
    sent = sorted((run.num_bytes, run.seconds) for run in runs if run.op.uses == "network")
    if len(sent) > 1 and sent[0][0] < sent[-1][0]:
        # The line through the middles of the smaller and of the larger half.
        halves = sent[: len(sent) // 2], sent[len(sent) // 2 :]
        (low, low_s), (high, high_s) = (
            tuple(map(fmean, zip(*half, strict=True))) for half in halves
        )
        slope = max((high_s - low_s) / max(high - low, 1), LEAST_S / 1e3)
        rates["network_bytes_per_s"] = 1 / slope
        rates["network_latency_s"] = max(0.0, low_s - low * slope)
    io = [run for run in runs if run.op.uses == "io" and run.num_bytes]
    if io:
        rates["io_bytes_per_s"] = sum(r.num_bytes for r in io) / sum(r.seconds for r in io)
    return replace(device, num_flights=num_flights, **rates)  # type: ignore[arg-type]


def _of_a_run(runs: Sequence[_Run]) -> float:
    """What a run takes: the mean of a call, in the middle half of calls. Within a call every run
    counts: of flights of a few kilobytes, most are quick and some take ten times as long."""
    by_call: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        by_call[run.call].append(run.seconds)
    return _middle([fmean(seconds) for seconds in by_call.values()])


def _middle(seconds: Sequence[float]) -> float:
    """The mean of the middle half: sums of it are close to the middle of sums."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return fmean(ordered[quarter : len(ordered) - quarter])


def _count(book: _Book) -> int:
    return sum(len(runs) for by_rows in book.seen.values() for runs in by_rows.values())
