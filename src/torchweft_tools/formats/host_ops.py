"""Operators of a profiler's file without a device: a lane a thread, and gloo's flights.

    [HostOp] --cpu_works--> [TimedWork]         --issues--> when threads were busy to issue flights

Compute is the topmost operator of each thread, below what only holds others (a compiled region, a
backward node). A collective over gloo is two events: `c10d::allreduce_` in the thread that issues
it, and `gloo:all_reduce` in a thread of gloo's; both are in order, so the n-th of a kind belongs to
the n-th. It is in flight from the end of the first to the end of the second.

Traced programs of ours leave `weft run compute compute attn0[0]` around each step: then their runs
are the compute, as in our own trace.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchweft.plan.explain.intervals import Interval, union
from torchweft.plan.explain.timeline import TimedWork

WEFT = re.compile(r"weft (run|copy|issue|complete|wait) (\w+) (\S+) (.+)")
HOLDS = re.compile(
    r"Torch-Compiled|TorchDynamo|Pregraph|autograd::engine|ProfilerStep|Optimizer\.|nn\.Module"
    r"|CompiledFunction|## Call|DistributedDataParallel|FSDP|enumerate\(DataLoader"
)
TALKS = re.compile(r"c10d::|_c10d_functional::|record_param_comms|(gloo|mpi|ucc|nccl):")


class HostOp(NamedTuple):
    """An operator or annotation of a host's thread."""

    name: str
    thread: str
    start_s: float
    end_s: float


def cpu_works(ops: Sequence[HostOp]) -> list[TimedWork]:
    """The works of a trace without a device."""
    own = [(match, op) for op in ops if (match := WEFT.match(op.name))]
    flights = _flights(ops)
    if own:
        works = []
        for match, op in own:
            kind, uses, lane, label = match.groups()
            if kind in ("run", "copy"):
                uses = "compute" if uses == "memory" else uses
                works.append(TimedWork(label, lane, uses, op.start_s, op.end_s, key=label))
        first_s = min(op.start_s for _, op in own)
        last_s = max(op.end_s for _, op in own)
        works += [work for work in flights if first_s <= work.start_s <= last_s]
    else:
        works = [*_topmost(ops), *flights]
    return sorted(works, key=lambda work: (work.start_s, work.end_s))


def issues(ops: Sequence[HostOp]) -> list[Interval]:
    """When a thread was busy to issue a flight: it computed nothing then."""
    return union(
        (op.start_s, op.end_s) for op in ops if op.name.startswith(("weft issue ", "c10d::"))
    )


def _topmost(ops: Sequence[HostOp]) -> Iterable[TimedWork]:
    busy = {op.thread for op in ops if op.name.startswith("gloo:")}
    busy -= {op.thread for op in ops if op.name.startswith("c10d::")}
    until_s: dict[str, float] = {}
    for op in sorted(ops, key=lambda op: (op.start_s, -op.end_s)):
        if op.thread in busy or op.start_s < until_s.get(op.thread, 0.0):
            continue
        if HOLDS.search(op.name) or TALKS.match(op.name):
            continue
        until_s[op.thread] = op.end_s
        yield TimedWork(op.name, f"thread {op.thread}", "compute", op.start_s, op.end_s)


def _flights(ops: Sequence[HostOp]) -> list[TimedWork]:
    """gloo's spans, each with the call that issued it."""
    in_order = sorted(ops, key=lambda op: op.start_s)
    calls: dict[str, deque[HostOp]] = {}
    for op in in_order:
        if op.name.startswith("c10d::"):
            calls.setdefault(_plain(op.name.partition("::")[2]), deque()).append(op)
    works = []
    for op in in_order:
        if not op.name.startswith(("gloo:", "mpi:", "ucc:")):
            continue
        backend, _, kind = op.name.partition(":")
        start_s = op.start_s
        like = [queue for name, queue in calls.items() if name.startswith(_plain(kind)) and queue]
        first = min(like, key=lambda queue: queue[0].start_s, default=None)
        if first is not None and first[0].start_s <= op.end_s:
            start_s = min(first.popleft().end_s, op.end_s)
        where = op.name, backend, "network", start_s, op.end_s
        works.append(TimedWork(*where, launched_s=start_s, communicator=backend))
    return works


def _plain(kind: str) -> str:
    return "".join(letter for letter in kind.lower() if letter.isalpha())
