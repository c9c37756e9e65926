"""The `Program`: a verified plan as Python functions, one a lane; `writer` writes them.

failure_of(program, lane, error)    the error of a call, with what each lane had done
trace_of(program, marks)            what each step did when, from what a traced call has left
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchweft.errors import RunError, WeftError, clip
from torchweft.plan.graph import Graph
from torchweft.plan.plan import Plan, Range, Step
from torchweft.plan.sizes import Size
from torchweft.plan.trace import SPANS, Span, Trace

Body = Callable[..., Sequence[Any]]
Delay = bool | Callable[[Step], float]
"""Whether steps are delayed at random, or by how many seconds each."""
Mark = tuple[int, float, float]
"""A step, by its number, with its start and its end in seconds; ~number: its flight has landed."""
MAX_SHAPES = 4096
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


def reads_of(graph: Graph, step: Step) -> list[str]:
    """What the ops of a step need from outside, in order."""
    inside: set[str] = set()
    reads: dict[str, None] = {}
    for name in step.names:
        op = graph.op[name]
        reads |= dict.fromkeys(n for n in op.reads if n not in inside)
        inside.update(op.makes)
    return list(reads)


def makes_of(graph: Graph, step: Step) -> list[str]:
    """What the ops of a step make; of a kernel's ops, what is used outside of them."""
    if step.by is None:
        return list(graph.op[step.names[0]].makes)
    made = [name for op in step.names for name in graph.op[op].makes]
    outside = {name for name in made if {op.name for op in graph.readers[name]} - {*step.names}}
    return [name for name in made if name in outside or name in graph.outputs]


class Results:
    """What one step by a kernel is to give; a shape that was right once is not looked at again."""

    def __init__(self, plan: Plan, step: Step) -> None:
        self.values = [plan.graph.value[name] for name in makes_of(plan.graph, step)]
        self.sizes = [size for value in self.values for size in value.shape]
        written = next((line for line in plan.history if line.startswith("write ")), "")
        strategy = f" of strategy {written.removeprefix('write ')}" if written else ""
        self.where = f"kernel {step.by!r}{strategy} in place of {step.label}"
        self.right: set[tuple[int, ...]] = set()

    def __call__(self, made: Any, sizes: tuple[int, ...], reads: Sequence[Any] = ()) -> Any:
        """What was made. Raises `RunError` if it is not what the graph says."""
        if sizes in self.right:
            return made
        if not isinstance(made, tuple | list):
            raise self._wrong(_shown(made), f"a tuple of {len(self.values)}")
        if len(made) != len(self.values):
            names = ", ".join(value.name for value in self.values)
            raise self._wrong(f"{len(made)} values", f"{len(self.values)}: {names}")
        left, devices = list(sizes), {r.device for r in reads if isinstance(r, Tensor)}
        for value, one in zip(self.values, made, strict=True):
            shape, left = left[: len(value.shape)], left[len(value.shape) :]
            if value.dtype == "opaque":
                continue
            fits = isinstance(one, Tensor) and list(one.shape) == shape
            if not fits or str(one.dtype) != f"torch.{value.dtype}":
                raise self._wrong(_shown(one), f"{value.dtype}{shape}", value.name)
            if devices and one.device not in devices:
                where = f"one on {devices.pop()}"
                raise self._wrong(f"a tensor on {one.device}", where, value.name)
        if len(self.right) >= MAX_SHAPES:
            self.right.clear()
        self.right.add(sizes)
        return made

    def _wrong(self, came: str, expected: str, name: str = "") -> RunError:
        what = f" for {name!r}" if name else ""
        text = f"kernel: {self.where} gave {came}{what}; expected {expected}."
        return RunError(text, rule="kernel")


def _shown(thing: Any) -> str:
    if isinstance(thing, Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')}{list(thing.shape)}"
    return f"{type(thing).__name__} {clip(thing)}"


def failure_of(
    program: Program, lane: str, error: BaseException, stands: Sequence[Any]
) -> BaseException:
    """The one error that the caller sees. stands: the step that each lane was at; -1: at none."""
    if not isinstance(error, Exception):
        return error  # Ctrl-C and the like stay what they are
    at = step_of(program, error)
    if isinstance(error, WeftError):
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
    return RunError(what, story="\n".join(lines), lane=lane, step=at)


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
