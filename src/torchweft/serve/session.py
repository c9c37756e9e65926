"""A `Session`: one compiled model, its options and pieces; its `Report`: what became of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import SymInt, fx
from torch.distributed import is_initialized

from torchweft.capture.aten import level_of, run_aten
from torchweft.capture.blocks.blocks import Blocks, inline
from torchweft.capture.blocks.likeness import BlockError
from torchweft.capture.bodies.inner import compiled
from torchweft.capture.dynamo import Capture, capture, probe, untried
from torchweft.capture.failures import as_own, copied, first_line
from torchweft.capture.guards import shared_bytes
from torchweft.capture.marks import require_matched
from torchweft.capture.offload import FILE
from torchweft.capture.ops.collectives import communicators_of
from torchweft.capture.ops.messages import settle_messages
from torchweft.capture.rewrites.rewriting import require_done
from torchweft.errors import CaptureError, WeftError
from torchweft.options import Options
from torchweft.plan.context import TOLD, HostFacts
from torchweft.plan.graph import Op
from torchweft.plan.trace import Span
from torchweft.plan.write.strategy import Strategy, as_strategy
from torchweft.private.core import set_grad_enabled_
from torchweft.ranks.ranks import EVERY, introduce, is_among
from torchweft.ranks.speakers import Speaker
from torchweft.run.service import Service
from torchweft.serve.book.entry import PlanEntry
from torchweft.serve.book.measured import MeasuredCosts
from torchweft.serve.piece import Piece

if TYPE_CHECKING:
    from torchweft.run.eager.boundary import Boundary
    from torchweft.serve.gate import Shadow

MAX_TOLD = 8


@contextlib.contextmanager
def context(
    *,
    phase: str | None = None,
    tokens_per_request: Sequence[int] = (),
    num_tokens: int = 0,
    strategy: str | Strategy | Callable[..., None] | None = None,
) -> Iterator[None]:
    """What the host knows of the calls inside, beyond their shapes.

    strategy: what it wants for them, instead of the strategy that the model was compiled with.
    """
    wanted = as_strategy(strategy) if strategy is not None else None
    token = TOLD.set(HostFacts(phase, tuple(tokens_per_request), num_tokens, wanted))
    try:
        yield
    finally:
        TOLD.reset(token)


def _shadow(share: float) -> Shadow:
    from torchweft.serve.gate import Shadow  # no other call needs it

    return Shadow(share)


class Session:
    """Everything that Weft knows of one compiled model."""

    def __init__(
        self, options: Options, *, speaker: Speaker | None = None, blocks: Blocks | None = None
    ) -> None:
        self.service = Service(options, speaker or Speaker())
        self.options, self.blocks = options, blocks
        self.speaker, self.lanes = self.service.speaker, self.service.lanes
        self.fallbacks = self.service.fallbacks
        self.shadow = _shadow(options.shadow) if options.shadow else None
        self.unmatched = bool(options.all_rules or options.rewrites)
        self.pieces: list[Piece] = []
        self.num_uncaptured = self.num_shared = 0
        self.share = EVERY
        self.auto: Any = None  # what chooses how calls run, if nobody has said it: `Auto`
        self.heard: set[str] | None = None  # the communicators of a call as it is, if it was heard
        self.breaks: dict[str, None] = {}
        # With costs of a file there is nothing to agree on, and `auto` agrees on them in its races.
        measures = options.costs is None and options.capture == "graph"
        self.speaker.costs = MeasuredCosts(self) if measures and not options.is_auto else None
        self.speaker.costs_name = options.costs_name
        self._held = contextlib.ExitStack()  # hooks and threads of boundary mode
        introduce()

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls with each graph; the result stands in for it."""
        introduce()
        settle_messages(gm)
        blocks = self.blocks is not None and self.blocks.adopt(gm, example_inputs)
        plain = copied(gm)
        try:
            return self._captured(gm, example_inputs, blocks)
        except Exception as error:
            own = as_own(error, "capture")
            if blocks:  # perhaps it can be captured without them
                raise BlockError(first_line(own)) from error
            return self._uncaptured(plain, own)

    def _captured(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], blocks: bool
    ) -> Callable[..., Any]:
        """A graph of Dynamo as a piece, or as those of its ATen graphs."""
        if any(isinstance(each, torch.Tensor) and each.is_nested for each in example_inputs):
            raise CaptureError("capture: nested tensors have no sizes to plan by. Pad them.")
        number = len({piece.graph.name.partition(".")[0] for piece in self.pieces})
        options, rules = self.options, self.options.all_rules
        known: dict[str, Any] = {"rules": rules, "batch": options.batch, "name": f"piece{number}"}
        known["writes_by"] = options.inner if options.zero_copy else None
        known["rewrites"] = options.rewrites
        if (options.level or level_of(gm, example_inputs)) == "aten":
            if blocks:
                inline(gm, rules)
            why = shared_bytes(example_inputs)
            if options.has_loads and any(hasattr(each, FILE) for each in example_inputs):
                self.service.fall_back("offload: at the aten level weights are read as touched")
            if options.splitters:
                why = "state: at the aten level no call shows the side state that it touches"
            make = partial(self._aten_piece, unsplit=why)
            return run_aten(gm, example_inputs, make, **known)

        _drop_switches(gm)
        unsplit = _sets_grad(gm)
        captured = capture(gm, example_inputs, blocks=blocks, from_disk=options.has_loads, **known)
        if options.strict or options.splitters:  # with side state, to try an op would write it
            return self._piece(gm, untried(captured), unsplit)
        # Numbers are taken by their hint: to ask a symbol for its value would guard on it.
        given = [i.node.hint if isinstance(i, SymInt) else i for i in example_inputs]
        return self._piece(gm, probe(captured, given), unsplit)

    def _aten_piece(
        self, gm: fx.GraphModule, capture: Callable[[], Capture], *, unsplit: str
    ) -> Callable[..., Any]:
        """A graph of AOTAutograd as a piece: what fails in one leaves the others alone."""
        plain = copied(gm)
        try:
            return self._piece(gm, capture(), unsplit)
        except Exception as error:
            return self._uncaptured(plain, as_own(error, "capture"))

    def _piece(self, gm: fx.GraphModule, captured: Capture, unsplit: str) -> Piece:
        piece = Piece(captured, gm, self.service, unsplit)
        if self.alone and piece.communicators:
            raise CaptureError(
                "ranks: the first call showed no collective, so ranks have not agreed on this one. "
                "Call weft.warmup on all of them, or name a strategy."
            )
        self.pieces.append(piece)
        return piece

    def _uncaptured(self, gm: fx.GraphModule, error: WeftError) -> Callable[..., Any]:
        """A graph that we cannot cut runs as it is, counted, or raises when it is called."""
        self.num_uncaptured += 1
        names = set() if self.alone else communicators_of(gm)
        return lambda *inputs: self.service.run_as_it_is(gm, inputs, error, names)

    @property
    def alone(self) -> bool:
        """Whether other ranks may be elsewhere: this is a trial that none of them was asked for."""
        return self.heard == set() and self.auto.is_trial

    @property
    def communicators(self) -> set[str]:
        """Those that the model talks by, as far as it was seen."""
        return {name for piece in self.pieces for name in piece.communicators} | (
            self.heard or set()
        )

    def boundary(self, call: Callable[..., Any], model: Any) -> Boundary:
        """The calls of a model in boundary mode, which no other call needs to load."""
        from torchweft.run.eager.boundary import Boundary
        from torchweft.run.eager.build import EMPTY

        def adopt(piece: Piece) -> None:
            self.pieces.append(piece)
            self.settle(())

        make_piece = partial(Piece, gm=EMPTY, service=self.service)
        boundary = Boundary(self.service, call, model, make_piece, adopt)
        self._held.callback(boundary.close)
        return boundary

    def close(self) -> None:
        """End the threads, and take hooks off the model."""
        self._held.close()
        self.lanes.close()

    def set_share(self, share: int) -> None:
        """Let a share of the calls, of a thousand, run by plans. Raises `WeftError`.

        Ranks that the model talks with are told, and begin at one call.
        """
        groups = {name for piece in self.pieces for name in piece.communicators}
        if len(groups) > 1 or (not self.pieces and is_initialized()):
            why = f"the model talks on {len(groups)} process groups" if groups else (
                "it was not called yet, so nobody knows whom it talks with"
            )  # fmt: skip
            raise WeftError(
                f"enable: the ranks cannot agree on a call to begin with: {why}. "
                "To go back, set WEFT_DISABLE=1 on all ranks and start anew."
            )
        if groups:
            self.speaker.wanted = share
        else:
            self.share = share

    def is_planned(self) -> bool:
        """Whether a call of a model that talks with nobody is among those that run by plans."""
        self.num_shared += 1
        planned = is_among(self.num_shared, self.share)
        self.service.num_stock += not planned
        return planned

    def settle(self, breaks: Sequence[str]) -> None:
        """Checks after a call in which something was captured."""
        if self.shadow and self.shadow.every < 1 and any(p.communicators for p in self.pieces):
            self.shadow = None
            reason = "shadow: ranks would compare different calls; give every N-th call instead"
            self.service.fall_back(reason, "the model")
        self.breaks |= dict.fromkeys(breaks)
        if not self.unmatched:
            return
        self.unmatched = False  # a rule that matched nothing so far raises once
        matched = [rule for piece in self.pieces for rule in piece.captured.matched]
        require_matched(self.options.all_rules, matched)
        if self.pieces:
            seen = [piece.captured.rewritten for piece in self.pieces]
            require_done(self.options.rewrites, seen)


def _drop_switches(gm: fx.GraphModule) -> None:
    """Take out what turns gradients on in a graph without, if nobody outside could see a history:
    no result has one, and no input gets one by what is written into it."""
    switches = [node for node in gm.graph.nodes if node.target is set_grad_enabled_]
    if torch.is_grad_enabled() or not switches:
        return
    made = [node for node in gm.graph.output_node().all_input_nodes if node.op != "placeholder"]
    given = gm.graph.find_nodes(op="placeholder")
    values = [(node, node.meta.get("example_value")) for node in (*made, *given)]
    tensors = [(node, value) for node, value in values if isinstance(value, torch.Tensor)]
    if any(value.requires_grad and (node in made or not value.is_leaf) for node, value in tensors):
        return
    for node in switches:
        gm.graph.erase_node(node)
    gm.recompile()


def _sets_grad(gm: fx.GraphModule) -> str:
    """Why a graph must run whole: it turns gradients on for itself; empty if it does not.

    Parts are put together outside of that stretch, so the result would lose its history.
    """
    for node in gm.graph.nodes:
        turned_on = node.target is set_grad_enabled_ and node.args == (True,)
        if turned_on and not torch.is_grad_enabled():
            return "grad: the model turns gradients on inside"
        if "_enter_inference_mode" in str(node.target):
            return "grad: the model enters inference mode inside"
    return ""


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
        self.num_compiled, refused = compiled(piece.bodies)
        self.notes = captured.notes + refused + piece.plans.limit.notes
        self.broken = captured.broken
        self.copied = copied_values(piece)
        self.rewritten = tuple(each.proof.text for each in piece.variants.pieces)


class Report:
    """What became of a compiled model, as it stands. `str(report)` is the readable form."""

    def __init__(self, session: Session) -> None:
        blocks, shadow = session.blocks, session.shadow
        self.strategy = str(session.options.resolved_strategy)
        self.pieces = tuple(map(PieceReport, session.pieces))
        self.fallbacks = tuple(session.fallbacks.most_common())
        self.num_stock = session.service.num_stock
        self.choices = tuple(session.auto.lines()) if session.auto is not None else ()
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
        if self.num_stock:
            lines.append(f"  {self.num_stock} call(s) ran as they are: weft.disable or a share")
        lines += [f"  {line}" for line in self.choices]
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
    lines += [f"    {text}" for text in filter(None, piece.rewritten)]
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
    told: dict[str, str] = {}
    for entry in piece.plans.all_entries():  # of the graph itself, or of one that was rewritten
        steps, reasons = entry.plan.steps, entry.piece.captured.unplaced
        replaced = {name for step in steps if step.by for name in step.names}
        for name in (step.names[0] for step in steps if step.kind == "copy" and not step.on):
            told[name] = reasons.get(name) or _loose(entry.plan.graph.maker[name], replaced)
    return tuple(told.items())


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
