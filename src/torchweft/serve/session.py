"""A `Session`: one compiled model, with its options, its pieces and what happened to them."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import SymInt, fx

from torchweft.capture.aten.aten import check_level, level_of, run_aten
from torchweft.capture.blocks.blocks import BlockError, Blocks
from torchweft.capture.blocks.inlining import inline
from torchweft.capture.bodies.inner import check_inner
from torchweft.capture.dynamo import Capture, capture
from torchweft.capture.failures import as_own, copied, first_line
from torchweft.capture.guards import shared_bytes
from torchweft.capture.marks import MarkRule, require_matched, touches_state
from torchweft.capture.ops.collectives import communicators_of
from torchweft.capture.probe import probe, untried
from torchweft.capture.splitters import Splitter, check_splitters
from torchweft.errors import StrategyError, WeftError, unknown
from torchweft.plan.context import TOLD, Context, HostFacts
from torchweft.plan.cost import Costs
from torchweft.plan.graph import Graph
from torchweft.plan.machine import Machine, cpu
from torchweft.plan.trace import Trace
from torchweft.plan.write.strategy import Strategy, as_strategy
from torchweft.private.core import set_grad_enabled_
from torchweft.ranks.ranks import WATCHDOG_S, introduce
from torchweft.ranks.speakers import Speaker
from torchweft.ranks.talk import refuse, run_eagerly
from torchweft.run.accelerator.pads import check_sizes
from torchweft.run.cpu import Lanes
from torchweft.serve.gate import Shadow, first_difference, wrong_kernel
from torchweft.serve.piece import Piece

log = logging.getLogger("torchweft")
FALLBACKS = ("sequential", "error")
CAPTURES = ("graph", "boundary")


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
    told = HostFacts(phase, tuple(tokens_per_request), num_tokens, wanted)
    token = TOLD.set(told)
    try:
        yield
    finally:
        TOLD.reset(token)


class Session:
    """Everything that Weft knows of one compiled model."""

    def __init__(
        self,
        strategy: str | Strategy | Callable[..., None] = "sequential",
        *,
        rules: Sequence[MarkRule] = (),
        inner: str = "eager",
        fallback: str = "sequential",
        strict: bool = True,
        batch: int | str | None = None,
        machine: Machine | None = None,
        num_threads: int | None = None,
        jitter: bool = False,
        shadow: int = 0,
        level: str | None = None,
        watchdog_s: float = WATCHDOG_S,
        graphs: bool | Sequence[int] = False,
        blocks: Blocks | None = None,
        zero_copy: bool = True,
        capture: str = "graph",
        splitters: Sequence[Splitter] = (),
    ) -> None:
        if not isinstance(watchdog_s, int | float) or not watchdog_s > 0:
            raise WeftError(f"watchdog_s: {watchdog_s!r} is no time to wait.", rule="watchdog_s")
        if fallback not in FALLBACKS:
            raise StrategyError(f"fallback: {unknown('fallback', fallback, FALLBACKS)}")
        if capture not in CAPTURES:
            raise StrategyError(f"capture: {unknown('way to capture', capture, CAPTURES)}")
        self.capture = capture
        self.strategy, self.splitters = as_strategy(strategy), check_splitters(splitters)
        self.rules = (*rules, *(touches_state(s.name, s.calls, s.by) for s in self.splitters))
        self.inner = check_inner(inner)
        self.fallback, self.strict, self.batch = fallback, strict, batch
        self.machine = machine or cpu()
        self.costs = Costs(self.machine)
        self.num_threads, self.jitter = num_threads, jitter
        self.shadow = Shadow(shadow) if shadow else None
        self.level, self.watchdog_s = check_level(level), watchdog_s
        self.graphs, self.graph_sizes = bool(graphs), check_sizes(graphs)
        self.blocks, self.zero_copy = blocks, zero_copy
        self.unmatched = bool(self.rules)
        self.pieces: list[Piece] = []
        self.fallbacks: Counter[str] = Counter()
        self.num_uncaptured = 0
        self.breaks: dict[str, None] = {}
        self.lanes = Lanes()
        self.traces: list[Trace] | None = None
        self.kept: dict[Piece, list[Any]] | None = None
        self.here = threading.local()  # ran: whether a piece has run in this thread's call
        self.speaker = Speaker()
        self._lock = threading.Lock()
        introduce()

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls with each graph; the result stands in for it."""
        if self.capture != "graph":
            raise StrategyError("capture: Dynamo captures graphs; use weft.compile for others.")
        introduce()
        blocks = self.blocks is not None and self.blocks.adopt(gm, example_inputs)
        plain = copied(gm)
        try:
            return self._captured(gm, example_inputs, blocks)
        except Exception as error:
            own = as_own(error, "capture")
            if blocks:  # perhaps it can be had without them
                raise BlockError(first_line(own)) from error
            return self._uncaptured(plain, own)

    def _captured(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], blocks: bool
    ) -> Callable[..., Any]:
        """A graph of Dynamo as a piece, or as those of its ATen graphs."""
        number = len({piece.graph.name.partition(".")[0] for piece in self.pieces})
        options: dict[str, Any] = {
            "rules": self.rules, "batch": self.batch, "name": f"piece{number}",
        }  # fmt: skip
        if (self.level or level_of(gm, example_inputs)) == "aten":
            if blocks:
                inline(gm, self.rules)
            why = shared_bytes(example_inputs)
            if self.splitters:
                why = "state: at the aten level no call shows the side state that it touches"
            make = partial(self._aten_piece, unsplit=why)
            return run_aten(gm, example_inputs, make, **options)

        def captured() -> Capture:
            found = capture(gm, example_inputs, blocks=blocks, **options)
            # Numbers are taken by their hint: to ask a symbol for its value would guard on it.
            given = [i.node.hint if isinstance(i, SymInt) else i for i in example_inputs]
            # With side state an op that is tried would write it.
            return untried(found) if self.strict or self.splitters else probe(found, given)

        return self._piece(gm, captured, unsplit=_sets_grad(gm))

    def _aten_piece(
        self, gm: fx.GraphModule, capture: Callable[[], Capture], *, unsplit: str
    ) -> Callable[..., Any]:
        """A graph of AOTAutograd as a piece: what fails in one leaves the others alone."""
        plain = copied(gm)
        try:
            return self._piece(gm, capture, unsplit=unsplit)
        except Exception as error:
            return self._uncaptured(plain, as_own(error, "capture"))

    def _piece(self, gm: fx.GraphModule, capture: Callable[[], Capture], *, unsplit: str) -> Piece:
        """A graph that was captured, as a piece of this session."""
        piece = Piece(self, capture(), gm)
        piece.unsplit = piece.unsplit or unsplit
        self.pieces.append(piece)
        return piece

    def _uncaptured(self, gm: fx.GraphModule, error: WeftError) -> Callable[..., Any]:
        """A graph that we cannot cut runs as it is, counted, or raises when it is called."""
        self.num_uncaptured += 1
        names = communicators_of(gm)
        return lambda *inputs: self.run_as_it_is(gm, inputs, error, names)

    def run_as_it_is(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        error: WeftError,
        names: Iterable[str],
        piece: Piece | None = None,
    ) -> Any:
        """Run a user's graph where we failed, counted; under fallback="error" raise why.

        names: its communicators. Their other ranks must run theirs as it is too.
        """
        if self.fallback == "error":
            refuse(names, self.speaker, self.watchdog_s)
            raise error
        self.fall_back(piece, first_line(error))
        run_eagerly(names, self.speaker, self.watchdog_s)
        return gm.forward(*inputs)

    def context(self, graph: Graph, env: Mapping[str, int]) -> Context:
        """The context of a call: its shapes, and what the host told."""
        told = TOLD.get()
        rows = env.get(graph.batch or "", 1)
        sizes = {name: size for name, size in env.items() if name != graph.batch}
        if told is None:
            return Context(rows, sizes=sizes)
        requests = told.tokens_per_request if sum(told.tokens_per_request) == rows else ()
        return Context(rows, told.num_tokens, requests, told.phase, sizes, told.strategy)

    def settle(self, breaks: Sequence[str]) -> None:
        """What is to be seen to after a call in which Dynamo compiled, and after the first."""
        self.breaks |= dict.fromkeys(breaks)
        if self.unmatched:
            self.unmatched = False
            self._require_marks()

    def _require_marks(self) -> None:
        """Raise `CaptureError`, once, if a rule matched nothing in the graphs captured so far."""
        matched = [rule for piece in self.pieces for rule in piece.captured.matched]
        names = [op.mark for piece in self.pieces for op in piece.graph.ops if op.mark]
        require_matched(self.rules, matched, names)

    @property
    def watches(self) -> bool:
        """Whether somebody looks at the calls: they take the long way then."""
        return self.traces is not None or self.kept is not None

    @contextlib.contextmanager
    def collect(self, traces: list[Trace]) -> Iterator[None]:
        """Trace every call inside."""
        self.traces = traces
        try:
            yield
        finally:
            self.traces = None

    @contextlib.contextmanager
    def keep_inputs(self) -> Iterator[None]:
        """Keep a copy of what each piece is called with inside."""
        self.kept = {}
        yield

    def first_difference(self, limit: float | None) -> str | None:
        """The first op that differs from its run on the whole batch, on the inputs kept."""
        for piece, inputs in (self.kept or {}).items():
            if piece.graph.level == "boundary":  # its ops are the model's own calls, not ours
                continue
            if name := first_difference(piece, inputs, limit):
                source = piece.graph.op[name].source
                return f"{name} of {piece.graph.name}" + (f", at {source}" if source else "")
        return None

    def wrong_kernel(self, limit: float | None) -> str | None:
        """The first kernel that gives other numbers than its ops, on the inputs kept."""
        kept = (self.kept or {}).items()
        told = (wrong_kernel(piece, inputs, limit) for piece, inputs in kept)
        return next(filter(None, told), None)

    def fall_back(self, piece: Piece | None, reason: str) -> None:
        """Count a call that runs sequentially against the strategy's will; the first is logged."""
        self.here.ran = True
        if self.fallback == "error":
            raise StrategyError(f"fallback: {reason}", rule="fallback")
        with self._lock:
            self.fallbacks[reason] += 1
            first = self.fallbacks[reason] == 1
        if first:
            where = piece.graph.name if piece is not None else "a graph"
            log.warning("%s falls back: %s", where, reason)


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
