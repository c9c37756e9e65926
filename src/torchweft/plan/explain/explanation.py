"""The `Explanation`: where the time of one step went, rank by rank, and what would change it.

    timelines of one step --explain--> Explanation --str--> text    --to_data--> plain data

    step        from its start to its end
    compute     something is computed           network      something is in flight
    overlapped  both                            exposed      in flight, and nothing is computed
    idle        neither

All are unions and intersections of time: overlapped + exposed == network, and compute + exposed +
idle == step. Each exposed or idle moment has one owner (`owners.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from torchweft.errors import WeftError
from torchweft.plan.explain.intervals import common, total_s, without
from torchweft.plan.explain.owners import OWNERS, OwnedTime, joined, owned, slowed_s
from torchweft.plan.explain.path import critical_path
from torchweft.plan.explain.timeline import TimedWork, Timeline
from torchweft.plan.explain.what_if import WhatIf
from torchweft.plan.trace import format_s

VERSION = 1
TIMES = ("step_s", "compute_s", "network_s", "overlapped_s", "exposed_s", "idle_s")
MAX_SHOWN, MIN_ENGAGED = 8, 0.01


@dataclass(frozen=True)
class RankTimes:
    """The times of one rank, or their means over all ranks (`rank` None).

    owners: for each (exposed, idle) seconds. communicators: exposed seconds; where several are in
    flight at once, those of the one that was first. slowed_s: what compute took longer beside the
    network than alone; None if nothing tells.
    """

    rank: int | None
    step_s: float
    compute_s: float
    network_s: float
    overlapped_s: float
    exposed_s: float
    idle_s: float
    owners: Mapping[str, tuple[float, float]]
    communicators: Mapping[str, float]
    slowed_s: float | None = None


@dataclass(frozen=True)
class Explanation:
    """What one step was spent on. `never`: what was asked for and did not happen, said first."""

    name: str
    ranks: tuple[RankTimes, ...]
    never: tuple[str, ...] = ()
    path: tuple[TimedWork, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    simulated_s: float | None = None
    steps: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    picture: str = ""

    @property
    def all(self) -> RankTimes:
        """The means over all ranks."""
        return self.ranks[0] if len(self.ranks) == 1 else _mean(self.ranks)

    @property
    def owners(self) -> dict[str, float]:
        """Exposed and idle seconds by owner, the largest first; means over ranks."""
        both = {owner: sum(seconds) for owner, seconds in self.all.owners.items()}
        return dict(sorted(both.items(), key=lambda item: -item[1]))

    def to_data(self) -> dict[str, object]:
        """The explanation as plain data, ready for JSON."""
        path = [work._asdict() for work in self.path]
        kept = ("label", "lane", "uses", "start_s", "end_s")
        return {
            "weft_explanation": VERSION,
            "name": self.name,
            "never_engaged": list(self.never),
            "all": asdict(self.all),
            "ranks": [asdict(rank) for rank in self.ranks],
            "owners": self.owners,
            "critical_path": [{name: item[name] for name in kept} for item in path],
            "what_if": [item._asdict() for item in self.what_if],
            "simulated_s": self.simulated_s,
            "steps": [{"name": name, "step_s": step_s} for name, step_s in self.steps],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        blocks = [
            [*(f"NEVER ENGAGED: {text}" for text in self.never)],
            [self.name, *self._steps()],
            _table(self),
            _owner_lines(self),
            _path_lines(self.path),
            self._what_if(),
            [f"note: {note}" for note in self.notes],
            self.picture.splitlines(),
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"

    def _steps(self) -> list[str]:
        if len(self.steps) < 2:
            return []
        times_s = [step_s for _, step_s in self.steps]
        span = f"{format_s(min(times_s))} to {format_s(max(times_s))}"
        return [f"{len(times_s)} steps of {span}; this is the median one"]

    def _what_if(self) -> list[str]:
        if not self.what_if:
            return []
        base = "" if self.simulated_s is None else f"as it is: {format_s(self.simulated_s)}; "
        lines = [f"what if (simulated; {base}measured: {format_s(self.all.step_s)})"]
        for item in self.what_if:
            lines.append(f"  {item.change:<24} {format_s(item.step_s):>8}  {item.factor:.2f} times")
        return lines


def explain(
    timelines: Sequence[Timeline],
    *,
    asked: Mapping[str, int] | None = None,
    num_parts: int = 1,
    what_if: Sequence[WhatIf] = (),
    simulated_s: float | None = None,
    steps: Sequence[tuple[str, float]] = (),
    notes: Iterable[str] = (),
    picture: str = "",
) -> Explanation:
    """Explain one step from the timelines of its ranks. Raises `WeftError` if there is none.

    asked: what was asked for (a rewrite, a branch, a strategy) and how often it happened.
    num_parts: into how many parts the plan cuts the batch.
    """
    if not timelines:
        raise WeftError("explain: there is no timeline to look at.", rule="explain")
    late, unmatched = joined(timelines)
    ranks = tuple(_times(each, owned(each, late[n])) for n, each in enumerate(timelines))
    slowest = max(timelines, key=lambda each: each.step_s)
    name = " ".join(filter(None, (timelines[0].name, timelines[0].step)))
    return Explanation(
        name,
        ranks,
        tuple(_never(ranks, asked or {}, num_parts)),
        critical_path(slowest),
        tuple(what_if),
        simulated_s,
        tuple(steps),
        (*notes, *unmatched),
        picture,
    )


def _times(timeline: Timeline, stretches: Sequence[OwnedTime]) -> RankTimes:
    owners: dict[str, tuple[list[float], list[float]]] = {}
    talks: dict[str, list[float]] = {}
    for owner, communicators, start_s, end_s in stretches:
        owners.setdefault(owner, ([], []))[not communicators].append(end_s - start_s)
        if communicators:
            talks.setdefault(communicators[0], []).append(end_s - start_s)
    exposed = without(timeline.network, timeline.compute)
    sums = {owner: (math.fsum(one), math.fsum(other)) for owner, (one, other) in owners.items()}
    return RankTimes(
        timeline.rank,
        timeline.step_s,
        total_s(timeline.compute),
        total_s(timeline.network),
        total_s(common(timeline.network, timeline.compute)),
        total_s(exposed),
        total_s(without(timeline.gaps, exposed)),
        dict(sorted(sums.items(), key=lambda item: -sum(item[1]))),
        {name: math.fsum(seconds) for name, seconds in talks.items()},
        slowed_s(timeline),
    )


def _mean(ranks: Sequence[RankTimes]) -> RankTimes:
    owners = dict.fromkeys(owner for rank in ranks for owner in rank.owners)
    talks = dict.fromkeys(name for rank in ranks for name in rank.communicators)
    slowed = [rank.slowed_s for rank in ranks if rank.slowed_s is not None]
    times: Any = {name: fmean(getattr(rank, name) for rank in ranks) for name in TIMES}
    pairs = {owner: [rank.owners.get(owner, (0.0, 0.0)) for rank in ranks] for owner in owners}
    return RankTimes(
        None,
        **times,
        owners={
            owner: (fmean(exposed_s for exposed_s, _ in each), fmean(idle_s for _, idle_s in each))
            for owner, each in pairs.items()
        },
        communicators={n: fmean(rank.communicators.get(n, 0.0) for rank in ranks) for n in talks},
        slowed_s=fmean(slowed) if slowed else None,
    )


def _never(ranks: Sequence[RankTimes], asked: Mapping[str, int], num_parts: int) -> list[str]:
    """What was asked for and did not happen."""
    never = [f"{what}: 0 times" for what, count in asked.items() if count == 0]
    network_s = sum(rank.network_s for rank in ranks)
    overlapped_s = sum(rank.overlapped_s for rank in ranks)
    if network_s > 0 and overlapped_s < MIN_ENGAGED * network_s:
        what = f"{num_parts} parts were asked for, but " if num_parts > 1 else ""
        never.append(f"{what}no network op ran beside compute, on any rank")
    return never


def _table(explanation: Explanation) -> list[str]:
    """The times in milliseconds, a row a rank."""
    heads = [name.removesuffix("_s") for name in TIMES]
    lines = [f"{'ms':<6}" + "".join(f"{head:>12}" for head in heads) + f"{'hidden':>9}"]
    rows = list(explanation.ranks)
    if len(rows) > 1:
        rows = [*rows[: 2 * MAX_SHOWN], explanation.all]
    for rank in rows:
        name = "mean" if rank.rank is None else f"rank {rank.rank}"
        cells = "".join(f"{getattr(rank, time) * 1e3:>12.3f}" for time in TIMES)
        hidden = rank.overlapped_s / rank.network_s if rank.network_s else None
        lines.append(f"{name:<6}{cells}" + ("" if hidden is None else f"{hidden:>9.0%}"))
    if (num_more := len(explanation.ranks) - 2 * MAX_SHOWN) > 0:
        lines.insert(-1, f"... and {num_more} more ranks")
    talks = explanation.all.communicators
    for name, seconds in Counter(talks).most_common(MAX_SHOWN):
        lines.append(f"exposed on communicator {name}: {format_s(seconds)}")
    if (slowed := explanation.all.slowed_s) is not None and slowed > 0:
        lines.append(f"contention: compute beside the network took {format_s(slowed)} longer")
    return lines


def _owner_lines(explanation: Explanation) -> list[str]:
    """A line an owner: milliseconds exposed and idle, and the cure."""
    whole_s = sum(explanation.owners.values())
    if whole_s <= 0:
        return []
    wide = max(map(len, explanation.owners))
    lines = [f"{'owner':<{wide}}{'exposed':>11}{'idle':>11}{'share':>7}"]
    for owner, seconds in explanation.owners.items():
        exposed_s, idle_s = explanation.all.owners[owner]
        times = f"{exposed_s * 1e3:>11.3f}{idle_s * 1e3:>11.3f}{seconds / whole_s:>7.0%}"
        lines.append(f"{owner:<{wide}}{times}  {OWNERS[owner]}")
    return lines


def _path_lines(path: Sequence[TimedWork]) -> list[str]:
    if not path:
        return []
    by_use: dict[str, float] = {}
    by_label: Counter[str] = Counter()
    for work in path:
        by_use[work.uses] = by_use.get(work.uses, 0.0) + work.end_s - work.start_s
        by_label[f"{work.uses}: {work.label[:60]}"] += work.end_s - work.start_s  # type: ignore[assignment]
    between_s = max(0.0, path[-1].end_s - path[0].start_s - sum(by_use.values()))
    parts = [f"{uses} {format_s(seconds)}" for uses, seconds in by_use.items()]
    head = f"critical path: {len(path)} works; {', '.join(parts)}, between them "
    lines = [head + format_s(between_s)]
    for label, seconds in by_label.most_common(5):
        lines.append(f"  {format_s(seconds):>8}  {label}")
    return lines
