"""A `Session`: one compiled model, with its options, its pieces and what happened to them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import SymInt, fx

from torchweft.capture.aten.aten import level_of, run_aten
from torchweft.capture.blocks.blocks import BlockError, Blocks
from torchweft.capture.blocks.inlining import inline
from torchweft.capture.dynamo import Capture, capture
from torchweft.capture.failures import as_own, copied, first_line
from torchweft.capture.guards import shared_bytes
from torchweft.capture.marks import require_matched
from torchweft.capture.ops.collectives import communicators_of
from torchweft.capture.probe import probe, untried
from torchweft.errors import WeftError
from torchweft.options import Options
from torchweft.plan.context import TOLD, HostFacts
from torchweft.plan.write.strategy import Strategy, as_strategy
from torchweft.private.core import set_grad_enabled_
from torchweft.ranks.ranks import introduce
from torchweft.ranks.speakers import Speaker
from torchweft.run.eager.boundary import Boundary
from torchweft.run.eager.build import EMPTY
from torchweft.run.service import Service
from torchweft.serve.gate import Shadow
from torchweft.serve.piece import Piece

log = logging.getLogger("torchweft")


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


class Session:
    """Everything that Weft knows of one compiled model."""

    def __init__(
        self, options: Options, *, speaker: Speaker | None = None, blocks: Blocks | None = None
    ) -> None:
        self.service = Service(options, speaker or Speaker())
        self.options, self.blocks = options, blocks
        self.speaker, self.lanes = self.service.speaker, self.service.lanes
        self.fallbacks = self.service.fallbacks
        self.shadow = Shadow(options.shadow) if options.shadow else None
        self.unmatched = bool(options.all_rules)
        self.pieces: list[Piece] = []
        self.num_uncaptured = 0
        self.breaks: dict[str, None] = {}
        self._held = contextlib.ExitStack()  # hooks and threads of boundary mode
        introduce()

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What Dynamo calls with each graph; the result stands in for it."""
        introduce()
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
        number = len({piece.graph.name.partition(".")[0] for piece in self.pieces})
        options, rules = self.options, self.options.all_rules
        known: dict[str, Any] = {"rules": rules, "batch": options.batch, "name": f"piece{number}"}
        if (options.level or level_of(gm, example_inputs)) == "aten":
            if blocks:
                inline(gm, rules)
            why = shared_bytes(example_inputs)
            if options.splitters:
                why = "state: at the aten level no call shows the side state that it touches"
            make = partial(self._aten_piece, unsplit=why)
            return run_aten(gm, example_inputs, make, **known)

        unsplit = _sets_grad(gm)
        captured = capture(gm, example_inputs, blocks=blocks, **known)
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
        self.pieces.append(piece)
        return piece

    def _uncaptured(self, gm: fx.GraphModule, error: WeftError) -> Callable[..., Any]:
        """A graph that we cannot cut runs as it is, counted, or raises when it is called."""
        self.num_uncaptured += 1
        names = communicators_of(gm)
        return lambda *inputs: self.service.run_as_it_is(gm, inputs, error, names)

    def boundary(self, call: Callable[..., Any], model: Any) -> Boundary:
        """The calls of a model in boundary mode."""

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

    def settle(self, breaks: Sequence[str]) -> None:
        """Checks after a call in which something was captured."""
        self.breaks |= dict.fromkeys(breaks)
        if not self.unmatched:
            return
        self.unmatched = False  # a rule that matched nothing so far raises once
        matched = [rule for piece in self.pieces for rule in piece.captured.matched]
        names = [op.mark for piece in self.pieces for op in piece.graph.ops if op.mark]
        require_matched(self.options.all_rules, matched, names)


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
