"""The `Placement`: which device runs each op, from when to when; what a planner makes.

    placement of t by heft, for latency: makespan 3.2 s, bound 3.1 s (3.2% above), planned in 1 ms
      start        end          device    op
      0 s          1 s          fast      leaf0
      ...

It is data: it prints, and goes to JSON and back. `score_s` is what its objective counts: the
makespan of one input, or the period of a stream. `bound_s` is a proven lower bound of the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torchweft.errors import PlacementError, clip, unknown
from torchweft.files import Reader, read_json, write_json
from torchweft.placement.draft import Draft, period_s, run
from torchweft.placement.problem import OBJECTIVES, Problem
from torchweft.plan.graph import check_name
from torchweft.plan.trace import format_s

VERSION = 1
PROVEN = 1e-6  # a score this close to its bound, relatively, is optimal


@dataclass(frozen=True)
class Placement:
    """For each op its device (a number into `devices`), its start and its end."""

    problem: str
    ops: tuple[str, ...]
    devices: tuple[str, ...]
    device: tuple[int, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    period_s: float
    objective: str = "latency"
    planner: str = ""
    bound_s: float | None = None
    planning_s: float = 0.0

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last op has ended."""
        return max(self.end_s)

    @property
    def score_s(self) -> float:
        """What the objective counts; less is better."""
        return self.makespan_s if self.objective == "latency" else self.period_s

    @property
    def gap(self) -> float | None:
        """How far the score is above the bound, relatively; None without a bound."""
        if self.bound_s is None:
            return None
        if self.bound_s == 0:
            return 0.0 if self.score_s == 0 else math.inf
        return max(0.0, self.score_s / self.bound_s - 1)

    @property
    def optimal(self) -> bool:
        """Whether it is proven that there is no better one."""
        return self.gap is not None and self.gap <= PROVEN

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The ops by their starts, none before what it reads."""
        keys = list(zip(self.start_s, self.end_s, range(len(self.ops)), strict=True))
        return tuple(op for _, _, op in sorted(keys))

    @cached_property
    def device_of(self) -> Mapping[str, str]:
        """The device of an op, by names."""
        return {op: self.devices[at] for op, at in zip(self.ops, self.device, strict=True)}

    def __str__(self) -> str:
        score = f"makespan {format_s(self.makespan_s)}"
        if self.objective == "throughput":
            score = f"period {format_s(self.period_s)}, {score}"
        bound = "no bound"
        if self.bound_s is not None and self.gap is not None:
            above = "optimal" if self.optimal else f"{self.gap:.1%} above"
            bound = f"bound {format_s(self.bound_s)} ({above})"
        head = f"placement of {self.problem} by {self.planner or '?'}, for {self.objective}"
        lines = [f"{head}: {score}, {bound}, planned in {format_s(self.planning_s)}"]
        wide = max(6, *map(len, self.devices)) + 2
        lines.append(f"  {'start':<13}{'end':<13}{'device':<{wide}}op")
        for op in self.order:
            times = f"{format_s(self.start_s[op]):<13}{format_s(self.end_s[op]):<13}"
            lines.append(f"  {times}{self.devices[self.device[op]]:<{wide}}{self.ops[op]}")
        return "\n".join(lines) + "\n"

    def to_data(self) -> dict[str, object]:
        """The placement as plain data, ready for JSON."""
        columns = self.ops, self.device, self.start_s, self.end_s
        rows = [
            {"op": op, "device": self.devices[at], "start_s": start_s, "end_s": end_s}
            for op, at, start_s, end_s in zip(*columns, strict=True)
        ]
        facts = ("problem", "planner", "objective", "makespan_s", "period_s", "bound_s", "gap")
        plain = {name: getattr(self, name) for name in (*facts, "optimal", "planning_s")}
        lists = {"devices": list(self.devices), "placement": rows}
        return {"weft_placement": VERSION, **plain, **lists}

    def save(self, path: str | Path) -> None:
        """Write the placement as a JSON file."""
        write_json(path, self.to_data())

    @staticmethod
    def load(path: str | Path) -> Placement:
        """Read a placement file. Raises `PlacementError` for a file that is none."""
        return Placement.from_data(read_json(path, PlacementError, "placement"))

    @staticmethod
    def from_data(data: object) -> Placement:
        """A placement from plain data. Raises `PlacementError` naming the field that is wrong."""
        read = Reader(data, PlacementError, "placement")
        if read.take("weft_placement", int, None) != VERSION:
            raise read.fail(f"this is not a placement of version {VERSION}.")
        devices = tuple(
            check_name(name, "device", PlacementError) for name in read.names("devices")
        )
        numbers = {name: number for number, name in enumerate(devices)}
        rows = [_row(item, numbers) for item in read.take("placement", list)]
        if not rows or len({row[0] for row in rows}) < len(rows) or len(numbers) < len(devices):
            raise read.fail("it has no ops, or two ops or devices of one name.")
        ops, device, start_s, end_s = zip(*rows, strict=True)
        objective = read.take("objective", str, "latency")
        if objective not in OBJECTIVES:
            raise read.fail(unknown("objective", objective, OBJECTIVES))
        bound_s = read.take("bound_s", (int, float), None)
        return Placement(
            problem=check_name(read.take("problem", str), "problem", PlacementError),
            ops=ops,
            devices=devices,
            device=device,
            start_s=start_s,
            end_s=end_s,
            period_s=_seconds(read, "period_s"),
            objective=objective,
            planner=read.take("planner", str, ""),
            bound_s=None if bound_s is None else _seconds(read, "bound_s"),
            planning_s=_seconds(read, "planning_s", 0.0),
        )


def _row(data: object, numbers: Mapping[str, int]) -> tuple[str, int, float, float]:
    read = Reader(data, PlacementError, "placed op")
    name = check_name(read.take("op", str), "op", PlacementError)
    device = read.take("device", str)
    if device not in numbers:
        raise read.fail(unknown("device", device, numbers))
    start_s, end_s = _seconds(read, "start_s"), _seconds(read, "end_s")
    if end_s < start_s:
        raise read.fail(f"op {name!r} ends before it starts.")
    read.done()
    return name, numbers[device], start_s, end_s


def _seconds(read: Reader, name: str, default: object = ...) -> float:
    number = read.take(name, (int, float), default)
    if not 0 <= number < math.inf:
        raise read.fail(f"{name} must be a number of seconds from 0 on; got {clip(number)}.")
    return float(number)


def placed(
    problem: Problem, devices: Sequence[int], order: Sequence[int], *, bound_s: float | None = None
) -> Placement:
    """The placement in which every device runs its ops in this order, as early as it can.

    This is the simulation of a placement. The order has every op once, none before what it reads.
    """
    return _placement(problem, devices, *run(problem, devices, order), bound_s)


def finished(draft: Draft) -> Placement:
    """The placement of a draft in which every op has been put."""
    return _placement(draft.problem, draft.device, draft.start_s, draft.finish_s)


def best(placements: Iterable[Placement]) -> Placement:
    """The placement with the least score; of equal ones the first."""
    return min(placements, key=lambda placement: placement.score_s)


def replay(problem: Problem, placement: Placement) -> Placement:
    """The same devices and orders under the costs of another problem with the same ops: what a
    placement really takes when the costs have drifted. Raises `PlacementError` if the ops differ.
    """
    if placement.ops != problem.ops or placement.devices != problem.devices:
        raise PlacementError(
            f"problem: the placement of {placement.problem!r} has other ops or devices than "
            f"problem {problem.name!r}.",
            rule="problem",
        )
    return placed(problem, placement.device, placement.order)


def _placement(
    problem: Problem,
    devices: Sequence[int],
    start_s: Sequence[float],
    end_s: Sequence[float],
    bound_s: float | None = None,
) -> Placement:
    return Placement(
        problem.name,
        problem.ops,
        problem.devices,
        tuple(devices),
        tuple(start_s),
        tuple(end_s),
        period_s(problem, devices),
        problem.objective,
        bound_s=bound_s,
    )
