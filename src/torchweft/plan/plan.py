"""The `Plan`: all steps of one call, each on a lane, in the order in which the lane runs them.

    weft plan 1
    graph llama 5c3a9e12d0f4b6a8
    parts 1/2 1/2
    lane compute on cpu uses compute,memory
    lane network on cpu uses network via compute
    kernel fused talks all_reduce@issue what a kernel declares: `plan/kernels/`
    place y alone
    history write overlap(parts=2)
    steps
      compute  split x                    x[0] and x[1] become views of x
      compute  attn0[0]                   run op attn0 on part 0; [0:2]: parts 0 and 1; none: all
      compute  issue reduce0[0] on network     start a two-phase op; `complete reduce0[0]` ends it
      compute  mlp0[1] after reduce0[0]   an edge that the author asked for
      network  wait attn0[0]              go on when that step is done
      compute  (norm0 add0)[0] by fused   a user's kernel in the place of two ops
      compute  copy y[0]                  into its place; `copy y[0] to gpu0`: to another device
      compute  free a0[0]                 its bytes are dead
      compute  merge y                    y is handed out whole
    end

A plan with lanes of links (`lane cpu.to.gpu0 on cpu uses io to gpu0`), declared kernels, edges or a
cut at phases has format 2, every other plan format 1. `docs/plans.md` says what each step means. A
plan is data: it has no sizes, holds no code, and `Plan.parse(str(plan)) == plan`. The graph it
belongs to is named by its digest; `bind` joins them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torchweft.errors import PlanError, WeftError, clip, excerpt
from torchweft.files import check_length, read_text, write_text
from torchweft.plan.context import Cut
from torchweft.plan.graph import NAME, Collective, Graph
from torchweft.plan.kernels.declaration import LINE, PHASES, Declaration, read_declaration
from torchweft.plan.kernels.fitting import talks_of
from torchweft.plan.kernels.kernel import Kernel
from torchweft.plan.machine import LANE, MAX_DEVICES, Lane, make_lane
from torchweft.plan.sizes import Size

FORMATS = ("1", "2")
MAX_STEPS, MAX_LINE, MAX_MEMORY = 100_000, 100_000, 10_000
KINDS = ("split", "run", "copy", "wait", "merge", "free", "issue", "complete")
Range = tuple[int, int]
Edge = tuple[str, Range | None]
"""What a step comes after: an op, and a range of parts (None: all, or no batch)."""
Pair = tuple[str, int]
"""An op, and a part; of an op that runs once for all parts: 0."""


class Step(NamedTuple):
    """One entry of a plan. `parts` is a range of parts, None: all of them (or no batch at all).

    names: the ops of a run, issue or complete; the value of a split, copy, merge or free.
    on: the lane that an issued op runs on, the device that a copy goes to.
    by: the user's kernel that stands in for the ops. target: the label that a wait waits for.
    after: what must have ended before a run or an issue starts, besides what it touches.
    """

    kind: str
    lane: str
    names: tuple[str, ...] = ()
    parts: Range | None = None
    on: str | None = None
    by: str | None = None
    target: str | None = None
    after: tuple[Edge, ...] = ()

    @property
    def label(self) -> str:
        """What other steps call this one: `attn0[0]`, `complete reduce0[0]`, `copy y[0]`."""
        if self.kind == "wait":
            return f"wait {self.target}"
        name = self.names[0] if len(self.names) == 1 else f"({' '.join(self.names)})"
        label = name + bracket(self.parts) if self.parts else name
        if self.kind == "run":
            return label
        to = f" to {self.on}" if self.kind == "copy" and self.on else ""
        return f"{self.kind} {label}{to}"

    def __str__(self) -> str:
        on = f" on {self.on}" if self.kind == "issue" else ""
        by = f" by {self.by}" if self.by else ""
        edges = " ".join(name + bracket(parts) for name, parts in self.after)
        return f"{self.lane}  {self.label}{by}{on}{' after ' if edges else ''}{edges}"


class Buffer(NamedTuple):
    """Bytes of a device that several values share in turn, measured in `unit` bytes."""

    name: str
    device: str
    unit: Size


class Place(NamedTuple):
    """Where a value lives whole: at `offset` units of a buffer, or alone in bytes of its own."""

    value: str
    buffer: str | None = None
    offset: int = 0


def one_line(note: str) -> str:
    """A history line of any text: one line, no blanks around it."""
    return " ".join(note.split()) or "-"


def bracket(parts: Range | None) -> str:
    """A range of parts as it is written: `[0]`, `[0:2]`, or nothing for all parts."""
    if parts is None:
        return ""
    start, stop = parts
    return f"[{start}]" if stop == start + 1 else f"[{start}:{stop}]"


def holds(piece: Range | None, parts: Range | None) -> bool:
    """Whether a piece has all these parts."""
    if piece is None or parts is None:
        return piece is None
    return piece[0] <= parts[0] and parts[1] <= piece[1]


def pairs_of(graph: Graph, num_parts: int, names: Sequence[str], parts: Range | None) -> list[Pair]:
    """The ops and parts that a step of these ops over a range runs."""
    every = range(*(parts or (0, num_parts)))
    return [(name, part) for name in names for part in ((0,) if graph.op[name].whole else every)]


@dataclass(frozen=True)
class Plan:
    """All steps in lane order, with the cut, the lanes and the places they speak of.

    `graph` (joined by `bind`) and `kernels` (the functions behind `by`) are not part of the data;
    what the kernels declare is.
    """

    graph_name: str
    digest: str
    cut: Cut
    lanes: tuple[Lane, ...]
    steps: tuple[Step, ...]
    buffers: tuple[Buffer, ...] = ()
    places: tuple[Place, ...] = ()
    history: tuple[str, ...] = ()
    declared: tuple[Declaration, ...] = ()
    bound: Graph | None = field(default=None, compare=False, repr=False)
    kernels: Mapping[str, Kernel] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_parts(self) -> int:
        """How many parts the batch is cut into."""
        return len(self.cut.fractions)

    def bounds(self, num_rows: int, requests: Sequence[int] = ()) -> tuple[int, ...]:
        """The row borders of the parts, as `Cut.bounds` has them, at rows where the graph allows
        them. Raises `StrategyError` where there are none."""
        graph = self.graph
        return self.cut.bounds(num_rows, requests, graph.row_unit, empty=graph.takes_empty)

    @cached_property
    def is_lowered(self) -> bool:
        """Whether it has steps that no strategy writes; such a plan is complete, or wrong."""
        return any(step.kind not in ("split", "run", "merge") for step in self.steps)

    @cached_property
    def lane(self) -> Mapping[str, Lane]:
        """Lanes by name."""
        return {lane.name: lane for lane in self.lanes}

    @cached_property
    def declaration(self) -> Mapping[str, Declaration]:
        """What kernels declare, by their names; a plain function declares nothing."""
        return {each.name: each for each in self.declared}

    def talks(self, step: Step) -> list[Collective]:
        """The collectives that a step starts: those of its ops, or those of its kernel's phase."""
        if step.kind not in ("run", *PHASES):
            return []
        if step.by is not None:
            phases = PHASES if step.kind == "run" else (step.kind,)
            return talks_of(self.graph, step.names, self.declaration.get(step.by), phases)
        started = [self.graph.op[n].collective for n in step.names if step.kind != "complete"]
        return [each for each in started if each is not None]

    @cached_property
    def copied(self) -> frozenset[str]:
        """Values that get into their place by copies: no out= form, or a kernel makes them."""
        kernels = [op for step in self.steps if step.by for op in step.names]
        made = {name for op in kernels for name in self.graph.op[op].makes}
        return frozenset(made.union(v.name for v in self.graph.values if not v.placeable))

    @property
    def graph(self) -> Graph:
        """The graph this plan runs. Raises `PlanError` if a parsed plan was not bound to it."""
        if self.bound is None:
            raise PlanError(
                f"unbound: this plan is text only; join it to its graph {self.graph_name!r} "
                "with plan.bind(graph) or Plan.load(path, graph)."
            )
        return self.bound

    def bind(self, graph: Graph) -> Plan:
        """The same plan joined to its graph. Raises `PlanError` if it is another graph's plan."""
        if graph.digest != self.digest:
            raise PlanError(
                f"graph: the plan was made for graph {self.graph_name!r} ({self.digest}), "
                f"not for {graph.name!r} ({graph.digest}). Write a new plan for it."
            )
        return replace(self, bound=graph)

    def then(self, note: str, **changes: Any) -> Plan:
        """This plan with changes, and a line in its history that says which pass made them."""
        return replace(self, history=(*self.history, one_line(note)), **changes)

    def excerpt(self, at: int) -> str:
        """The steps next to step `at`, with an arrow at it."""
        return excerpt([str(step) for step in self.steps], at)

    def diff(self, other: Plan) -> str:
        """What turns this plan into the other, line by line; empty if they are equal."""
        pair = str(self).splitlines(), str(other).splitlines()
        return "\n".join(difflib.unified_diff(*pair, "before", "after", lineterm=""))

    def __str__(self) -> str:
        newer = self.declared or any(lane.to for lane in self.lanes) or self.cut.rule == "phases"
        newer = newer or any(step.after for step in self.steps)
        lines = [
            f"weft plan {FORMATS[bool(newer)]}",
            f"graph {self.graph_name} {self.digest}",
            f"parts {self.cut}",
        ]
        lines += [f"lane {lane}" for lane in self.lanes]
        lines += [f"kernel {each}" for each in self.declared]
        lines += [f"buffer {b.name} on {b.device} unit {b.unit}" for b in self.buffers]
        for place in self.places:
            where = f"in {place.buffer} at {place.offset}" if place.buffer else "alone"
            lines.append(f"place {place.value} {where}")
        lines += [f"history {note}" for note in self.history]
        names = {*self.lane, *(step.lane for step in self.steps)}
        wide = max(map(len, names), default=0) + 2
        lines.append("steps")
        for step in self.steps:
            lines.append(f"  {step.lane:<{wide}}{str(step)[len(step.lane) + 2 :]}")
        return "\n".join([*lines, "end"]) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan as a text file."""
        write_text(path, str(self))

    @staticmethod
    def load(path: str | Path, graph: Graph | None = None) -> Plan:
        """Read a plan file, and bind it if a graph is given. It is not verified yet."""
        plan = Plan.parse(read_text(path, PlanError, "plan"))
        return plan.bind(graph) if graph is not None else plan

    @staticmethod
    def parse(text: str) -> Plan:
        """Read a plan from its text. Raises `PlanError` with the line that is wrong."""
        return _Parser(text).plan()

    @staticmethod
    def parse_all(text: str) -> list[Plan]:
        """Read several plans, one behind the other."""
        check_length(text, PlanError, "plans")
        return [Plan.parse(each) for each in _BORDER.split(text) if each.strip()]


_BORDER = re.compile(r"(?<=^end\n)", re.MULTILINE)  # between two plans
_NAME = NAME.pattern
_RANGE = r"(?:\[([0-9]{1,4})(?::([0-9]{1,4}))?\])?"
_FRACTION = r"[0-9]{1,9}(?:/[0-9]{1,9})?"
_HEAD: dict[str, tuple[str, Callable[..., object]]] = {
    "graph": (rf"({_NAME}) ([0-9a-f]{{16}})", lambda name, digest: (name, digest)),
    "parts": (
        rf"({_FRACTION}(?: {_FRACTION})*)(?: at ({_NAME}))?",
        lambda fractions, rule: Cut(tuple(map(Fraction, fractions.split())), rule),
    ),
    "lane": (LANE.pattern, make_lane),
    "kernel": (LINE, read_declaration),
    "buffer": (
        rf"({_NAME}) on ({_NAME}) unit (.+)",
        lambda name, device, unit: Buffer(name, device, Size.parse(unit)),
    ),
    "place": (
        rf"({_NAME}) (?:alone|in ({_NAME}) at ([0-9]{{1,18}}))",
        lambda name, buffer, offset: Place(name, buffer, int(offset or 0)),
    ),
    "history": (r"(\S.*)", lambda note: note),
}
"""By its first word, how a head line goes on, and what is made of it."""
_ACT = (
    rf"(?:(split|copy|merge|free|issue|complete) )?(?:({_NAME})|\(({_NAME}(?: {_NAME})+)\)){_RANGE}"
)
_STEP = re.compile(
    rf"({_NAME})\s+{_ACT}(?: to ({_NAME}))?(?: by ({_NAME}))?(?: on ({_NAME}))?(?: after (\S.*))?"
)
_EDGE = re.compile(rf"({_NAME}){_RANGE}")
_WAIT = re.compile(rf"({_NAME})\s+wait ({_ACT}(?: to {_NAME})?)")


class _Parser:
    """Reads a plan's text line by line and knows where it is when something is wrong."""

    def __init__(self, text: str) -> None:
        check_length(text, PlanError, "a plan")
        self.lines = text.splitlines()
        self.at = 0

    def fail(self, why: str, rule: str = "syntax") -> NoReturn:
        lines = [line[:120] for line in self.lines] or [""]
        shown = excerpt(lines, min(self.at, len(lines) - 1), around=2, count_from=1)
        raise PlanError(f"{rule}: line {self.at + 1}: {why}\n{shown}", rule=rule) from None

    def plan(self) -> Plan:
        """The plan, or the error of the first line that is wrong."""
        first = self.lines[0].split() if self.lines else []
        if first[:2] != ["weft", "plan"]:
            self.fail("this is not a plan; a plan starts with 'weft plan 1'.")
        self.format = " ".join(first[2:])
        if self.format not in FORMATS:
            why = f"this torchweft reads plan formats {' and '.join(FORMATS)}"
            self.fail(f"{why}; got {clip(self.format)}. Use the one that wrote it.", "version")
        if len(self.lines) > MAX_STEPS or max(map(len, self.lines)) > MAX_LINE:
            limit = f"{MAX_STEPS} lines of at most {MAX_LINE} characters"
            self.fail(f"a plan has at most {limit}; this one has {len(self.lines)} lines.")
        head: dict[str, list[Any]] = {word: [] for word in _HEAD}
        self.at = 1
        while self.here() != "steps":
            word, _, rest = self.here().partition(" ")
            if word not in _HEAD:
                self.fail(f"a head line starts with {', '.join(_HEAD)} or steps.")
            pattern, make = _HEAD[word]
            match = re.fullmatch(pattern, rest)
            if match is None:
                self.fail(f"cannot read this {word!r} line.")
            try:
                head[word].append(make(*match.groups()))
            except (WeftError, ZeroDivisionError) as error:
                self.fail(f"{error}")
            self.at += 1
            if len(head["buffer"]) + len(head["place"]) > MAX_MEMORY:
                self.fail(f"a plan has at most {MAX_MEMORY} buffers and places.")
        self.at += 1
        steps = []
        while self.here() != "end":
            steps.append(self.step(self.here()))
            self.at += 1
        if any(line.strip() for line in self.lines[self.at + 1 :]):
            self.at += 1
            self.fail("something stands behind the end of the plan.")
        return self.build(head, tuple(steps))

    def here(self) -> str:
        while self.at < len(self.lines) and not self.lines[self.at].strip():
            self.at += 1
        if self.at >= len(self.lines):
            self.fail("the plan is cut off: there is no line 'end'.", "truncated")
        return self.lines[self.at].strip()

    def step(self, line: str) -> Step:
        if match := _WAIT.fullmatch(line):
            return Step("wait", match[1], target=match[2])
        match = _STEP.fullmatch(line)
        if match is None:
            self.fail("cannot read this step.")
        lane, kind, name, names, start, stop, to, by, on, after = match.groups()
        kind = kind or "run"
        if (to and kind != "copy") or (by and kind not in ("run", "issue", "complete")):
            self.fail(f"'{'to' if to else 'by'}' does not go with a {kind} step.")
        if bool(on) != (kind == "issue") or (names and kind not in ("run", "issue", "complete")):
            self.fail("an issue step, and no other, says 'on LANE'; only ops stand in ( ).")
        if after and (self.format == "1" or kind not in ("run", "issue")):
            self.fail("'after' goes with a run or an issue step, from plan format 2 on.")
        edges = []
        for text in after.split(" ") if after else ():
            if (edge := _EDGE.fullmatch(text)) is None:
                self.fail(f"{clip(text)} is no op, or op and range, to come after.")
            edges.append((edge[1], self.range(edge[2], edge[3])))
        made = tuple(names.split(" ")) if names else (name,)
        parts = self.range(start, stop)
        return Step(kind, lane, made, parts, to or on, by, after=tuple(edges))

    def range(self, start: str | None, stop: str | None) -> Range | None:
        if start is None:
            return None
        parts = (int(start), int(stop) if stop is not None else int(start) + 1)
        if parts[0] >= parts[1] or (stop is not None and parts[1] == parts[0] + 1):
            self.fail(f"the range [{start}:{stop}] is not one of several parts.")
        return parts

    def build(self, head: Mapping[str, list[Any]], steps: tuple[Step, ...]) -> Plan:
        for word in ("graph", "parts"):
            if len(head[word]) != 1:
                self.fail(f"a plan has exactly one {word!r} line; this one has {len(head[word])}.")
        if len(head["lane"]) > MAX_DEVICES:
            self.fail(f"a plan has at most {MAX_DEVICES} lanes.")
        (name, digest), cut = head["graph"][0], head["parts"][0]
        if head["kernel"] and self.format == "1":
            self.fail("'kernel' lines start with plan format 2.", "version")
        if cut.rule == "phases" and self.format == "1":
            self.fail("cuts at phases start with plan format 2.", "version")
        places, history = tuple(head["place"]), tuple(head["history"])
        lanes, buffers = tuple(map(self.lane, head["lane"])), tuple(head["buffer"])
        kernels = tuple(head["kernel"])
        return Plan(name, digest, cut, lanes, steps, buffers, places, history, kernels)

    def lane(self, lane: Lane) -> Lane:
        """The lane; in format 1, which has no `to`, a link's lane is known by its name."""
        if self.format != "1":
            return lane
        if lane.to is not None:
            self.fail(f"lane {lane.name!r} has 'to', which starts with plan format 2.", "version")
        source, _, target = lane.name.partition(".to.")
        is_link = source == lane.device and target and lane.uses == ("io",) and lane.via is None
        return replace(lane, to=target) if is_link else lane
