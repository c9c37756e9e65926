"""The command `torchweft explain`: trace files come in, where the time went goes out.

    torchweft explain rank0.json rank1.json.gz      of one step, a file a rank
    torchweft explain run.json --plan run.plan --graph graph.json

Files are traces that Weft saved or that a PyTorch profiler exported (`export_chrome_trace`), of any
device. Of several steps the median one is shown; `--step` takes another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from torchweft.errors import WeftError, unknown
from torchweft.plan.explain.explanation import Explanation, explain
from torchweft.plan.explain.timeline import Timeline, timeline_of
from torchweft.plan.explain.what_if import rebuilt
from torchweft.plan.plan import Plan
from torchweft_tools.cli.text import Json, answer
from torchweft_tools.formats.weft_files import load_graph, load_trace

Traces = Annotated[
    list[Path], typer.Argument(metavar="TRACE...", help="a trace for each rank: .json or .json.gz")
]
Rank = Annotated[list[int] | None, typer.Option("--rank", help="only this rank; may be repeated")]
StepNumber = Annotated[int | None, typer.Option("--step", help="the number of a ProfilerStep")]
PlanOf = Annotated[Path | None, typer.Option("--plan", help="the plan of our own trace")]
GraphOf = Annotated[Path | None, typer.Option("--graph", help="the graph of that plan")]


def explain_command(
    traces: Traces,
    rank: Rank = None,
    step: StepNumber = None,
    plan: PlanOf = None,
    graph: GraphOf = None,
    as_json: Json = False,
) -> None:
    """Say where the time of a step went: overlapped, exposed and idle, with an owner for each."""
    if (plan is None) != (graph is None):
        raise WeftError("explain: --plan and --graph go together.", rule="explain")
    bound = Plan.load(plan, load_graph(graph)) if plan is not None and graph is not None else None
    explanation = explain_files(traces, ranks=rank, step=step, plan=bound)
    answer(str(explanation).rstrip(), explanation.to_data(), as_json=as_json)


def explain_files(
    paths: Sequence[Path],
    *,
    ranks: Sequence[int] | None = None,
    step: int | None = None,
    plan: Plan | None = None,
) -> Explanation:
    """The explanation of trace files, one a rank. Raises `WeftError` if they do not fit."""
    by_rank: dict[int, Sequence[Timeline]] = {}
    for number, path in enumerate(paths):
        rank, steps = _steps_of(path, number, plan)
        if rank in by_rank:
            text = f"explain: {path} is of rank {rank}, as another file is. Give one file a rank."
            raise WeftError(text, rule="explain")
        by_rank[rank] = steps
    for rank in ranks or ():
        if rank not in by_rank:
            raise WeftError(f"explain: {unknown('rank', rank, map(str, by_rank))}", rule="explain")
    chosen = {rank: by_rank[rank] for rank in sorted(by_rank) if not ranks or rank in ranks}
    timelines, times = _one_step(chosen, step)
    model = rebuilt(timelines[0])
    planned, what_if = model.what_ifs() if model is not None else (None, ())
    notes = ["what-if: as if every op could be cut by rows, with one network for all flights"]
    if model is None:
        many = any(work.uses == "network" for work in timelines[0].works)
        notes = ["what-if: left out, for a step has too many flights"] if many else []
    return explain(
        timelines,
        num_parts=plan.num_parts if plan is not None else _parts_of(timelines),
        what_if=what_if,
        simulated_s=planned.makespan_s if planned is not None else None,
        steps=times,
        notes=notes,
    )


def _steps_of(path: Path, number: int, plan: Plan | None) -> tuple[int, Sequence[Timeline]]:
    from torchweft_tools.formats.kineto import read_trace_file  # msgspec: for this command only

    file = read_trace_file(path)
    rank = number if file.rank is None else file.rank
    if file.is_own:
        return rank, [timeline_of(load_trace(path), plan, rank=rank)]
    return rank, file.steps


def _one_step(
    by_rank: dict[int, Sequence[Timeline]], step: int | None
) -> tuple[list[Timeline], list[tuple[str, float]]]:
    """The step to look at, on all ranks: the one that is asked for, or the median."""
    if len(by_rank) == 1:
        common = [each.step for each in next(iter(by_rank.values()))]
    else:
        names = [{each.step for each in steps} for steps in by_rank.values()]
        first = next(iter(by_rank.values()))
        common = [each.step for each in first if all(each.step in other for other in names)]
    if not common:
        raise WeftError("explain: the ranks have no step in common.", rule="explain")
    same = {
        name: [next(s for s in steps if s.step == name) for steps in by_rank.values()]
        for name in common
    }
    times = [(name, fmean(each.step_s for each in same[name])) for name in common]
    name = sorted(times, key=lambda item: item[1])[(len(times) - 1) // 2][0]
    if step is not None:
        known = {each.rpartition("#")[2]: each for each in common}
        if str(step) not in known:
            raise WeftError(f"explain: {unknown('step', step, known)}", rule="explain")
        name, times = known[str(step)], []
    return same[name], times


def _parts_of(timelines: Sequence[Timeline]) -> int:
    """How many parts works of ours speak of; 1 for traces of others."""
    labels = {work.label for each in timelines for work in each.works}
    parts = [match[1] for label in labels if (match := re.search(r"\[(\d+)\]$", label))]
    return max((int(part) + 1 for part in parts), default=1)
