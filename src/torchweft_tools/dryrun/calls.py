"""The record of a dry run, as data: files of its processes come in; calls of each rank go out.

    {"version": 1, "ranks": [{"rank": 0, "pid": 7, "devices": 1, "events": "lazy", "calls": [...]}]}

A call is what a program asked CUDA to do, in the order of its calls: kernel, copy, set, host,
collective and launch go to a stream; record, wait, sync, query, capture and captured order them;
alloc, free and keep are those of torch's caching allocator; mark is a name that the program gave.
An op of torch is noted after its kernels; reading joins them, so a kernel has its line and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchweft.errors import WeftError
from torchweft.files import write_text

VERSION = 1
ON_STREAM = ("kernel", "copy", "set", "host", "collective", "launch")


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """Bytes of a tensor: runs of bytes at an address, repeated by counts and strides."""

    address: int
    run: int
    jumps: tuple[tuple[int, int], ...] = ()
    storage: int = 0  # where its block starts; 0: not known

    @property
    def end(self) -> int:
        """The address after its last byte."""
        return self.address + sum((n - 1) * step for n, step in self.jumps) + self.run


@dataclass(frozen=True, slots=True)
class DeviceCall:
    """One call of one rank. `stream`, `event` and `graph` are numbers of that rank; 0: no graph."""

    rank: int
    number: int
    kind: str
    stream: int = -1
    event: int = 0
    graph: int = 0
    name: str = ""
    line: str = ""
    op: int = 0
    reads: tuple[ByteSpan, ...] = ()
    writes: tuple[ByteSpan, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Name and line, as text."""
        return f"{self.name} at {self.line}" if self.line else self.name


@dataclass(frozen=True, slots=True)
class RankCalls:
    """The calls of one process."""

    rank: int
    pid: int
    calls: tuple[DeviceCall, ...]
    devices: int = 1
    events: str = "lazy"


class CallsError(WeftError):
    """A file that is not a valid record of calls."""


def gather(folder: Path) -> list[dict[str, Any]]:
    """The records that the processes of a run left in a folder, by rank, as plain data."""
    ranks = []
    for path in folder.glob("calls-*.jsonl"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        calls = [data for data in map(_parse, lines) if data is not None]
        if not any(call.get("call") in (*ON_STREAM, "error", "unmodelled") for call in calls):
            continue  # a launcher that only asked which devices there are
        head = calls[0]
        known = {key: head.get(key) for key in ("rank", "pid", "devices", "events")}
        ranks.append({**known, "calls": calls[1:]})
    return _numbered(ranks)


def _numbered(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each process with a rank of its own.

    It is that of RANK; without it (as in torch.multiprocessing.spawn), that in its largest
    communicator; else, and for a second process of a rank, the first number that is free.
    """
    taken: dict[int, dict[str, Any]] = {}
    others = []
    for item in sorted(ranks, key=lambda item: (item["rank"] < 0, item["pid"])):
        comms = [call for call in item["calls"] if call["call"] == "comm"]
        largest = max(comms, key=lambda call: call["size"], default={"rank": -1})
        rank = item["rank"] if item["rank"] >= 0 else largest["rank"]
        if rank < 0 or rank in taken:
            others.append(item)
        else:
            taken[rank] = {**item, "rank": rank}
    for item in others:
        rank = next(number for number in range(len(ranks)) if number not in taken)
        taken[rank] = {**item, "rank": rank}
    return [taken[rank] for rank in sorted(taken)]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        data = json.loads(line)
    except ValueError:  # the last line of a process that was ended
        return None
    return data if isinstance(data, dict) else None


def save_calls(path: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write plain records to one file."""
    write_text(path, json.dumps({"version": VERSION, "ranks": ranks}))


def load_calls(path: Path) -> tuple[RankCalls, ...]:
    """The calls in a file that `save_calls` wrote. Raises `CallsError`."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise CallsError(f"calls: {path} cannot be read: {cause}.") from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise CallsError(f"calls: {path} is not a record of a dry run, version {VERSION}.")
    return read_calls(data["ranks"])


def read_calls(ranks: Iterable[Mapping[str, Any]]) -> tuple[RankCalls, ...]:
    """The calls of plain records, ops joined with their kernels. Raises `CallsError`."""
    try:
        return tuple(_rank(data) for data in ranks)
    except (KeyError, TypeError, ValueError) as cause:
        raise CallsError(f"calls: a record has a call that cannot be read: {cause!r}.") from None


def _rank(data: Mapping[str, Any]) -> RankCalls:
    ops = {call["op"]: call for call in data["calls"] if call["call"] == "op"}
    calls = (_call(data["rank"], item, ops) for item in data["calls"] if item["call"] != "op")
    pid, devices = data.get("pid", 0), data.get("devices", 1)
    return RankCalls(data["rank"], pid, tuple(calls), devices, data.get("events", "lazy"))


NONE: Mapping[str, Any] = {}


def _call(rank: int, item: Mapping[str, Any], ops: Mapping[int, Mapping[str, Any]]) -> DeviceCall:
    kind, number = item["call"], item.get("op", 0)
    op = ops.get(number, NONE)
    source = op if kind == "kernel" else item  # copies and collectives know their own bytes
    reads, writes = _spans(source.get("reads", ())), _spans(source.get("writes", ()))
    if item.get("kind") == "h2d":
        reads = ()  # nothing is known about the host's memory
    elif item.get("kind") == "d2h":
        writes = ()
    own = item.get("kind") or item.get("what") or item.get("name", kind)
    name = op.get("name") or own
    if kind == "collective":
        name = own
    line = item.get("line") or op.get("line", "")
    stream, event, graph = item.get("s", -1), item.get("e", 0), item.get("g", 0)
    return DeviceCall(
        rank, item["n"], kind, stream, event, graph, name, line, number, reads, writes, item
    )


def _spans(items: Iterable[Sequence[Any]]) -> tuple[ByteSpan, ...]:
    spans = []
    for address, run, *rest in items:
        if run:
            jumps = tuple((n, step) for n, step in rest[0]) if rest else ()
            spans.append(ByteSpan(address, run, jumps, rest[1] if len(rest) > 1 else 0))
    return tuple(spans)


def overlap(one: ByteSpan, other: ByteSpan) -> bool:
    """Whether two spans share a byte; of very scattered ones, whether their extents do."""
    if one.end <= other.address or other.end <= one.address:
        return False
    if not (one.jumps or other.jumps):
        return True
    mine, theirs = _runs(one), _runs(other)
    if mine is None or theirs is None:
        return True
    i = j = 0
    while i < len(mine) and j < len(theirs):
        if mine[i][1] <= theirs[j][0]:
            i += 1
        elif theirs[j][1] <= mine[i][0]:
            j += 1
        else:
            return True
    return False


MAX_RUNS = 1 << 14


def _runs(span: ByteSpan) -> list[tuple[int, int]] | None:
    """The runs of a span in order of address; None if there are too many to list."""
    starts = [span.address]
    for count, step in span.jumps:
        if len(starts) * count > MAX_RUNS:
            return None
        starts = [start + i * step for i in range(count) for start in starts]
    return [(start, start + span.run) for start in sorted(starts)]
