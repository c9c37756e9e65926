"""The `Trace`: what each lane did when, measured or simulated, as spans.

             |0 ms         |1            |2
    compute  ▐█attn0[0]██▐█attn0[1]█···········▐█mlp0[0]█    74%
    network               ╞═══reduce0[0]════════             45%

Kinds of span: run, copy, issue and complete (steps that take time), wait (only where a lane stood
still) and transfer (a two-phase op in flight on its hosted lane, between issue and complete).

    trace.to_text()      a timeline to read       trace.save("run.txt")
    trace.to_chrome()    for Perfetto             trace.save("run.json")
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappush, heapreplace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torchweft.errors import WeftError, unknown
from torchweft.files import write_text
from torchweft.plan.plan import Range

VERSION = 1
SPANS = ("run", "copy", "issue", "complete", "wait", "transfer")
SUFFIXES = (".json", ".txt")
MAX_FLIGHTS = 16  # rows of one lane in a timeline
_FILL = {"compute": "█", "memory": "▓", "network": "═", "io": "─"}
_EDGE = {"█": "▐", "▓": "▐", "═": "╞", "─": "╟"}
_KEY = {**{fill: uses for uses, fill in _FILL.items()}, "▒": "issue", "·": "waiting"}


class Span(NamedTuple):
    """One measured or simulated step, from `start_s` to `end_s` after the call began.

    op: the op (or ops, with blanks between) behind it, "" for copies and waits.
    busy_s: the seconds it would take alone at full rate; the rest was blocked or slowed by others.
    """

    kind: str
    label: str
    lane: str
    device: str
    uses: str
    op: str
    parts: Range | None
    start_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True)
class Trace:
    """All spans of one call, ordered by their starts; `lanes` are (lane, device), in plan order.

    memory: (time, live bytes) at every change. critical_path: the longest chain of spans at full
    rate, each of which had to end before the next could; empty where it is not known.
    """

    name: str
    spans: tuple[Span, ...]
    memory: tuple[tuple[float, int], ...] = ()
    simulated: bool = False
    critical_path: tuple[Span, ...] = ()
    lanes: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        seen = dict.fromkeys([*self.lanes, *((span.lane, span.device) for span in self.spans)])
        object.__setattr__(self, "lanes", tuple(seen))

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the start of the call to the end of its last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def critical_path_s(self) -> float:
        """Seconds of the critical path at full rate: no speed of lanes can beat it."""
        return sum(span.busy_s for span in self.critical_path)

    def busy_s(self, lane: str) -> float:
        """Seconds in which a lane works, at full rate. Raises `WeftError` for an unknown lane."""
        if lane not in self._by_lane:
            text = f"trace: {unknown('lane', lane, self._by_lane)}"
            raise WeftError(text, rule="lane", lane=lane)
        return _union_s((span.start_s, span.busy_s) for span in self._by_lane[lane])

    def rows(self, lane: str) -> list[list[Span]]:
        """The spans of a lane, in as many rows as there are flights at once: no two overlap."""
        rows: list[list[Span]] = [[]]
        ends = [(0.0, 0)]  # when each row is free again
        for span in sorted(self._by_lane[lane], key=lambda span: span.start_s):
            end_s, at = ends[0]
            if end_s <= span.start_s:
                heapreplace(ends, (span.end_s, at))
            else:
                at = len(rows)
                heappush(ends, (span.end_s, at))
                rows.append([])
            rows[at].append(span)
        return rows

    @cached_property
    def _by_lane(self) -> dict[str, list[Span]]:
        spans: dict[str, list[Span]] = {lane: [] for lane, _ in self.lanes}
        for span in self.spans:
            spans[span.lane].append(span)
        return spans

    @cached_property
    def network_s(self) -> float:
        """Seconds in which at least one network op is in flight."""
        return _union_s(self._under_way([True]))

    @cached_property
    def exposed_network_s(self) -> float:
        """Seconds in which a network op is in flight and no compute or memory step runs."""
        any_s, work_s = (_union_s(self._under_way(each)) for each in ([True, False], [False]))
        return min(self.network_s, max(0.0, any_s - work_s))

    def _under_way(self, network: list[bool]) -> Iterable[tuple[float, float]]:
        for span in self.spans:
            works = span.kind in ("run", "copy", "transfer") and span.uses != "io"
            if works and (span.uses == "network") in network:
                yield span.start_s, span.end_s - span.start_s

    @property
    def overlap_share(self) -> float:
        """The share of network time that is hidden behind work; 1 where there is none to hide."""
        return 1.0 - self.exposed_network_s / self.network_s if self.network_s > 0 else 1.0

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at once."""
        return max((live for _, live in self.memory), default=0)

    def to_text(self, width: int = 100) -> str:
        """A timeline to read: a line a lane (more where flights overlap), its share, a summary."""
        wide = min(24, max((len(lane) for lane, _ in self.lanes), default=0)) + 2
        columns, end_s = max(20, width - wide - 6), self.makespan_s or 1e-6
        path = f", critical path {format_s(self.critical_path_s)}" if self.critical_path else ""
        how = "simulated" if self.simulated else "measured"
        lines = [f"{self.name} ({how}): makespan {format_s(self.makespan_s)}{path}"]
        lines.append(" " * wide + _axis(end_s, columns))
        for lane, _ in self.lanes:
            rows = self.rows(lane)
            first, *others = (_cells(row, end_s, columns) for row in rows[:MAX_FLIGHTS])
            lines.append(f"{lane[: wide - 2]:<{wide}}{first} {self.busy_s(lane) / end_s:>5.0%}")
            lines += [" " * wide + cells for cells in others]
            if (num_more := len(rows) - MAX_FLIGHTS) > 0:
                lines.append(" " * wide + f"... and {num_more} more flights at once")
        if self.network_s > 0:
            exposed = f"{format_s(self.exposed_network_s)} exposed, {self.overlap_share:.0%} hidden"
            lines.append(f"network {format_s(self.network_s)} in flight, {exposed}")
        if self.memory:
            lines.append(f"memory peak {self.peak_bytes / 2**20:.4g} MiB")
        used = {_fill(span) for span in self.spans}
        lines.append("  ".join(f"{fill} {word}" for fill, word in _KEY.items() if fill in used))
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def to_chrome(self) -> dict[str, Any]:
        """A JSON object for Perfetto or chrome://tracing; Weft's own data rides along."""
        devices: dict[str, int] = {}
        ids: dict[Span, dict[str, int]] = {}
        events: list[dict[str, Any]] = []
        rows = [(*at, n, row) for at in self.lanes for n, row in enumerate(self.rows(at[0]))]
        for tid, (lane, device, number, row) in enumerate(rows, 1):
            where = {"pid": devices.setdefault(device, len(devices) + 1), "tid": tid}
            ids |= dict.fromkeys(row, where)
            device += " (simulated)" * self.simulated
            lane += f", flight {number + 1}" if number else ""
            for word, name in (("process_name", device), ("thread_name", lane)):
                events.append({"name": word, "ph": "M", **where, "args": {"name": name}})
        for span in self.spans:
            facts = {"name": span.label, "cat": span.uses or "wait", "ph": "X"}
            time = {"ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6}
            args = {name: getattr(span, name) for name in ("kind", "op", "parts", "busy_s")}
            events.append({**facts, **ids[span], **time, "args": args})
        for number, (source, target) in enumerate(self._arrows()):
            start_s = (source.start_s + source.end_s) / 2
            end_s = min(target.end_s, max(start_s, (target.start_s + target.end_s) / 2))
            for phase, span, at_s in (("s", source, start_s), ("f", target, end_s)):
                facts = {"name": "wait", "cat": "wait", "ph": phase, "bp": "e"}
                events.append({**facts, **ids[span], "id": number, "ts": at_s * 1e6})
        for at_s, live in self.memory:
            facts = {"name": "live bytes", "ph": "C"}
            events.append({**facts, "pid": 1, "ts": at_s * 1e6, "args": {"bytes": live}})
        return {"traceEvents": events, "displayTimeUnit": "ms", "weft_trace": to_data(self)}

    def _arrows(self) -> Iterable[tuple[Span, Span]]:
        """(issue, transfer), (transfer, complete) and (what was waited for, wait) pairs."""
        first = {(span.kind == "transfer", span.label): span for span in reversed(self.spans)}
        for span in self.spans:
            key = span.kind == "complete", span.label.partition(" ")[2]
            if span.kind == "transfer":
                key = False, f"issue {span.label}"
            if span.kind in ("transfer", "complete", "wait") and key in first:
                yield first[key], span

    @staticmethod
    def load(path: str | Path) -> Trace:
        """Read a trace that was saved as .json. Raises `WeftError` for a file that is none."""
        trace: Trace = import_module("torchweft_tools.formats.weft_files").load_trace(path)
        return trace

    def save(self, path: str | Path) -> None:
        """Write the trace; the suffix says how: .json (for Perfetto) or .txt."""
        suffix = Path(path).suffix
        if suffix not in SUFFIXES:
            raise WeftError(f"trace: {unknown('suffix', suffix, SUFFIXES)}", rule="suffix")
        text = json.dumps(self.to_chrome()) + "\n" if suffix == ".json" else self.to_text()
        write_text(path, text)


def to_data(trace: Trace) -> dict[str, Any]:
    """The trace as plain data, ready for JSON; the critical path as numbers of spans."""
    numbers = {span: number for number, span in enumerate(trace.spans)}
    facts = ("name", "simulated", "lanes", "spans", "memory")
    plain = {"version": VERSION, **{name: getattr(trace, name) for name in facts}}
    return {**plain, "critical_path": [numbers[span] for span in trace.critical_path]}


def together(traces: Sequence[Trace], name: str) -> Trace:
    """The traces of all ranks as one: lanes are `rank0.compute`; bytes stay with their ranks."""
    ranks = list(enumerate(traces))
    lanes = [(f"rank{r}.{lane}", f"rank{r}.{device}") for r, t in ranks for lane, device in t.lanes]

    def of(rank: int, spans: Iterable[Span]) -> list[Span]:
        names = ((span, f"rank{rank}.{span.lane}", f"rank{rank}.{span.device}") for span in spans)
        return [span._replace(lane=lane, device=device) for span, lane, device in names]

    def joined(parts: Iterable[list[Span]]) -> tuple[Span, ...]:
        return tuple(sorted(chain(*parts), key=lambda span: (span.start_s, span.end_s)))

    spans = joined(of(rank, trace.spans) for rank, trace in ranks)
    path = joined(of(rank, trace.critical_path) for rank, trace in ranks)
    simulated = any(trace.simulated for trace in traces)
    return Trace(name, spans, (), simulated, path, tuple(lanes))


def side_by_side(planned: Trace, actual: Trace, width: int = 100) -> str:
    """Two traces on one axis: for each lane what was planned, above what happened."""
    spans = planned.spans + actual.spans
    names = [lane for each in (planned, actual) for lane, _ in each.lanes]
    lanes = [name for name in dict.fromkeys(names) if any(span.lane == name for span in spans)]
    wide = min(24, max(map(len, lanes), default=0)) + 10
    columns, end_s = max(20, width - wide), max(planned.makespan_s, actual.makespan_s) or 1e-6
    lines = [" " * wide + _axis(end_s, columns)]
    for lane in lanes:
        for name, trace in (("planned", planned), ("actual", actual)):
            head = f"{lane[: wide - 10] if name == 'planned' else '':<{wide - 8}}{name:<8}"
            for row in trace.rows(lane)[:MAX_FLIGHTS] if lane in trace._by_lane else [[]]:
                lines.append(head + _cells(row, end_s, columns))
                head = " " * wide
    return "\n".join(line.rstrip() for line in lines) + "\n"


def format_s(seconds: float) -> str:
    """Seconds to read: `1.24 ms`."""
    factor, unit = _scale(seconds)
    return f"{seconds * factor:.3g} {unit}"


def format_bytes(num_bytes: float) -> str:
    """Bytes to read: `1.5 GiB`."""
    scales = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    size, unit = next((scale for scale in scales if num_bytes >= scale[0]), (1, "bytes"))
    return f"{num_bytes / size:.4g} {unit}"


def _scale(seconds: float) -> tuple[float, str]:
    scales = ((1.0, "s"), (1e3, "ms"))
    return next((scale for scale in scales if seconds * scale[0] >= 1), (1e6, "us"))


def _union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of these (start, seconds) is under way."""
    total_s = reached_s = 0.0
    for start_s, taken_s in sorted(spans):
        until_s = max(reached_s, start_s + taken_s)
        total_s += min(taken_s, until_s - reached_s)
        reached_s = until_s
    return total_s


def _fill(span: Span) -> str:
    if span.kind in ("wait", "complete"):
        return "·"
    return "▒" if span.kind == "issue" else _FILL.get(span.uses, "█")


def _axis(end_s: float, columns: int) -> str:
    """Ticks at 1, 2 or 5 times a power of ten, at least 12 columns apart."""
    least_s, (factor, unit) = 12 * end_s / columns, _scale(end_s)
    power = 10.0 ** math.floor(math.log10(least_s))
    step_s = next(power * times for times in (1, 2, 5, 10, 20) if power * times >= least_s)
    line = f"|0 {unit}"
    for tick in range(1, math.floor(end_s / step_s) + 1):
        line = line.ljust(round(tick * step_s / end_s * columns))
        line += f"|{tick * step_s * factor:.6g}"
    return line if len(line) <= columns else line[: line.rindex("|")]


def _cells(spans: Iterable[Span], end_s: float, columns: int) -> str:
    """The spans of one lane as bars, with their labels where they fit."""
    cells = [" "] * columns
    for span in spans:
        first, last = (round(at_s / end_s * columns) for at_s in (span.start_s, span.end_s))
        fill = _fill(span)
        bar = [_EDGE.get(fill, fill), *fill * (last - first - 1)]
        if fill in _EDGE and len(span.label) < len(bar):
            before = (len(bar) - len(span.label) + 1) // 2
            bar[before : before + len(span.label)] = span.label
        if last > first:
            cells[first:last] = bar
        elif cells[min(first, columns - 1)] == " ":  # too short for a column, but alone in it
            cells[min(first, columns - 1)] = fill
    return "".join(cells)
