"""The `PipelineSchedule`: a schedule file of `torch.distributed.pipelining`, as data.

    0F0,0F1,,0B0,0B1              a line a rank; a cell an action, run in this order; empty: nothing
    ,1F0,1B0,1F1,1B1

    2F0        stage 2, forward of microbatch 0       B backward; I of the input, W of the weights
    2SEND_F0   what 2F0 made goes to stage 3; 3RECV_F0 takes it; SEND_B and RECV_B: gradients, down
    2UNSHARD   weights are gathered; RESHARD drops them; REDUCE_GRAD reduces gradients
    (0F3;3B1)OVERLAP_F_B          one forward and one backward, run as one

A file has all messages or none (`compute_only`). Mistakes are told with rank, line and cell.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn

from torchweft.errors import PlanError, clip
from torchweft.files import check_length, read_text

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
WEIGHTS = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
OVERLAP = "OVERLAP_F_B"
MAX_RANKS, MAX_CELLS = 1024, 20_000
_ACTION = re.compile(
    rf"([0-9]{{1,5}})(?:({'|'.join(MESSAGES + COMPUTE)})([0-9]{{1,5}})|({'|'.join(WEIGHTS)}))"
)


class StageAction(NamedTuple):
    """What a stage does with a microbatch, or (None) with its weights."""

    stage: int
    kind: str
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


class ScheduleCell(NamedTuple):
    """A cell of the file: its place (the column counts from 1; 0: not in the file), its actions."""

    rank: int
    column: int
    actions: tuple[StageAction, ...]

    def __str__(self) -> str:
        text = ";".join(map(str, self.actions))
        return f"({text}){OVERLAP}" if len(self.actions) > 1 else text

    @property
    def where(self) -> str:
        """Where it stands, for people: `rank 0 (line 1), cell 3`."""
        cell = f"cell {self.column}" if self.column else "a message that the file leaves out"
        return f"rank {self.rank} (line {self.rank + 1}), {cell}"


@dataclass(frozen=True)
class PipelineSchedule:
    """The rows of all ranks, without empty cells; `_check` has found all of compute in them."""

    name: str
    rows: tuple[tuple[ScheduleCell, ...], ...]

    @cached_property
    def cell_of(self) -> dict[StageAction, ScheduleCell]:
        """Where an action of compute or a message stands."""
        return {action: cell for row in self.rows for cell in row for action in cell.actions}

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        computes = (item for item in self.cell_of.items() if item[0].kind in COMPUTE)
        return {action.stage: cell.rank for action, cell in computes}

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches go through."""
        return 1 + max(action.microbatch or 0 for action in self.cell_of)

    @cached_property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return any(action.kind in "BIW" for action in self.cell_of)

    @cached_property
    def has_messages(self) -> bool:
        """Whether the file has its messages."""
        return any(action.kind in MESSAGES for action in self.cell_of)

    def split_backward(self, stage: int, microbatch: int) -> bool:
        """Whether a backward is made in two: of the input, and of the weights."""
        return StageAction(stage, "I", microbatch) in self.cell_of

    def backward(self, stage: int, microbatch: int) -> StageAction:
        """The action that makes a stage's gradient of its input."""
        return StageAction(
            stage, "I" if self.split_backward(stage, microbatch) else "B", microbatch
        )

    def message(self, made: StageAction) -> tuple[StageAction, StageAction] | None:
        """The send and the receive behind a compute action, if another rank needs what it makes."""
        if made.kind == "W":
            return None
        suffix, to = ("F", made.stage + 1) if made.kind == "F" else ("B", made.stage - 1)
        if to not in self.rank_of or self.rank_of[to] == self.rank_of[made.stage]:
            return None
        send = StageAction(made.stage, f"SEND_{suffix}", made.microbatch)
        return send, StageAction(to, f"RECV_{suffix}", made.microbatch)

    def source(self, action: StageAction) -> StageAction | None:
        """The compute action of the stage before, whose result this one starts from."""
        stage, kind, microbatch = action
        before = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or microbatch is None or before not in self.rank_of:
            return None
        return (
            StageAction(before, "F", microbatch)
            if kind == "F"
            else self.backward(before, microbatch)
        )


def load_schedule(path: str | Path) -> PipelineSchedule:
    """Read a schedule file. Raises `PlanError` for a file that is none."""
    return read_schedule(read_text(path, PlanError, "schedule"), Path(path).stem)


def read_schedule(text: str, name: str = "schedule") -> PipelineSchedule:
    """A schedule from its text. Raises `PlanError` naming rank, cell and cure."""
    check_length(text, PlanError, "a schedule")
    rows: list[tuple[ScheduleCell, ...]] = []
    try:
        lines = [line for line in csv.reader(text.splitlines(), strict=True) if line]
    except csv.Error as cause:
        _fail(f"the file is not CSV: {cause}.", "Write a line a rank, with commas between cells.")
    total = sum(map(len, lines))
    if len(lines) > MAX_RANKS or total > MAX_CELLS:
        limit = f"at most {MAX_RANKS} ranks and {MAX_CELLS} cells"
        _fail(f"{len(lines)} ranks with {total} cells.", f"A schedule has {limit}.")
    for rank, line in enumerate(lines):
        filled = ((column, cell.strip()) for column, cell in enumerate(line, 1) if cell.strip())
        rows.append(tuple(_cell(rank, column, cell) for column, cell in filled))
    if not any(rows):
        _fail("the file has no action.", "Write a line a rank, with cells such as 0F0.")
    schedule = PipelineSchedule(re.sub(r"\W", "_", f"p_{name}")[:60], tuple(rows))
    _check(schedule)
    return schedule


def _cell(rank: int, column: int, text: str) -> ScheduleCell:
    here = ScheduleCell(rank, column, ())
    inside = re.fullmatch(rf"\(([^()]*)\){OVERLAP}", text)
    actions = tuple(
        _action(part.strip(), here) for part in (inside[1] if inside else text).split(";")
    )
    if inside and [action.kind for action in actions] != ["F", "B"]:
        cure = f"Write it like (0F3;3B1){OVERLAP}."
        _fail(f"{clip(text)} is not a forward beside a backward.", cure, here)
    if len(actions) > 1 and not inside:
        _fail(f"{clip(text)} has several actions.", f"One a cell, or (0F3;3B1){OVERLAP}.", here)
    return here._replace(actions=actions)


def _action(text: str, here: ScheduleCell) -> StageAction:
    match = _ACTION.fullmatch(text)
    if match is None:
        known = ", ".join((*COMPUTE, *MESSAGES, *WEIGHTS))
        cure = f"An action is STAGE, then {known}, then the microbatch: 0F0, 1SEND_F0, 2UNSHARD."
        _fail(f"{clip(text)} is no action.", cure, here)
    stage, kind, microbatch, weights = match.groups()
    return StageAction(int(stage), kind or weights, None if microbatch is None else int(microbatch))


def _check(schedule: PipelineSchedule) -> None:
    """Every action of compute once, each stage on one rank, messages where there is a way."""
    seen: dict[StageAction, ScheduleCell] = {}
    home: dict[int, ScheduleCell] = {}
    for cell in (cell for row in schedule.rows for cell in row):
        for action in cell.actions:
            if action.microbatch is not None and action in seen:
                text = f"{action} stands twice: first at {seen[action].where}."
                _fail(text, "Drop one of the two.", cell)
            seen[action] = cell
            if action.kind not in COMPUTE:
                continue
            other = home.setdefault(action.stage, cell)
            if other.rank != cell.rank:
                text = f"{action}: stage {action.stage} computes here and at {other.where}."
                _fail(text, "A stage is on one rank.", cell)
    stages, microbatches = range(len(home)), range(schedule.num_microbatches)
    if sorted(home) != list(stages):
        gap = next(stage for stage in stages if stage not in home)
        _fail(f"stage {gap} computes nothing.", "Stages are numbered from 0 on, without gaps.")
    if len(microbatches) * len(stages) > 2 * MAX_CELLS:
        _fail(f"there is a microbatch {microbatches[-1]}.", "Number them from 0 on, without gaps.")
    for missing in _missing(schedule, seen, stages, microbatches):
        rank = home[missing.stage].rank
        cure = "Every stage computes every microbatch, numbered from 0 on, once each way."
        _fail(f"{missing} stands nowhere.", cure, ScheduleCell(rank, 0, ()), of_rank=True)
    for action, cell in seen.items():
        _check_place(schedule, action, cell, home)


def _missing(
    schedule: PipelineSchedule, seen: dict[StageAction, ScheduleCell], stages: range, parts: range
) -> Iterator[StageAction]:
    for stage in stages:
        for microbatch in parts:
            kinds = ["F"]
            if schedule.trains:
                split = schedule.split_backward(stage, microbatch)
                whole = StageAction(stage, "B", microbatch)
                half = StageAction(stage, "W", microbatch)
                if whole in seen and (split or half in seen):
                    other = StageAction(stage, "I", microbatch) if split else half
                    _fail(f"{other} does a part of what {whole} does.", "Drop one.", seen[other])
                kinds += ["I", "W"] if split or half in seen else ["B"]
            wanted = (StageAction(stage, kind, microbatch) for kind in kinds)
            yield from (action for action in wanted if action not in seen)


def _check_place(
    schedule: PipelineSchedule,
    action: StageAction,
    cell: ScheduleCell,
    home: dict[int, ScheduleCell],
) -> None:
    """What is not compute: on the rank of its stage, and a message only between two ranks."""
    if action.stage not in home:
        _fail(f"{action}: stage {action.stage} computes nothing.", "Name a stage.", cell)
    if home[action.stage].rank != cell.rank:
        text = f"{action}: stage {action.stage} is on rank {home[action.stage].rank}."
        _fail(text, "Move it to the line of that rank.", cell)
    if action.kind in MESSAGES:
        made = StageAction(action.stage, "F" if action.kind == "SEND_F" else "B", action.microbatch)
        if action.kind == "RECV_F":
            made = made._replace(stage=action.stage - 1, kind="F")
        elif action.kind == "RECV_B":
            made = made._replace(stage=action.stage + 1)
        pair = schedule.message(made) if made.stage in home else None
        if pair is None or action not in pair:
            text = f"{action}: no other rank has to do with that."
            _fail(text, "Drop it: both stages are on this rank, or there is no such stage.", cell)
    if action.kind in ("SEND_B", "RECV_B", "REDUCE_GRAD") and not schedule.trains:
        _fail(f"{action}: the schedule has no backward.", "Drop it.", cell)


def _fail(
    text: str, cure: str, cell: ScheduleCell | None = None, *, of_rank: bool = False
) -> NoReturn:
    where = "" if cell is None else f"{cell.where}: "
    if of_rank and cell is not None:
        where = f"rank {cell.rank} (line {cell.rank + 1}): "
    raise PlanError(f"schedule: {where}{text}\n  {cure}", rule="schedule")
