"""A PyTorch profiler's file (Kineto, Chrome JSON): comes in; `Timeline`s of its steps go out.

    kernel, gpu_memcpy, gpu_memset      works of a device: a lane a stream
    *_runtime, *_driver                 launches (joined by correlation), syncs, allocations
    record_param_comms                  the process group of a collective
    ProfilerStep#N                      the steps; without any, the whole file is one
    cpu_op, gloo:*                      without a device: a lane a thread, and gloo's flights
    weft KIND USES LANE LABEL           spans that our own traced programs leave: their lanes

Files of hundreds of MB are normal: msgspec decodes one event at a time, and of each only the
fields below. Nothing in a file is executed or believed: what is no number of seconds is refused.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from torchweft.errors import WeftError, clip
from torchweft.plan.explain.intervals import Interval, common, union, without
from torchweft.plan.explain.timeline import TimedWork, Timeline
from torchweft_tools.formats.host_ops import HostOp, cpu_works, issues

MAX_BYTES, MAX_US, NEXT_S = 2**30, 1e17, 2e-5
DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "concurrent_kernel"))
NETWORK = re.compile(
    r"nccl|rccl|oneccl|ccl_kernel|nvshmem|cross_device_reduce|multimem|symm_mem|one_shot|two_shot"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|deep_?ep|::ep::|(intra|inter)node::"
    r"|PtoP|sendrecv",
    re.IGNORECASE,
)
"""Kernels that talk: those of the libraries, and the custom ones of engines."""
IO = re.compile(r"HtoD|DtoH|Host ?-> ?Device|Device ?-> ?Host|M2D|D2M", re.IGNORECASE)
SYNC = re.compile(r"synchronize|HostSynchronize|WaitForEvents|queue::wait", re.IGNORECASE)
MEMORY = re.compile(r"(cuda|hip)(Host)?(Malloc|Free)(?!.*Async)|cuMem(Create|Map|Release|Unmap)")
STEP = re.compile(r"ProfilerStep ?#?(\d+)")
KEPT = ("weft ", "gloo:", "mpi:", "ucc:")
"""Annotations that say what runs; those of users only hold operators."""

Number = int | float | str | None


class _Args(msgspec.Struct, gc=False):
    correlation: Number = None
    stream: Number = None
    external: Number = msgspec.field(name="External id", default=None)
    group: Number = msgspec.field(name="Process Group Name", default=None)
    about: Number = msgspec.field(name="Process Group Description", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    kind: Number = msgspec.field(name="Collective name", default=None)
    nelems: Number = msgspec.field(name="In msg nelems", default=None)
    grid: Any = None


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: Number = None
    ts: Number = None
    dur: Number = None
    tid: Number = None
    args: _Args | None = None


class _Info(msgspec.Struct):
    rank: int | None = None


class _File(msgspec.Struct):
    events: list[msgspec.Raw] | None = msgspec.field(name="traceEvents", default=None)
    info: _Info | None = msgspec.field(name="distributedInfo", default=None)
    own: msgspec.Raw = msgspec.field(name="weft_trace", default=msgspec.Raw(b""))


class TraceFile(NamedTuple):
    """What a trace file holds: a trace of ours, for `load_trace`, or the steps of a profiler's."""

    rank: int | None
    is_own: bool
    steps: tuple[Timeline, ...]


def read_trace_file(path: str | Path) -> TraceFile:
    """Read a trace file, plain or .gz. Raises `WeftError` for one that is none."""
    data = _bytes_of(Path(path))
    try:
        file = msgspec.json.decode(data, type=_File | list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as cause:
        text = f"file: trace file {path} is not a trace ({clip(cause)}): cut off, or another kind?"
        raise WeftError(text, rule="file") from None
    if isinstance(file, list):
        file = _File(file)
    rank = file.info.rank if file.info is not None else None
    if bytes(file.own):
        return TraceFile(rank, True, ())
    if not file.events:
        cure = "Give a PyTorch profiler's export_chrome_trace or a trace that Weft saved."
        raise WeftError(f"file: trace file {path} has no events. {cure}", rule="file")
    events = _Events(str(path), device=b'"kernel"' in data or b'"Kernel"' in data)
    events.take(file.events)
    name = Path(path).name
    return TraceFile(rank, False, tuple(events.timelines(name, rank or 0)))


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            data = (gzip.GzipFile(fileobj=file) if zipped else file).read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise WeftError(f"file: there is no trace file {path}.", rule="file") from None
    except (OSError, EOFError, zlib.error) as cause:
        text = f"file: cannot read trace file {path}: {clip(cause)}."
        raise WeftError(text, rule="file") from None
    if len(data) > MAX_BYTES:
        text = f"file: trace file {path} is larger than {MAX_BYTES // 2**30} GiB."
        raise WeftError(f"{text} Profile fewer steps.", rule="file")
    return data


class _Kernel(NamedTuple):
    """A work of a device, before its launch is known."""

    name: str
    lane: str
    uses: str
    start_s: float
    end_s: float
    correlation: Number
    external: Number
    group: str
    key: str


def _group(args: _Args) -> str:
    """A communicator: groups of other ranks may have the same name."""
    return " ".join(str(word) for word in (args.about or args.group, args.ranks) if word)


def _uses(name: str, cat: str) -> str:
    if NETWORK.search(name):
        return "network"
    return "io" if cat.endswith("memcpy") and IO.search(name) else "compute"


class _Events:
    """The events of one file that matter, sorted by what they are."""

    def __init__(self, path: str, device: bool) -> None:
        self.path, self.device = path, device
        self.names: dict[str, str] = {}  # equal names are kept once
        self.kinds: dict[str, tuple[str, str]] = {}  # of kernels: the same, and what they use
        self.kernels: list[_Kernel] = []
        self.launches: dict[Number, tuple[float, Number]] = {}  # when, and by which thread
        self.launch_s: list[float] = []
        self.syncs: list[Interval] = []
        self.memory: list[Interval] = []
        self.groups: dict[Number, str] = {}
        self.ops: list[HostOp] = []
        self.steps: list[tuple[str, Interval]] = []

    def take(self, events: Iterable[msgspec.Raw]) -> None:
        """Decode events one by one; the first that cannot be one is an error."""
        decode = msgspec.json.Decoder(_Event).decode
        for number, raw in enumerate(events):
            try:
                event = decode(raw)
            except (msgspec.DecodeError, RecursionError) as cause:
                text = f"file: trace file {self.path}: event {number} is none: {clip(cause)}."
                raise WeftError(text, rule="file") from None
            if event.ph == "X" and event.cat is not None and event.name is not None:
                self._one(event, number)

    def _one(self, event: _Event, number: int) -> None:
        cat, name = (event.cat or "").lower(), str(event.name)
        if cat in DEVICE:
            self._kernel(event, name, cat, self._time(event, number))
        elif cat.endswith(("runtime", "driver")):
            self._runtime(event, name, self._time(event, number))
        elif cat in ("cpu_op", "operator"):
            self._op(event, name, number)
        elif cat == "user_annotation":
            if name.startswith("ProfilerStep"):
                self.steps.append((name, self._time(event, number)))
            elif not self.device and name.startswith(KEPT):
                self._op(event, name, number)

    def _time(self, event: _Event, number: int) -> Interval:
        try:
            start_us, length_us = float(event.ts or 0), float(event.dur or 0)
        except (ValueError, OverflowError):
            start_us = length_us = math.nan
        if not (0 <= start_us < MAX_US and 0 <= length_us < MAX_US):
            got = f"ts {clip(event.ts)}, dur {clip(event.dur)}"
            text = f"file: trace file {self.path}: event {number} has no time; got {got}."
            raise WeftError(text, rule="file")
        return start_us * 1e-6, (start_us + length_us) * 1e-6

    def _kernel(self, event: _Event, name: str, cat: str, time: Interval) -> None:
        args = event.args or _Args()
        name, uses = self.kinds.get(name) or self.kinds.setdefault(name, (name, _uses(name, cat)))
        if args.kind is not None:
            uses = "network"
        stream = event.tid if args.stream is None else args.stream
        size = args.nelems if uses == "network" else args.grid
        key = f"{name} {size}" if size else ""  # without a size nothing can be compared
        key = self.names.setdefault(key, key)
        group = _group(args)
        where, links = (name, f"stream {stream}", uses), (args.correlation, args.external)
        self.kernels.append(_Kernel(*where, *time, *links, group=group, key=key))

    def _runtime(self, event: _Event, name: str, time: Interval) -> None:
        if event.args is not None and event.args.correlation is not None:
            self.launches[event.args.correlation] = time[1], event.tid
        if "aunch" in name:
            self.launch_s.append(time[1] - time[0])
        elif SYNC.search(name):
            self.syncs.append(time)
        elif MEMORY.match(name):
            self.memory.append(time)

    def _op(self, event: _Event, name: str, number: int) -> None:
        args = event.args
        if args is not None and name == "record_param_comms" and args.external is not None:
            self.groups[args.external] = _group(args)
        if not self.device:
            name = self.names.setdefault(name, name)
            self.ops.append(HostOp(name, str(event.tid), *self._time(event, number)))

    def timelines(self, name: str, rank: int) -> list[Timeline]:
        """The steps, one timeline each."""
        if self.kernels:
            works = self._device_works()
            windows = _windows(works, sorted(self.steps, key=lambda step: step[1]))
            hosts, memory = union(self.syncs), union(self.memory)
        else:
            works = cpu_works(self.ops)
            in_order = sorted(self.steps, key=lambda step: step[1])
            windows = [(step, *time, works) for step, time in in_order]
            hosts, memory = issues(self.ops), []
            if not windows and works:
                ends = max(work.end_s for work in works)
                windows = [("", min(work.start_s for work in works), ends, works)]
        if not works:
            text = "it has no kernels and no operators"
            raise WeftError(f"file: trace file {self.path}: {text}.", rule="file")
        launch_s = sorted(self.launch_s)[len(self.launch_s) // 2] if self.launch_s else 5e-6
        return [
            _timeline(name, rank, window, hosts, memory, bool(self.kernels), launch_s)
            for window in windows
            if window[2] > window[1]
        ]

    def _device_works(self) -> list[TimedWork]:
        """Kernels with their launches; what a collective waits for was launched before it."""
        kernels = [(self.launches.get(k.correlation), k) for k in self.kernels]
        self.kernels = self.kernels[:1]  # from here on only whether there are any counts
        kernels.sort(key=lambda pair: pair[0][0] if pair[0] else pair[1].start_s)
        reached_s: dict[Number, float] = {}  # by thread: the end of the compute it has launched
        works = []
        for launch, kernel in kernels:
            start_s, end_s = kernel.start_s, kernel.end_s
            launched_s = None if launch is None else min(launch[0], start_s)
            thread, ready_s, group = launch and launch[1], None, ""
            if kernel.uses == "network":
                group = kernel.group or self.groups.get(kernel.external, "") or kernel.lane
                ready_s = reached_s.get(thread)
                ready_s = None if ready_s is None or ready_s > start_s else ready_s
            elif kernel.uses == "compute":
                reached_s[thread] = max(end_s, reached_s.get(thread, 0.0))
            where = kernel.name, kernel.lane, kernel.uses, start_s, end_s
            works.append(TimedWork(*where, ready_s, launched_s, group, kernel.key))
        works.sort(key=lambda work: (work.start_s, work.end_s))
        return works


Window = tuple[str, float, float, Sequence[TimedWork]]


def _windows(works: Sequence[TimedWork], steps: Sequence[tuple[str, Interval]]) -> list[Window]:
    """The steps of a device: a step ends with the last work that it has launched, and the next
    begins there, however far the host is ahead. Works that cross a border are in both, and what
    begins just behind a step is in it too: it may have waited for the last flight."""
    if not steps:
        return [("", works[0].start_s, max(work.end_s for work in works), works)]
    starts = [time[0] for _, time in steps]
    ends = [time[0] for _, time in steps]
    for work in works:
        at_s = work.start_s if work.launched_s is None else work.launched_s
        place = bisect_right(starts, at_s) - 1
        if place >= 0 and (place + 1 < len(steps) or at_s <= steps[place][1][1]):
            ends[place] = max(ends[place], work.end_s)
    edges = [starts[0], *accumulate(ends, max)]
    longest_s = max(work.end_s - work.start_s for work in works)
    begins = [work.start_s for work in works]
    windows: list[Window] = []
    for (name, _), (start_s, end_s) in zip(steps, pairwise(edges), strict=True):
        first = bisect_left(begins, start_s - longest_s)
        last = bisect_right(begins, end_s + NEXT_S)
        windows.append((name, start_s, end_s, works[first:last]))
    return windows


def _timeline(
    name: str, rank: int, window: Window, hosts: Sequence[Interval],
    memory: Sequence[Interval], device: bool, launch_s: float,
) -> Timeline:  # fmt: skip
    """One step, with its start at zero. hosts: when the host of a device stood still, or when the
    threads of a CPU issued."""
    step, start_s, end_s, works = window

    def moved(moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - start_s

    def moved_all(times: Iterable[Interval]) -> tuple[Interval, ...]:
        return tuple((one - start_s, other - start_s) for one, other in times)

    kept = [
        work._replace(
            start_s=work.start_s - start_s, end_s=work.end_s - start_s,
            ready_s=moved(work.ready_s), launched_s=moved(work.launched_s),
        )
        for work in works
        if work.end_s > start_s and work.start_s < end_s + NEXT_S
    ]  # fmt: skip
    whole = [(start_s, end_s)]
    launches = moved_all((without if device else common)(whole, hosts))
    waits = moved_all(common(whole, memory))
    where = 0.0, end_s - start_s, rank, step, launches, waits
    return Timeline(name, tuple(kept), *where, has_host=device, launch_s=launch_s)
