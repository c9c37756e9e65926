"""Schedule files as plans: a graph and a plan a rank, which are verified and simulated together.

    rank 0   compute  |F0|F1|  |B0|B1|        cells of compute, in the order of their line
             network     |send|send|recv|     messages, one after another as they stand in the line
             weights  |unshard|               what is done with weights, as it stands in the line

The graph says what must happen (every action once, each behind those that it starts from), whatever
the order of the file; the plan has the order of the file. A lane waits only for what stands before
in the line, as the runtime of torch does: what comes too early there is a race here. A message ends
when both ends have come to it, so ranks must send and receive in one order: torch has one stream
for the messages of a rank. A file without messages gets them where torch puts them: behind what
makes them, on both ranks at once. What the backward needs of a forward (`kept`) has one byte: bytes
alive are microbatches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from torchweft.errors import PlanError, unknown
from torchweft.plan.context import Context, Cut
from torchweft.plan.graph import Collective, Graph, Op, Value
from torchweft.plan.machine import Costs, CostTable, Device, Lane, Machine
from torchweft.plan.plan import Plan, Step
from torchweft.plan.simulator import simulate_ranks
from torchweft.plan.sizes import ONE
from torchweft.plan.trace import Trace
from torchweft.plan.verify import Finding, findings_ranks
from torchweft_tools.formats.read_schedule import (
    COMPUTE,
    MESSAGES,
    OVERLAP,
    WEIGHTS,
    PipelineSchedule,
    ScheduleCell,
    StageAction,
)

MACHINE = Machine(
    "stage",
    (Device("cpu", overhead_s=0.0, network_latency_s=0.0, capacity=3.0),),
    (
        Lane("compute", uses=("compute", "memory")),
        Lane("network", uses=("network",)),
        Lane("weights", uses=("network",)),
    ),
)
KINDS = (*COMPUTE, *MESSAGES, *WEIGHTS, OVERLAP)
DEFAULT_S: Mapping[str, float] = dict.fromkeys(KINDS, 0.0) | {
    "F": 1e-3, "B": 2e-3, "I": 1e-3, "W": 1e-3
}  # fmt: skip


@dataclass(frozen=True)
class SchedulePlans:
    """The plans of all ranks, and (by rank and step) the cell that each step is from."""

    schedule: PipelineSchedule
    plans: tuple[Plan, ...]
    cells: tuple[tuple[ScheduleCell, ...], ...]

    @cached_property
    def findings(self) -> list[tuple[Finding, str]]:
        """Every broken rule over all ranks, with the cell that it shows at."""
        return [(item, self.where(item)) for item in findings_ranks(self.plans)]

    def where(self, item: Finding) -> str:
        """The cell of a finding: `rank 0 (line 1), cell 3 (0F2)`."""
        if item.step is None:
            return f"rank {item.rank} (line {item.rank + 1})"
        cell = self.cells[item.rank][item.step]
        return f"{cell.where} ({cell})"

    def verify(self) -> None:
        """Raise `PlanError` for the first broken rule."""
        if self.findings:
            item, where = self.findings[0]
            raise PlanError(told(item, where), rule=item.rule, step=item.step)

    def simulate(self, seconds: Mapping[str, float], *, contention: bool = True) -> list[Trace]:
        """The traces of all ranks. seconds: by kind (`F`), or by stage and kind (`2F`)."""
        table = {}
        for op in (op for plan in self.plans for op in plan.graph.ops):
            kind = op.body.lstrip("0123456789")
            table[op.body, "cpu"] = {0: seconds.get(op.body, seconds.get(kind, DEFAULT_S[kind]))}
        if OVERLAP in seconds:
            table[OVERLAP, "cpu"] = {0: seconds[OVERLAP]}
        costs = Costs(MACHINE, CostTable.of(table))
        return simulate_ranks(self.plans, Context(1), MACHINE, costs, contention=contention)


def told(item: Finding, where: str) -> str:
    """A finding as people read it: rule, cell, what is wrong, cure."""
    cure = item.cure or "Every message has a send on one rank and a receive on the other."
    return f"{item.rule}: {where}: {item.message}\n  {cure}"


def schedule_plans(schedule: PipelineSchedule) -> SchedulePlans:
    """The plans of a schedule. Raises `PlanError` (rule deadlock) if no messages can be added."""
    rows = schedule.rows if schedule.has_messages else _with_messages(schedule)
    made = [_Rank(schedule, rank, row) for rank, row in enumerate(rows)]
    return SchedulePlans(
        schedule, tuple(rank.plan() for rank in made), tuple(tuple(rank.cells) for rank in made)
    )


def read_seconds(words: Iterable[str], num_stages: int) -> dict[str, float]:
    """`["F=0.001", "2F=0.002"]` as {"F": 0.001, "2F": 0.002}. Raises `PlanError` for others."""
    seconds: dict[str, float] = {}
    for word in words:
        match = re.fullmatch(r"([0-9]{0,5})([A-Z_]+)=([0-9]+\.?[0-9]*(?:e-?[0-9]+)?)", word)
        if match is None:
            cure = "Write KIND=SECONDS or STAGE KIND=SECONDS: F=0.001, 2F=0.002."
            raise PlanError(f"cost: {word[:40]!r} is no cost.\n  {cure}", rule="cost")
        stage, kind, number = match.groups()
        if kind not in KINDS:
            raise PlanError(f"cost: {unknown('kind of action', kind, KINDS)}", rule="cost")
        if stage and (int(stage) >= num_stages or kind == OVERLAP):
            text = f"cost: {word[:40]!r}: stages are 0 to {num_stages - 1}; {OVERLAP} has no stage."
            raise PlanError(text, rule="cost")
        seconds[stage + kind] = float(number)
    return seconds


def _with_messages(schedule: PipelineSchedule) -> list[tuple[ScheduleCell, ...]]:
    """The rows with their messages: each send behind what makes it, its receive on the other rank
    at the same time, so that all ranks say theirs in one order."""
    rows: list[list[ScheduleCell]] = [[] for _ in schedule.rows]
    at, done = [0] * len(rows), set[StageAction]()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            if at[rank] == len(row) or _absent(schedule, row[at[rank]], done):
                continue
            cell, moved = row[at[rank]], True
            at[rank] += 1
            rows[rank].append(cell)
            done.update(cell.actions)
            made = [action for action in cell.actions if action.kind in COMPUTE]
            for pair in filter(None, map(schedule.message, made)):
                for action in pair:
                    home = schedule.rank_of[action.stage]
                    rows[home].append(ScheduleCell(home, 0, (action,)))
    lines = []
    for rank, row in enumerate(schedule.rows):
        if at[rank] < len(row):
            cell = row[at[rank]]
            missing = _absent(schedule, cell, done)
            lines.append(f"  {cell.where} ({cell}) needs {', '.join(map(str, missing))} first")
    if lines:
        cure = "  Let every action stand behind those that it starts from, over all lines."
        text = "\n".join(["deadlock: no rank can go on.", *lines, cure])
        raise PlanError(text, rule="deadlock")
    return [tuple(row) for row in rows]


def _absent(
    schedule: PipelineSchedule, cell: ScheduleCell, done: set[StageAction]
) -> list[StageAction]:
    """What a cell starts from, on any rank, and is not done yet."""
    needed = []
    for action in cell.actions:
        if action.kind in COMPUTE and action.kind != "F":
            first = "I" if action.kind == "W" else "F"
            needed.append(action._replace(kind=first))
        if action.kind in COMPUTE and (source := schedule.source(action)) is not None:
            needed.append(source)
    return [action for action in needed if action not in done]


class _Rank:
    """One rank: its graph from what must happen, its steps from its row."""

    def __init__(
        self, schedule: PipelineSchedule, rank: int, row: tuple[ScheduleCell, ...]
    ) -> None:
        self.schedule, self.rank, self.row = schedule, rank, row
        self.stages = sorted(s for s, home in schedule.rank_of.items() if home == rank)
        self.values: dict[str, Value] = {}
        self.ops: dict[str, Op] = {}
        self.steps: list[Step] = []
        self.cells: list[ScheduleCell] = []
        self.weights: dict[StageAction, str] = {}  # of each compute action whose stage is sharded
        self.names: list[list[str]] = []  # by cell, the ops of its actions
        self._number()

    def _number(self) -> None:
        """Names for all cells: an unshard has a number, and serves what stands behind it."""
        count: dict[tuple[int, str], int] = {}
        sharded = {a.stage for cell in self.row for a in cell.actions if a.kind == "UNSHARD"}
        for cell in self.row:
            names = []
            for action in cell.actions:
                stage, kind, microbatch = action
                if kind in ("UNSHARD", "RESHARD"):
                    microbatch = count.get((stage, kind), 0)
                    count[stage, kind] = microbatch + 1
                    if microbatch >= count.get((stage, "UNSHARD"), 0):
                        text = f"schedule: {cell.where}: {cell}: its weights are not unsharded."
                        cure = "Put an UNSHARD of the stage before it, or drop it."
                        raise PlanError(f"{text}\n  {cure}", rule="schedule")
                elif kind in COMPUTE and stage in sharded:
                    last = max(0, count.get((stage, "UNSHARD"), 0) - 1)
                    self.weights[action] = f"stage{stage}.weights{last}"
                names.append(f"stage{stage}.{kind}{'' if microbatch is None else microbatch}")
            self.names.append(names)

    def plan(self) -> Plan:
        """The plan of this rank, bound to its graph."""
        graph = self._graph()
        self._walk(graph)
        name, used = f"rank{self.rank}", {step.lane for step in self.steps}
        lanes = tuple(lane for lane in MACHINE.lanes if lane.name in used)
        history = (f"read {self.schedule.name}",)
        return Plan(
            name, graph.digest, Cut(), lanes, tuple(self.steps), history=history, bound=graph
        )

    # The graph: what must happen, in an order that is right whatever the file says.

    def _graph(self) -> Graph:
        present = [action for cell in self.row for action in cell.actions]
        names = [name for cell in self.names for name in cell]
        numbered = list(zip(present, names, strict=True))
        for action, name in numbered:
            if action.kind == "UNSHARD":
                self._add(action, name, (), (name.replace("UNSHARD", "weights"),))
        microbatches = range(self.schedule.num_microbatches)
        for microbatch in microbatches:
            for stage in self.stages:
                self._compute(StageAction(stage, "F", microbatch))
        for microbatch in microbatches if self.schedule.trains else ():
            for stage in reversed(self.stages):
                self._compute(self.schedule.backward(stage, microbatch))
                if self.schedule.split_backward(stage, microbatch):
                    self._compute(StageAction(stage, "W", microbatch))
        every = any(a.kind == "REDUCE_GRAD" for a in self.schedule.cell_of)
        for stage in self.stages if every else ():
            grads = tuple(name for name in self.values if name.startswith(f"stage{stage}.grads"))
            self._add(StageAction(stage, "REDUCE_GRAD"), f"stage{stage}.REDUCE_GRAD", grads, ())
        for action, name in numbered:
            if action.kind == "RESHARD":
                weights = name.replace("RESHARD", "weights")
                known = (weights,) if weights in self.values else ()
                self._add(action, name, known, (), mutates=known)
        return Graph(
            f"rank{self.rank}", tuple(self.values.values()), tuple(self.ops.values()), (), ()
        )

    def _add(
        self,
        action: StageAction,
        name: str,
        reads: Iterable[str],
        makes: Iterable[str],
        **more: object,
    ) -> None:
        for made in makes:
            kept = ".kept" in made
            self.values[made] = Value(made, (ONE,) if kept else (), "uint8" if kept else "opaque")
        uses = "compute" if action.kind in COMPUTE else "network"
        op = Op(name, tuple(reads), tuple(makes), uses=uses, rows="batch-free")
        body = f"{action.stage}{action.kind}"
        self.ops[name] = replace(op, body=body, **more)  # type: ignore[arg-type]

    def _compute(self, action: StageAction) -> None:
        """A compute op, with the receive ahead of it and the send behind it."""
        stage, kind, part = action
        here = f"stage{stage}."
        reads, source = list[str](), self.schedule.source(action)
        result = f"{here}{'out' if kind == 'F' else 'grad'}{part}"
        if source is not None:
            name = f"stage{source.stage}.{'out' if kind == 'F' else 'grad'}{part}"
            if (pair := self.schedule.message(source)) is not None:
                name = f"{here}{'in' if kind == 'F' else 'gradin'}{part}"
                self._talk(pair[1], (), (name,))
            reads.append(name)
        if kind != "F":
            reads.append(f"{here}kept{part}")
        if kind == "W":
            reads.append(f"{here}half{part}")
        reads += [self.weights[action]] if self.weights.get(action, "") in self.values else []
        made = {
            "F": [result] + ([f"{here}kept{part}"] if self.schedule.trains else []),
            "B": [result, f"{here}grads{part}"],
            "I": [result, f"{here}half{part}"],
            "W": [f"{here}grads{part}"],
        }[kind]
        self._add(action, f"{here}{kind}{part}", reads, made)
        if (pair := self.schedule.message(action)) is not None:
            self._talk(pair[0], (result,), ())

    def _talk(self, action: StageAction, reads: Iterable[str], makes: Iterable[str]) -> None:
        up = action.kind in ("SEND_F", "RECV_B")
        peer_stage = action.stage + (1 if up else -1)
        peer = self.schedule.rank_of[peer_stage]
        start = action.stage if action.kind.startswith("SEND") else peer_stage
        tag = f"{action.kind[-1]}{action.microbatch}.of{start}"
        talk = Collective(action.kind[:4].lower(), "pipeline", peer, tag)
        name = f"stage{action.stage}.{action.kind}{action.microbatch}"
        self._add(action, name, reads, makes, collective=talk)

    # The steps: the row, each lane in its order, waits for what stands before.

    def _walk(self, graph: Graph) -> None:
        lane_of: dict[str, str] = {}
        waited: set[tuple[str, str]] = set()
        last: dict[str, str] = {}  # the last cell that reads what a forward has kept
        for names in self.names:
            for name in names:
                reads = graph.op[name].reads if name in graph.op else ()
                last |= {value: name for value in reads if ".kept" in value}
        for cell, names in zip(self.row, self.names, strict=True):
            kind = cell.actions[0].kind
            lane = "compute" if kind in COMPUTE else "network" if kind in MESSAGES else "weights"
            by = OVERLAP if len(names) > 1 else None
            step = Step("run", lane, tuple(names), by=by)
            for name in names:
                for behind in self._behind(graph, name):
                    target = lane_of.get(behind)
                    if target is not None and target.partition(" ")[0] != lane:
                        wait = Step("wait", lane, target=target.partition(" ")[2])
                        if (lane, wait.label) not in waited:
                            self._put(wait, cell)
                            waited.add((lane, wait.label))
            self._put(step, cell)
            lane_of |= dict.fromkeys(names, f"{lane} {step.label}")
            for value in [value for value, name in last.items() if name in names]:
                maker = graph.maker[value].name
                if maker in lane_of and lane == "compute":
                    self._put(Step("free", lane, (value,)), cell)

    def _behind(self, graph: Graph, name: str) -> list[str]:
        """The ops that an op comes behind: who makes what it reads; who reads what it drops."""
        op = graph.op.get(name)
        if op is None:
            return []
        makers = [graph.maker[value].name for value in op.reads]
        readers = [other.name for value in op.mutates for other in graph.readers[value]]
        return makers + [reader for reader in readers if reader != name]

    def _put(self, step: Step, cell: ScheduleCell) -> None:
        self.steps.append(step)
        self.cells.append(cell)


def bubble_shares(traces: Iterable[Trace]) -> list[float]:
    """The share of the whole time in which each rank computes nothing."""
    known = list(traces)
    whole_s = max((trace.makespan_s for trace in known), default=0.0)
    return [1 - trace.busy_s("compute") / whole_s if whole_s else 0.0 for trace in known]
