"""The `Program`: a verified plan as Python functions, one a lane; `writer` writes them.

failure_of(program, lane, error)    the error of a call, with what each lane had done
trace_of(program, marks)            what each step did when, from what a traced call has left
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchweft.errors import RunError, WeftError
from torchweft.plan.plan import Plan, Range, Step
from torchweft.plan.sizes import Size
from torchweft.plan.trace import SPANS, Span, Trace
from torchweft.ranks.talk import KERNEL

Body = Callable[..., Sequence[Any]]
Delay = bool | Callable[[Step], float]
"""Whether steps are delayed at random, or by how many seconds each."""
Mark = tuple[int, float, float]
"""A step, by its number, with its start and its end in seconds; ~number: its flight has landed."""
Inputs = Sequence[Any]
Numbers = Sequence[int]
Outputs = tuple[Any, ...]
"""Of one call: the values of the graph's inputs, borders or sizes, the values of its outputs."""


@dataclass(frozen=True, eq=False)
class Program:
    """Compiled lanes of one plan; `lanes[0]` runs in the caller's thread.

    ranges: the parts whose side state it puts in force, in the order of the switch's numbers.
    """

    plan: Plan
    lanes: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    source: str
    filename: str
    step_at: Mapping[int, int]
    num_cells: int
    num_events: int
    sizes: tuple[tuple[Size, int, int], ...]
    ranges: tuple[Range, ...] = ()

    def numbers(self, env: Mapping[str, int], bounds: Sequence[int]) -> tuple[int, ...]:
        """The sizes that bodies need in a call: symbols from `env`, the batch by part."""
        symbol = self.plan.graph.batch
        return tuple(
            size.evaluate({**env, symbol: bounds[stop] - bounds[start]} if symbol else env)
            for size, start, stop in self.sizes
        )


def failure_of(
    program: Program, lane: str, error: BaseException, stands: Sequence[Any]
) -> BaseException:
    """The one error that the caller sees. stands: the step that each lane was at; -1: at none."""
    if not isinstance(error, Exception):
        return error  # Ctrl-C and the like stay what they are
    at = step_of(program, error)
    is_kernel = isinstance(error, RunError) and error.rule == KERNEL
    if isinstance(error, WeftError) and not is_kernel:
        error.step = at if error.step is None else error.step
        return error
    steps, lines = program.plan.steps, []
    for name, number in zip(program.lanes, stands, strict=False):
        number = at if name == lane else number
        where = steps[number].label if number is not None and number >= 0 else "its start"
        lines.append(f"  lane {name!r} stood at {where}")
    if changed := sorted(program.plan.graph.mutated & set(program.plan.graph.inputs)):
        lines.append(f"  may be half written: {', '.join(changed)}")
    where = steps[at].label if at is not None else "its end"
    what = f"run: {where} on lane {lane!r} failed: {type(error).__name__}: {error}"
    text, rule = (str(error), KERNEL) if is_kernel else (what, "run")
    return RunError(text, rule=rule, story="\n".join(lines), lane=lane, step=at)


def step_of(program: Program, error: BaseException) -> int | None:
    """The step in which an error was raised; None if it was in none."""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == program.filename and frame.lineno is not None:
            return program.step_at.get(frame.lineno)
    return None


def trace_of(program: Program, marks: Iterable[Mark]) -> Trace:
    """What the steps left behind, as a trace: steps, waits that took time, transfers in flight."""
    plan, marks = program.plan, sorted(marks, key=lambda mark: mark[1])
    began = marks[0][1] if marks else 0.0
    landed = {~index: end - began for index, _, end in marks if index < 0}
    spans: list[Span] = []
    issues = {step.names: step for step in reversed(plan.steps) if step.kind == "issue"}
    issued: dict[object, tuple[int, float]] = {}
    for index, start, end in marks:
        if index < 0:
            continue
        step, start, end = plan.steps[index], start - began, end - began
        device = plan.lane[step.lane].device
        ops = step.names if step.kind in ("run", "issue", "complete") else ()
        uses = plan.graph.op[ops[0]].uses if ops else "memory"
        what = " ".join(ops), step.parts
        if step.kind in SPANS:
            busy_s = 0.0 if step.kind in ("wait", "complete") else end - start
            lane_uses = "compute" if step.kind in ("issue", "complete", "wait") else uses
            where = step.kind, step.label, step.lane, device, lane_uses
            spans.append(Span(*where, *what, start, end, busy_s))
        if step.kind == "issue":
            issued[what] = index, end
        if step.kind == "complete":
            number, at = issued.get(what, (index, start))
            lane, label = issues[step.names].on or step.lane, step.label.removeprefix("complete ")
            end = min(end, landed.get(number, end))
            at = min(at, end)
            spans.append(Span("transfer", label, lane, device, uses, *what, at, end, end - at))
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    busy = {span.lane for span in spans}
    lanes = tuple((lane.name, lane.device) for lane in plan.lanes if lane.name in busy)
    return Trace(plan.graph_name, tuple(spans), lanes=lanes)
