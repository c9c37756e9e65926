"""The `Report`: what became of a compiled model: plans, buckets, shares, fallbacks with reasons."""

from __future__ import annotations

from torchweft.capture.bodies.inner import compiled
from torchweft.plan.graph import Op
from torchweft.plan.trace import Span
from torchweft.serve.piece import Piece
from torchweft.serve.plans import PlanEntry
from torchweft.serve.session import Session

MAX_TOLD = 8


class PieceReport:
    """One captured graph as it stands: its ops, what keeps some of them whole, and its plans."""

    def __init__(self, piece: Piece) -> None:
        graph, captured, entries = piece.graph, piece.captured, piece.plans.all_entries()
        reasons = captured.reasons
        spans = _spans(entries)
        in_parts_s = sum(span.busy_s for span in spans if span.parts)
        whole = [op for op in graph.ops if op.whole and op.rows != "batch-free"]
        self.name, self.level, self.frame = graph.name, graph.level, piece.frame
        self.num_ops = len(graph.ops)
        self.num_split_ops = sum(not op.whole for op in graph.ops)
        self.whole_ops = tuple((op.name, op.rows, reasons.get(op.name, "")) for op in whole)
        self.additive_ops = tuple(op.name for op in graph.ops if op.rows == "additive")
        self.plans = tuple(entry.plan for entry in entries)
        self.buckets = tuple(str(entry.bucket) for entry in entries)
        self.num_calls = sum(entry.num_calls for entry in entries)
        self.strategy_runs = piece.plans.strategy_runs
        self.measured_s = sum(span.busy_s for span in spans)
        self.split_share = in_parts_s / self.measured_s if self.measured_s else None
        self.head_room = _head_room(entries)
        self.num_copies = sum(step.kind == "copy" for plan in self.plans for step in plan.steps)
        self.num_compiled, refused = compiled(piece.bodies.values())
        self.notes, self.broken = captured.notes + refused, captured.broken
        self.copied = copied_values(piece)


class Report:
    """What became of a compiled model, as it stands. `str(report)` is the readable form."""

    def __init__(self, session: Session) -> None:
        blocks, shadow = session.blocks, session.shadow
        self.strategy = str(session.options.resolved_strategy)
        self.pieces = tuple(map(PieceReport, session.pieces))
        self.fallbacks = tuple(session.fallbacks.most_common())
        self.assumed = tuple(n for piece in session.pieces for n in piece.captured.assumed)
        self.num_uncaptured = session.num_uncaptured
        self.num_shadowed = shadow.num_compared if shadow else 0
        self.shadow_failures = tuple(shadow.failures) if shadow else ()
        self.seen_breaks = tuple(session.breaks)
        self.unblocked = (blocks.refused or blocks.skipped) if blocks else ""

    @property
    def split_share(self) -> float | None:
        """The share of measured op time that ran in parts; None before the second call."""
        total_s = sum(piece.measured_s for piece in self.pieces)
        shared = [(piece.split_share or 0.0) * piece.measured_s for piece in self.pieces]
        return sum(shared) / total_s if total_s else None

    @property
    def num_breaks(self) -> int:
        """How often Dynamo broke the model; graphs of one frame are recompilations."""
        return max(0, len({piece.frame for piece in self.pieces}) - 1)

    @property
    def breaks(self) -> tuple[str, ...]:
        """What Dynamo could not capture: the user's line and the reason, once each."""
        ended = [piece.broken for piece in self.pieces if piece.broken]
        return tuple(dict.fromkeys([*ended, *self.seen_breaks]))

    @property
    def num_copies(self) -> int:
        """Copy steps of all plans in use."""
        return sum(piece.num_copies for piece in self.pieces)

    def __str__(self) -> str:
        lines = [f"strategy {self.strategy}: {len(self.pieces)} graph(s) captured"]
        if self.num_uncaptured:
            lines.append(f"  {self.num_uncaptured} graph(s) were not captured and run as they are")
        for piece in self.pieces:
            lines += _piece_lines(piece)
        for reason, count in self.fallbacks:
            lines.append(f"  fallback {count} x: {reason}")
        lines.append(f"  assumed ops: {', '.join(self.assumed) or 'none'}")
        if self.num_shadowed:
            wrong = len(self.shadow_failures)
            lines.append(
                f"  shadow checks: {self.num_shadowed}, {wrong} of them differed from eager"
            )
        if self.unblocked:
            lines.append(f"  captured without blocks: {self.unblocked}")
        if self.num_breaks:
            lines.append(f"  graph breaks: {self.num_breaks}; each piece is scheduled on its own")
        lines += [f"    not captured, runs as it is: {text}" for text in self.breaks]
        return "\n".join(lines)


def _piece_lines(piece: PieceReport) -> list[str]:
    share = "not measured yet" if piece.split_share is None else f"{piece.split_share:.0%}"
    lines = [
        f"  {piece.name} ({piece.level} level): {piece.num_ops} ops, {piece.num_split_ops} of them "
        f"may be split; {piece.num_calls} calls, {piece.strategy_runs} strategy runs",
        f"    share of op time in parts: {share}; copies: {piece.num_copies}",
    ]
    if piece.head_room is not None and piece.head_room < 1.01:
        lines.append("    nothing to overlap: one resource takes all of the measured time")
    elif piece.head_room is not None:
        lines.append(f"    head-room: at best {piece.head_room:.2f} times as fast by overlap")
    if piece.num_compiled:
        lines.append(f"    compiled by Inductor: {piece.num_compiled} time(s) for all ops")
    for plan, bucket in zip(piece.plans, piece.buckets, strict=True):
        note = plan.history[0].removeprefix("write ") if plan.history else ""
        size = f"{plan.num_parts} part(s), {len(plan.steps)} steps"
        lines.append(f"    batch {bucket}: {note}, {size}")
    lines += [f"    note: {note}" for note in piece.notes]
    if piece.additive_ops:
        lines.append(f"    additive ops, whose parts add up: {', '.join(piece.additive_ops)}")
    copied = [f"{name} is copied together: {reason}" for name, reason in piece.copied]
    whole = [f"{name} runs whole ({rows}): {reason}" for name, rows, reason in piece.whole_ops]
    for told, what in ((copied, "values are copied together"), (whole, "ops run whole")):
        lines += [f"    {text}" for text in told[:MAX_TOLD]]
        if (num_more := len(told) - MAX_TOLD) > 0:
            lines.append(f"    ... and {num_more} more {what}")
    return lines


def copied_values(piece: Piece) -> tuple[tuple[str, str], ...]:
    """The values that plans in use copy together from their parts, each with the reason."""
    steps = [step for entry in piece.plans.all_entries() for step in entry.plan.steps]
    names = dict.fromkeys(step.names[0] for step in steps if step.kind == "copy" and not step.on)
    is_on = piece.service.options.zero_copy
    reasons = piece.unplaced if is_on else dict.fromkeys(names, "zero_copy is off")
    replaced = {name for step in steps if step.by for name in step.names}
    makers = piece.graph.maker
    return tuple((name, reasons.get(name) or _loose(makers[name], replaced)) for name in names)


def _loose(op: Op, replaced: set[str]) -> str:
    """Why the parts of what an op makes are loose pieces, if its body is not the reason."""
    if op.name in replaced:
        return "a kernel of the strategy makes it"
    if op.collective is not None:
        return "a collective makes it"
    return "its parts add up" if op.rows == "additive" else "only the strategy needs it whole"


def _spans(entries: list[PlanEntry], kinds: tuple[str, ...] = ("run",)) -> list[Span]:
    """The measured spans of all entries, those of each as often as it was called."""
    spans: list[Span] = []
    for entry in entries:
        for span in entry.trace.spans if entry.trace is not None else ():
            if span.kind in kinds:
                spans.append(span._replace(busy_s=span.busy_s * entry.num_calls))
    return spans


def _head_room(entries: list[PlanEntry]) -> float | None:
    """All op time over that of the busiest resource: what perfect overlap could bring."""
    totals_s: dict[str, float] = {}
    for span in _spans(entries, ("run", "transfer")):
        resource = "compute" if span.uses == "memory" else span.uses
        totals_s[resource] = totals_s.get(resource, 0.0) + span.busy_s
    busiest_s = max(totals_s.values(), default=0.0)
    return sum(totals_s.values()) / busiest_s if busiest_s else None
