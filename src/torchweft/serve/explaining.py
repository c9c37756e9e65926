"""An explained call: a compiled model is called and traced, and its plan is simulated beside it.

    session, one call --explain_call--> Explanation        planned against actual, on one axis

Each rank explains itself: no rank talks with another for it. The planned trace is the plan in force
on a virtual clock, every op at the cost that this call has shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from torch.distributed import get_rank, is_initialized

from torchweft.errors import WeftError
from torchweft.plan.explain.explanation import Explanation, explain
from torchweft.plan.explain.timeline import timeline_of
from torchweft.plan.explain.what_if import WhatIf, seen_costs, what_ifs
from torchweft.plan.trace import Trace, side_by_side
from torchweft.plan.write.strategy import option_defaults
from torchweft.serve.book.entry import PlanEntry
from torchweft.serve.session import Session


def explain_call(
    session: Session, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Explanation:
    """Call a model twice, the second time traced. Raises `WeftError` if no graph of ours ran."""
    with nullcontext() if session.auto is None else session.auto.by_plans():
        model(*args, **kwargs)
        with session.service.collect() as traces:
            model(*args, **kwargs)
    if not traces:
        raise WeftError("explain: no captured graph ran in this call.", rule="explain")
    trace = max(traces, key=lambda each: each.makespan_s)
    entries = [entry for piece in session.pieces for entry in piece.plans.all_entries()]
    entry = next((entry for entry in entries if entry.trace is trace), None)
    notes = [f"fallback {count} x: {why}" for why, count in session.fallbacks.most_common()]
    notes += [f"auto: {line}" for line in session.auto.lines()] if session.auto is not None else []
    if len(traces) > 1:
        whole_s = sum(each.makespan_s for each in traces)
        share = trace.makespan_s / whole_s if whole_s else 1.0
        notes.append(f"this is the longest of {len(traces)} graphs, {share:.0%} of their time")
    planned, items = _simulated(session, entry, trace)
    return explain(
        [timeline_of(trace, entry.plan if entry else None, rank=_rank())],
        asked=_asked(session, entries),
        num_parts=entry.plan.num_parts if entry else 1,
        what_if=items,
        simulated_s=planned.makespan_s if planned else None,
        notes=notes,
        picture=side_by_side(planned, trace) if planned else trace.to_text(),
    )


def _simulated(
    session: Session, entry: PlanEntry | None, trace: Trace
) -> tuple[Trace | None, tuple[WhatIf, ...]]:
    """The plan on a virtual clock, at the costs of this call."""
    if entry is None or entry.traced is None:
        return None, ()
    context = entry.traced.context
    bounds: tuple[int, ...] = (0, context.batch)
    if entry.plan.num_parts > 1:
        bounds = entry.plan.bounds(context.batch, context.tokens_per_request)
    costs = seen_costs(trace, session.options.resolved_machine, bounds)
    return what_ifs(entry.plan, context, costs)


def _asked(session: Session, entries: list[PlanEntry]) -> dict[str, int]:
    """What the user asked for, and how often it came to be."""
    strategy = session.options.resolved_strategy
    parts = {**option_defaults(strategy.function), **strategy.options}.get("parts", 1)
    asked = {}
    if isinstance(parts, int) and parts > 1:
        cut = sum(entry.num_calls for entry in entries if entry.plan.num_parts > 1)
        asked[f"calls in parts, which strategy {strategy} asks for"] = cut
    matched = [rule for piece in session.pieces for rule in piece.captured.matched]
    for rule in session.options.all_rules:
        asked[f"matches of {rule}"] = sum(rule == other for other in matched)
    return asked


def _rank() -> int:
    return get_rank() if is_initialized() else 0
