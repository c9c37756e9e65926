"""Schedule files of `torch.distributed.pipelining`: those that torch writes, and broken ones."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchweft.errors import PlanError
from torchweft_tools.formats.read_schedule import MESSAGES, PipelineSchedule, read_schedule
from torchweft_tools.formats.schedule_plans import (
    SchedulePlans,
    bubble_shares,
    schedule_plans,
)

SINGLE = (schedules.ScheduleGPipe, schedules.Schedule1F1B)
LOOPED = (
    schedules.ScheduleLoopedBFS,
    schedules.ScheduleInterleaved1F1B,
    schedules.ScheduleInterleavedZeroBubble,
)
V_SHAPED = (schedules.ScheduleZBVZeroBubble, schedules.ScheduleDualPipeV)
MULTI = (*LOOPED, *V_SHAPED)


@pytest.fixture(params=[2, 4], ids=lambda count: f"{count} ranks")
def num_ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group of so many ranks that only this one is in: torch needs one to build schedules."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def built(kind: type, num_ranks: int, num_microbatches: int):
    """A schedule of torch over real stages, as rank 0 builds it: it knows the rows of all."""
    total = num_ranks if kind in SINGLE else 2 * num_ranks
    mine = {SINGLE: [0], LOOPED: [0, num_ranks], V_SHAPED: [0, total - 1]}
    indices = next(own for kinds, own in mine.items() if kind in kinds)
    module, cpu = torch.nn.Linear(2, 2), torch.device("cpu")
    stages = [PipelineStage(module, index, total, cpu) for index in indices]
    given = stages[0] if kind in SINGLE else stages
    return kind(given, num_microbatches, loss_fn=torch.nn.functional.mse_loss)


def dumped(kind: type, num_ranks: int, num_microbatches: int, path, form: str) -> str:
    """The file that torch writes; single-stage schedules have no dump: their rows, the same way."""
    schedule = built(kind, num_ranks, num_microbatches)
    if kind in SINGLE:
        text = io.StringIO()
        csv.writer(text).writerows(schedule._get_pipeline_order().values())
        return text.getvalue()
    if form == "compute_comms":
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    schedule._dump_csv(path / "schedule.csv", format=form)
    return (path / "schedule.csv").read_text()


def planned(text: str) -> SchedulePlans:
    return schedule_plans(read_schedule(text))


def messages(schedule: PipelineSchedule, made: SchedulePlans) -> set[tuple[int, str]]:
    steps = ((rank, step) for rank, plan in enumerate(made.plans) for step in plan.steps)
    known = [(rank, s.names[0]) for rank, s in steps if s.kind == "run" and s.lane == "network"]
    assert len(set(known)) == len(known)
    return set(known)


@pytest.mark.parametrize("kind", [schedules.ScheduleGPipe, *MULTI], ids=lambda k: k.__name__)
@pytest.mark.parametrize("rounds", [1, 2])
def test_every_schedule_of_torch_is_safe(kind, num_ranks, rounds, tmp_path) -> None:
    count = 2 * rounds * num_ranks
    known = {}
    for form in ("compute_only", "compute_comms"):
        text = dumped(kind, num_ranks, count, tmp_path, form)
        schedule = read_schedule(text)
        made = schedule_plans(schedule)
        assert made.findings == []
        assert schedule.num_microbatches == count
        assert schedule.has_messages == (form == "compute_comms" and kind not in SINGLE)
        traces = made.simulate({})
        # Every stage has work of 1 + 2 ms a microbatch, and no rank can end before its own is done.
        stages = len(schedule.rank_of) // num_ranks
        for trace, share in zip(traces, bubble_shares(traces), strict=True):
            assert trace.busy_s("compute") == pytest.approx(3e-3 * stages * count)
            assert 0 <= share < 0.5
        known[form] = messages(schedule, made)
    if kind not in SINGLE:  # the messages that we add are those that torch adds
        assert known["compute_only"] == known["compute_comms"]


def test_gpipe_and_1f1b_take_the_time_that_their_formula_says(num_ranks) -> None:
    count = 6
    forward = [[f"{rank}F{m}" for m in range(count)] for rank in range(num_ranks)]
    gpipe = "\n".join(
        ",".join([*row, *(f"{rank}B{m}" for m in range(count))]) for rank, row in enumerate(forward)
    )
    rows = []
    for rank in range(num_ranks):  # warm up, then one forward and one backward in turn, then drain
        warm = min(count, num_ranks - 1 - rank)
        turns = [text for m in range(count - warm) for text in (f"F{m + warm}", f"B{m}")]
        drain = [f"B{m}" for m in range(count - warm, count)]
        row = [f"F{m}" for m in range(warm)] + turns + drain
        rows.append(",".join(f"{rank}{text}" for text in row))
    for text, kept in ((gpipe, [count] * num_ranks), ("\n".join(rows), [*range(num_ranks, 0, -1)])):
        traces = planned(text).simulate({"F": 1.0, "B": 2.0})
        whole_s = max(trace.makespan_s for trace in traces)
        assert whole_s == pytest.approx((count + num_ranks - 1) * 3.0)
        assert [trace.peak_bytes for trace in traces] == kept  # forwards kept for the backward


def test_rows_that_torch_prints_of_1f1b_are_not_what_it_runs(num_ranks, tmp_path) -> None:
    """Its last rank starts with microbatch 1 and ends with one that does not exist (torch 2.13)."""
    text = dumped(schedules.Schedule1F1B, num_ranks, 8, tmp_path, "compute_only")
    with pytest.raises(PlanError, match="0F8 stands nowhere"):
        read_schedule(text)


def cells_of(text: str) -> list[list[str]]:
    return [[cell for cell in row if cell] for row in csv.reader(io.StringIO(text))]


def joined(rows: list[list[str]]) -> str:
    return "\n".join(map(",".join, rows))


def is_refused(rows: list[list[str]]) -> bool:
    """Whether a schedule is found to be broken, with the rank named."""
    try:
        made = planned(joined(rows))
    except PlanError as error:
        assert "rank " in str(error) or "microbatch" in str(error)
        return True
    assert all("rank" in where for _, where in made.findings)
    return bool(made.findings)


@pytest.mark.parametrize("kind", MULTI, ids=lambda kind: kind.__name__)
def test_every_dropped_or_doubled_action_is_found(kind, tmp_path) -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        rows = cells_of(dumped(kind, 2, 4, tmp_path, "compute_comms"))
    finally:
        dist.destroy_process_group()
    assert not is_refused(rows)
    for rank, row in enumerate(rows):
        for at, cell in enumerate(row):
            fewer = [*rows[:rank], row[:at] + row[at + 1 :], *rows[rank + 1 :]]
            twice = [*rows[:rank], [*row[:at], cell, *row[at:]], *rows[rank + 1 :]]
            if "SHARD" in cell:
                # A stage whose weights are never dropped is safe, or one that has no shards.
                assert is_refused(fewer) == ("UNSHARD" in cell), cell
            else:
                assert is_refused(fewer), cell
                assert is_refused(twice), cell


@pytest.mark.parametrize("kind", MULTI, ids=lambda kind: kind.__name__)
def test_swapped_messages_and_results_before_their_cause_are_found(kind, tmp_path) -> None:
    """Two ranks: each message is to the same peer, so no two of a rank may change places."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        rows = cells_of(dumped(kind, 2, 4, tmp_path, "compute_comms"))
    finally:
        dist.destroy_process_group()
    count = 0
    for rank, row in enumerate(rows):
        said = [at for at, cell in enumerate(row) if any(kind in cell for kind in MESSAGES)]
        for first, second in itertools.pairwise(said):
            swapped = list(row)
            swapped[first], swapped[second] = row[second], row[first]
            assert is_refused([*rows[:rank], swapped, *rows[rank + 1 :]]), (row[first], row[second])
            count += 1
        for at, cell in enumerate(row):
            if "SEND" in cell:  # ahead of what makes it
                early = [cell, *row[:at], *row[at + 1 :]]
                assert is_refused([*rows[:rank], early, *rows[rank + 1 :]]), cell
    assert count > 20
