"""Findings: calls of all ranks come in; what is wrong, or costs time, goes out.

    race         two streams touch the same bytes, one of them writes, and nothing orders them
    early-free   memory is returned to its stream while another stream may still use it
    collectives  two ranks do not issue the same collectives in the same order, or wait in a circle
    late-event   a wait for an event that is recorded only later waits for nothing
    missing      the host waited for a rank that never reached a collective
    error        CUDA refused a call        unmodelled   the dry run does not know a call

and as advice, where the result is right but time is lost:

    compute-stream   a collective on a stream that computes: nothing there can overlap with it
    late-record      an event recorded after work that the waiting stream does not need
    hidden-sync      an op makes the host wait for the device

Plain Python without torch, over a record that may come from another machine.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchweft_tools.dryrun.calls import ByteSpan, DeviceCall, RankCalls, overlap
from torchweft_tools.dryrun.order import (
    DeviceWork,
    IssueEntry,
    Meeting,
    Order,
    order,
    signature,
)

OUT_OF_MEMORY = 2
CURES = {101: " There are fewer devices: give their number with --devices."}
PAGE = 1 << 20  # bytes; blocks are looked up by these
MAX_BACK = 64  # how many kernels before a record are inspected
ADVICE = ("compute-stream", "late-record", "hidden-sync")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong or slow: its rule, its text, and the source lines involved."""

    rule: str
    text: str
    lines: tuple[str, ...] = ()
    times: int = field(default=1, compare=False)

    @property
    def is_advice(self) -> bool:
        """Whether the result is right without a change."""
        return self.rule in ADVICE

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}" + (f" ({self.times} times)" if self.times > 1 else "")


def check(ranks: Sequence[RankCalls], made: Order | None = None) -> list[Fault]:
    """All findings of a run, mistakes before advice; equal ones at the same lines once."""
    made = made or order(ranks)
    memories = [_Lifetimes(made) for _ in made.steps]
    pairs = zip(memories, made.steps.values(), strict=True)
    touching = [fault for memory, steps in pairs for fault in memory.faults(steps)]
    faults = [
        *_refused(ranks),
        *_collectives(made, _makers(memories)),
        *_messages(made),
        *_empty_waits(made),
        *touching,
        *_compute_streams(made),
        *_late_records(made),
        *_hidden(ranks),
    ]
    # Ranks run the same lines: one finding stands for all of them.
    keys: Counter[object] = Counter((fault.rule, fault.lines or fault.text) for fault in faults)
    firsts: dict[object, Fault] = {}
    for fault in faults:
        firsts.setdefault((fault.rule, fault.lines or fault.text), fault)
    once = [Fault(f.rule, f.text, f.lines, keys[key]) for key, f in firsts.items()]
    return sorted(once, key=lambda fault: fault.is_advice)


def _refused(ranks: Iterable[RankCalls]) -> Iterator[Fault]:
    for rank in ranks:
        for call in rank.calls:
            name = call.data.get("name", "")
            if call.kind == "error" and call.data["code"] != OUT_OF_MEMORY:  # torch tries again
                code = call.data["code"]
                text = f"{name} was refused with {code}{_at(call)}.{CURES.get(code, '')}"
                yield Fault("error", text, _lines(call))
            elif call.kind == "missing":
                data = call.data
                text = (
                    f"rank {rank.rank} waited for {data['kind']} number {data['number']} of "
                    f"communicator {data['comm'][:6]}, and rank {data['peer']} never reached it."
                )
                yield Fault("missing", text)
            elif call.kind == "unmodelled":
                yield Fault("unmodelled", f"{name} is not modelled{_at(call)}.", _lines(call))


def _at(call: DeviceCall) -> str:
    return f" at {call.line}" if call.line else ""


def _lines(*calls: DeviceCall) -> tuple[str, ...]:
    return tuple(call.line for call in calls if call.line)


# Ranks.


def _makers(memories: Sequence[_Lifetimes]) -> dict[int, int]:
    """Which kernel of its rank made what a collective reads, if all ranks run the same kernels."""
    if len({tuple(memory.kernels.values()) for memory in memories}) != 1:
        return {}
    makers = {}
    for memory in memories:
        numbers = {index: number for number, index in enumerate(memory.kernels)}
        makers.update({talk: numbers.get(maker, -1) for talk, maker in memory.makers.items()})
    return makers


@dataclass(slots=True)
class _Talks:
    """The lines of collectives, and the kernels that made what they read, by rank."""

    makers: Mapping[int, int]
    lines: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    kernels: dict[tuple[str, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    alike: Counter[tuple[str, str, bool]] = field(default_factory=Counter)

    def add(self, meeting: Meeting) -> None:
        """Note what ranks bring, and whether the same kernel has made it on all of them."""
        for rank, work in meeting.works.items():
            self.lines[meeting.comm, rank].add(work.call.line)
            self.kernels[meeting.comm, rank].add(self.makers.get(work.index, -1))
        made = {self.makers.get(work.index, -1) for work in meeting.works.values()}
        line = next(iter(meeting.works.values())).call.line
        self.alike[meeting.comm, line, len(made) == 1] += 1

    def are_swapped(self, comm: str, one: DeviceWork, other: DeviceWork) -> bool:
        """Whether two collectives, equal in kind and size, are not the same one.

        Each has the line of the other elsewhere; or both have one line, but read what different
        kernels made, though mostly it is the same one there, or each has the other's elsewhere.
        """
        keys = [(comm, work.call.data["rank"]) for work in (one, other)]
        if any(work.call.data["peer"] == work.call.data["rank"] for work in (one, other)):
            return False  # a root has a branch of its own, and only it gives what is read
        own = {one.call.line, other.call.line}
        if len(own) == 2:
            return own <= self.lines[keys[0]] & self.lines[keys[1]]
        made = {self.makers.get(work.index, -1) for work in (one, other)}
        if len(made) == 1 or one.call.name in ("broadcast", "scatter"):
            return False
        same, others = (self.alike[comm, one.call.line, alike] for alike in (True, False))
        return same >= others or made <= self.kernels[keys[0]] & self.kernels[keys[1]]


def _collectives(made: Order, makers: Mapping[int, int]) -> Iterator[Fault]:
    """The first collective of each communicator at which ranks differ; circles."""
    parted = set()
    known = _Talks(makers)
    for meeting in made.meetings:
        known.add(meeting)
    for meeting in made.meetings:
        if meeting.comm in parted:
            continue
        works = sorted(  # the root, if any, comes last
            meeting.works.values(),
            key=lambda work: (work.call.data["peer"] == work.call.data["rank"], work.call.rank),
        )
        first = works[0].call
        for work in works[1:]:
            if signature(work.call) != signature(first) or known.are_swapped(
                meeting.comm, works[0], work
            ):
                parted.add(meeting.comm)
                yield Fault(
                    "collectives",
                    f"number {meeting.number} of communicator {meeting.comm[:6]} is "
                    f"{_talk(first)} on rank {first.data['rank']} and {_talk(work.call)} on rank "
                    f"{work.call.data['rank']}. All ranks must issue the same ones in the same "
                    "order.",
                    _lines(first, work.call),
                )
                break
        absent = [r for r in range(meeting.size) if r not in meeting.works]
        if absent and meeting.comm not in parted and len(made.steps) >= meeting.size:
            parted.add(meeting.comm)
            yield Fault(
                "collectives",
                f"number {meeting.number} of communicator {meeting.comm[:6]}, {_talk(first)}, is "
                f"never issued on rank {', '.join(map(str, absent))}: the others wait forever.",
                _lines(first),
            )
    talks = [work.call for work in made.stuck if work.call.kind == "collective"][:4]
    if made.stuck and not parted:
        names = "; ".join(f"rank {call.rank}: {_talk(call)}" for call in talks)
        text = f"these wait for each other in a circle and never end: {names}."
        yield Fault("collectives", text, _lines(*talks))


def _messages(made: Order) -> Iterator[Fault]:
    """The first message between two ranks that nothing meets, or that has another size there."""
    parted = set()
    for message in made.messages:
        sent, got = message.sent, message.got
        (one, *other) = [work.call for work in (sent, got) if work is not None]
        data = one.data
        ends = (data["comm"], data["rank"], data["peer"])
        key = ends if sent is not None else (ends[0], ends[2], ends[1])
        if key in parted or (not other and len(made.steps) < data["size"]):
            continue
        text = f"{_talk(one)} on rank {data['rank']} of communicator {data['comm'][:6]}"
        if not other:
            parted.add(key)
            wanted = "sends" if sent is None else "receives"
            text += f" waits forever: rank {data['peer']} never {wanted} it."
            yield Fault("collectives", text, _lines(one))
        elif (one.data["in"], one.data["dtype"]) != (other[0].data["out"], other[0].data["dtype"]):
            parted.add(key)
            text += f" meets {_talk(other[0])} on rank {data['peer']}: their sizes must be equal."
            yield Fault("collectives", text, _lines(one, other[0]))


def _talk(call: DeviceCall) -> str:
    count = call.data["in"] or call.data["out"]
    return f"{call.name} of {count}{_at(call)}"


def _empty_waits(made: Order) -> Iterator[Fault]:
    for call in made.empty_waits:
        text = (
            f"rank {call.rank} stream {call.stream} waits{_at(call)} for an event that has not "
            "been recorded: it waits for nothing. Record the event before the wait is issued."
        )
        yield Fault("late-event", text, _lines(call))


# Memory.


@dataclass(slots=True)
class _Access:
    work: DeviceWork
    span: ByteSpan
    is_write: bool


@dataclass(slots=True)
class _Freed:
    call: DeviceCall
    lane: int
    users: list[_Access]
    is_asked: bool = False  # memory was asked for on the lane since then


class _Lifetimes:
    """Walks the steps of one rank, and knows what touched each block since its allocation."""

    def __init__(self, made: Order) -> None:
        self.made = made
        self.stuck = {work.index for work in made.stuck}
        self.blocks: dict[int, list[_Access]] = defaultdict(list)
        self.extents: dict[int, tuple[int, int]] = {}
        self.pages: dict[int, set[int]] = defaultdict(set)  # page -> blocks that reach into it
        self.homes: dict[int, int] = {}  # living block -> the lane that it was asked for on
        self.starts: list[int] = []  # of living blocks, rising
        self.kept: dict[int, set[int]] = defaultdict(set)
        self.freed: list[_Freed] = []
        self.kernels: dict[int, str] = {}  # kernels so far, and their names
        self.makers: dict[int, int] = {}  # collective -> the last that wrote what it reads

    def faults(self, steps: Iterable[IssueEntry]) -> Iterator[Fault]:
        for step in steps:
            call = step.call
            if call.kind == "alloc":
                block, lane = call.data["ptr"], step.lane
                if block not in self.homes:
                    insort(self.starts, block)
                self.homes[block] = lane
                self.forget(block)
                self.kept.pop(block, None)
                for item in self.freed:
                    item.is_asked |= item.lane == lane
            elif call.kind == "keep":
                self.kept[call.data["ptr"]].add(step.lane)
            elif call.kind == "free":
                self.free(call)
            elif step.work is not None and step.work.index not in self.stuck:
                yield from self.reused(step.work)
                yield from self.touch(step.work)

    def free(self, call: DeviceCall) -> None:
        """From now on the allocator may give the block to the next request on its stream."""
        block = call.data["ptr"]
        users = self.forget(block)
        kept = self.kept.pop(block, set())
        if block in self.homes:
            lane = self.homes.pop(block)
            self.starts.remove(block)
            others = [
                item for item in users if item.work.lane != lane and item.work.lane not in kept
            ]
            if others:
                self.freed.append(_Freed(call, lane, others))

    def reused(self, work: DeviceWork) -> Iterator[Fault]:
        """Work on a stream whose memory was freed and allocated again: it may use that memory."""
        for item in list(self.freed):
            if item.lane != work.lane or not item.is_asked:
                continue
            self.freed.remove(item)
            late = [a for a in item.users if not self.made.before(a.work, work)]
            if late:
                user = late[-1].work
                does = "written" if late[-1].is_write else "read"
                yield Fault(
                    "early-free",
                    f"memory of {self.name(item.lane)} is freed{_at(item.call)} while it may "
                    f"still be {does} on {self.name(user.lane)} by {user.call.place}. Make its own "
                    "stream wait before it is freed, or use record_stream.",
                    _lines(user.call, item.call),
                )

    def touch(self, work: DeviceWork) -> Iterator[Fault]:
        accesses = [_Access(work, span, False) for span in work.call.reads]
        accesses += [_Access(work, span, True) for span in work.call.writes]
        if work.call.kind == "kernel":
            self.kernels[work.index] = work.call.name
        for access in accesses:
            for block in self.near(access.span):
                for other in self.blocks[block]:
                    if other.work is not work and self.is_race(other, access):
                        yield self.race(other, access)
                    is_made = other.is_write and not access.is_write
                    if (
                        is_made
                        and work.call.kind == "collective"
                        and overlap(other.span, access.span)
                    ):
                        self.makers[work.index] = other.work.index
        for access in accesses:
            self.remember(access)

    def is_race(self, one: _Access, other: _Access) -> bool:
        return (
            (one.is_write or other.is_write)
            and one.work.lane != other.work.lane
            and not self.made.before(one.work, other.work)
            and overlap(one.span, other.span)
        )

    def race(self, one: _Access, other: _Access) -> Fault:
        first, second = one.work, other.work
        verbs = ["writes" if item.is_write else "reads" for item in (one, other)]
        return Fault(
            "race",
            f"{first.call.place} on {self.name(first.lane)} {verbs[0]} what {second.call.place} on "
            f"{self.name(second.lane)} {verbs[1]}, and nothing orders them. Let the second stream "
            "wait for an event that is recorded after the first.",
            _lines(second.call, first.call),
        )

    def near(self, span: ByteSpan) -> list[int]:
        """Blocks whose touched bytes reach into a span."""
        pages = range(span.address // PAGE, (span.end - 1) // PAGE + 1)
        blocks = {block for page in pages for block in self.pages.get(page, ())}
        inside = ((block, *self.extents[block]) for block in sorted(blocks))
        return [block for block, low, high in inside if low < span.end and span.address < high]

    def owner(self, address: int) -> int:
        """The living block that an address lies in: the nearest one before it."""
        at = bisect_right(self.starts, address)
        return self.starts[at - 1] if at else address

    def forget(self, block: int) -> list[_Access]:
        """The accesses to a block that has been freed or allocated again."""
        low, high = self.extents.pop(block, (0, 0))
        for page in range(low // PAGE, -(-high // PAGE)):
            self.pages[page].discard(block)
        return self.blocks.pop(block, [])

    def remember(self, access: _Access) -> None:
        span = access.span
        block = span.storage or self.owner(span.address)
        low, high = self.extents.get(block, (span.address, span.end))
        self.extents[block] = (min(low, span.address), max(high, span.end))
        for page in range(self.extents[block][0] // PAGE, -(-self.extents[block][1] // PAGE)):
            self.pages[page].add(block)
        # What is ordered before a write of the same bytes, or a later read on its lane, is covered.
        self.blocks[block] = [
            old
            for old in self.blocks[block]
            if not (
                (old.span == span)
                and (access.is_write or not old.is_write)
                and (old.work.lane == access.work.lane or self.covers(old, access))
            )
        ]
        self.blocks[block].append(access)

    def covers(self, old: _Access, new: _Access) -> bool:
        return new.is_write and self.made.before(old.work, new.work)

    def name(self, lane: int) -> str:
        return self.made.names[lane]


# Time.


def _compute_streams(made: Order) -> Iterator[Fault]:
    computing = {work.lane for work in made.works if work.call.kind == "kernel"}
    for work in made.works:
        if work.call.kind == "collective" and work.lane in computing:
            text = (
                f"{work.call.place} runs on {made.names[work.lane]}, which computes: nothing of "
                "that stream overlaps with it. Issue it with async_op=True, or on another stream."
            )
            yield Fault("compute-stream", text, _lines(work.call))


def _late_records(made: Order) -> Iterator[Fault]:
    """Events after work that the waiting stream does not need, though it needs earlier work."""
    lanes: dict[int, list[DeviceWork]] = defaultdict(list)
    numbers: dict[int, list[int]] = defaultdict(list)  # the highest so far: graphs repeat theirs
    for work in made.works:
        highest = max([work.call.number, *numbers[work.lane][-1:]])
        lanes[work.lane].append(work)
        numbers[work.lane].append(highest)
    for call, lane, last in made.waits:
        at = bisect_right(numbers[lane], call.number)
        first = lanes[lane][at] if at < len(lanes[lane]) else None
        extra = 0
        for work in reversed(lanes[last.lane][max(0, last.place - MAX_BACK) : last.place]):
            if first is None or _feeds(work, first):
                break
            extra += work.call.kind == "kernel"
        else:
            continue  # it needs nothing there: a join, or what it needs is not known
        if first is not None and extra:
            kernels = "a kernel" if extra == 1 else f"{extra} kernels"
            text = (
                f"{first.call.place} on {made.names[lane]} waits{_at(call)} for {kernels} on "
                f"{made.names[last.lane]} that it does not need. Record the event right after "
                f"{work.call.place}."
            )
            yield Fault("late-record", text, _lines(first.call, work.call))


def _feeds(one: DeviceWork, other: DeviceWork) -> bool:
    return any(overlap(a, b) for a in one.call.writes for b in other.call.reads)


def synchronisations(rank: RankCalls) -> list[DeviceCall]:
    """Where the host waited for the device; once per op, even if that takes two calls."""
    calls: list[DeviceCall] = []
    for call in rank.calls:
        if call.kind == "sync" and not (call.op and calls and calls[-1].op == call.op):
            calls.append(call)
    return calls


def _hidden(ranks: Iterable[RankCalls]) -> Iterator[Fault]:
    for rank in ranks:
        for call in synchronisations(rank):
            if call.op:
                text = f"{call.name} makes the host wait for the device{_at(call)}."
                yield Fault("hidden-sync", text, _lines(call))
