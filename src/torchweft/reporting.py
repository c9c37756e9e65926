"""The `Report`: what became of a compiled model: plans, buckets, shares, fallbacks with reasons."""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.gate import Check
from torchweft.piece import Entry, Piece
from torchweft.plan import Plan
from torchweft.session import Session


@dataclass(frozen=True)
class PieceReport:
    """One captured graph: its ops, what keeps some of them whole, and its plans."""

    name: str
    frame: int | None
    num_ops: int
    num_split_ops: int
    whole_ops: tuple[tuple[str, str, str], ...]
    plans: tuple[Plan, ...]
    buckets: tuple[str, ...]
    num_calls: int
    strategy_runs: int
    split_share: float | None
    num_copies: int


@dataclass(frozen=True)
class Report:
    """What became of a compiled model. `str(report)` is the readable form."""

    strategy: str
    pieces: tuple[PieceReport, ...]
    fallbacks: tuple[tuple[str, int], ...]
    assumed: tuple[str, ...]
    num_uncaptured: int
    num_shadowed: int = 0
    shadow_failures: tuple[Check, ...] = ()

    @property
    def split_share(self) -> float | None:
        """The share of measured op time that ran in parts; None before the second call."""
        known = [piece.split_share for piece in self.pieces if piece.split_share is not None]
        return max(known) if known else None

    @property
    def num_breaks(self) -> int:
        """How often Dynamo broke the model; graphs of one frame are recompilations."""
        return max(0, len({piece.frame for piece in self.pieces}) - 1)

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
        if self.num_breaks:
            lines.append(f"  graph breaks: {self.num_breaks}; each piece is scheduled on its own")
        return "\n".join(lines)


def _piece_lines(piece: PieceReport) -> list[str]:
    share = "not measured yet" if piece.split_share is None else f"{piece.split_share:.0%}"
    lines = [
        f"  {piece.name}: {piece.num_ops} ops, {piece.num_split_ops} of them may be split; "
        f"{piece.num_calls} calls, {piece.strategy_runs} strategy runs",
        f"    share of op time in parts: {share}; copies: {piece.num_copies}",
    ]
    for plan, bucket in zip(piece.plans, piece.buckets, strict=True):
        note = plan.history[0].removeprefix("write ") if plan.history else ""
        size = f"{plan.num_parts} part(s), {len(plan.steps)} steps"
        lines.append(f"    batch {bucket}: {note}, {size}")
    for name, rows, reason in piece.whole_ops[:8]:
        lines.append(f"    {name} runs whole ({rows}): {reason}")
    if len(piece.whole_ops) > 8:
        lines.append(f"    ... and {len(piece.whole_ops) - 8} more ops run whole")
    return lines


def report_of(session: Session) -> Report:
    """The report of a session as it stands."""
    return Report(
        strategy=str(session.strategy),
        pieces=tuple(_piece(piece) for piece in session.pieces),
        fallbacks=tuple(session.fallbacks.most_common()),
        assumed=(),
        num_uncaptured=session.num_uncaptured,
        num_shadowed=session.shadow.num_compared if session.shadow else 0,
        shadow_failures=tuple(session.shadow.failures) if session.shadow else (),
    )


def _piece(piece: Piece) -> PieceReport:
    graph, reasons = piece.graph, piece.captured.reasons
    entries = piece.all_entries()
    whole = [op for op in graph.ops if op.whole and op.rows != "batch-free"]
    return PieceReport(
        name=graph.name,
        frame=piece.frame,
        num_ops=len(graph.ops),
        num_split_ops=sum(not op.whole for op in graph.ops),
        whole_ops=tuple((op.name, op.rows, reasons.get(op.name, "")) for op in whole),
        plans=tuple(entry.plan for entry in entries),
        buckets=tuple(str(entry.bucket) for entry in entries),
        num_calls=sum(entry.num_calls for entry in entries),
        strategy_runs=piece.strategy_runs,
        split_share=_split_share(entries),
        num_copies=sum(step.kind == "copy" for entry in entries for step in entry.plan.steps),
    )


def _split_share(entries: list[Entry]) -> float | None:
    shares = [share for entry in entries if (share := split_share(entry)) is not None]
    return max(shares) if shares else None


def split_share(entry: Entry) -> float | None:
    """The share of an entry's op time that ran in parts; None if it was not traced yet."""
    if entry.trace is None:
        return None
    spans = [span for span in entry.trace.spans if span.kind == "run"]
    total_s = sum(span.busy_s for span in spans)
    return sum(span.busy_s for span in spans if span.parts) / total_s if total_s else 0.0
