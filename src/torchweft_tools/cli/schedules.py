"""Schedule files on the command line: `verify` and `simulate` hand `.csv` files on to here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from torchweft.plan.trace import Trace, format_s, together
from torchweft_tools.cli.text import answer
from torchweft_tools.formats.read_schedule import PipelineSchedule, load_schedule
from torchweft_tools.formats.schedule_plans import (
    bubble_shares,
    read_seconds,
    schedule_plans,
    told,
)

SUFFIX = ".csv"


def verify_schedule(path: Path, *, as_json: bool) -> None:
    """Say whether all ranks of a schedule file are safe together; exit code 1 if not."""
    schedule = load_schedule(path)
    made = schedule_plans(schedule)
    shown = [f"{told(item, where)}\n" for item, where in made.findings]
    verdict = f"unsafe: {len(shown)} found" if shown else "safe"
    data = {
        "safe": not shown,
        **_facts(schedule),
        "findings": [
            {"rule": item.rule, "rank": item.rank, "where": where, "message": item.message}
            for item, where in made.findings
        ],
    }
    answer("\n".join([*shown, f"{_summary(schedule)}: {verdict}"]), data, as_json=as_json)
    raise typer.Exit(1 if shown else 0)


def simulate_schedule(
    path: Path,
    words: Sequence[str],
    *,
    contention: bool,
    trace: Path | None,
    width: int,
    as_json: bool,
) -> None:
    """Run all ranks of a schedule file on one virtual clock."""
    schedule = load_schedule(path)
    seconds = read_seconds(words, len(schedule.rank_of))
    made = schedule_plans(schedule)
    made.verify()
    ranks = made.simulate(seconds, contention=contention)
    whole = together(ranks, schedule.name)
    if trace is not None:
        whole.save(trace)
    shares, kept = bubble_shares(ranks), [each.peak_bytes for each in ranks]
    facts = {"makespan_s": whole.makespan_s, "critical_path_s": whole.critical_path_s}
    data = {"simulated": True, **_facts(schedule), **facts, "bubbles": shares, "kept": kept}
    lines = [_row(rank, *row) for rank, row in enumerate(zip(ranks, shares, kept, strict=True))]
    drawn = [line for line in whole.to_text(width).splitlines() if "hidden" not in line]
    answer("\n".join([*drawn, *lines]), data, as_json=as_json)  # one rank's work hides no other's


def _row(rank: int, trace: Trace, share: float, kept: int) -> str:
    busy = f"computes {format_s(trace.busy_s('compute'))}, idle {share:.1%}"
    return f"rank {rank}: {busy}, keeps at most {kept} microbatches for the backward"


def _facts(schedule: PipelineSchedule) -> dict[str, object]:
    facts = {"name": schedule.name, "num_ranks": len(schedule.rows)}
    stages, messages = len(schedule.rank_of), schedule.has_messages
    parts = schedule.num_microbatches
    return {**facts, "num_stages": stages, "num_microbatches": parts, "has_messages": messages}


def _summary(schedule: PipelineSchedule) -> str:
    messages = "with its messages" if schedule.has_messages else "messages added"
    return (
        f"schedule of {len(schedule.rows)} ranks, {len(schedule.rank_of)} stages, "
        f"{schedule.num_microbatches} microbatches, {messages}"
    )
