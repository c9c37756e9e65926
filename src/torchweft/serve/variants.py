"""The `Variants` of a piece: its graph as strategies have rewritten it, each a piece of its own.

    s.rewrite(chunk("down_proj", 4))  --graph_of-->  captured anew  -->  Piece, plans, programs

The `Proof` of a rewritten graph is its first call: the graph as the user wrote it runs on the same
inputs, and both results are compared. If they differ by more than the tolerance, on any rank, the
user's graph runs from then on, counted; under fallback="error" the call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torchweft.capture.dynamo import untried
from torchweft.errors import StrategyError
from torchweft.plan.graph import Graph
from torchweft.plan.rewrite import Rewrite
from torchweft.ranks.talk import run_eagerly, slowest
from torchweft.run.compare import Check, compare, preserved

if TYPE_CHECKING:
    from torchweft.serve.piece import Piece


class Variants:
    """The graphs that came of one by rewrites, and the graph itself."""

    def __init__(self, piece: Piece) -> None:
        self.piece, self.base = piece, piece.graph
        self._known: dict[tuple[Rewrite, ...], Piece] = {}

    @property
    def pieces(self) -> list[Piece]:
        """All of them, the graph without more rewrites first."""
        return [self.piece, *self._known.values()]

    def graph_of(self, rewrites: tuple[Rewrite, ...]) -> Graph:
        """What the graph becomes by rewrites. Raises `StrategyError` if one finds nothing to do."""
        if rewrites not in self._known:
            first, anew = self.piece, self.piece.captured.anew
            if anew is None:
                raise StrategyError("rewrite: boundary mode has no graph to rewrite.")
            old, captured = first.captured, anew(rewrites)
            for why in captured.rewritten.refused.values():
                raise StrategyError(why, rule="rewrite")
            pairs = zip(old.outputs, captured.outputs, strict=True)
            saved = frozenset(new.value or "" for slot, new in pairs if slot.value in old.saved)
            captured = untried(replace(captured, broken=old.broken, notes=old.notes, saved=saved))
            kind = type(first)
            self._known[rewrites] = kind(captured, first.gm, first.service, first.unsplit, self)
        return self._known[rewrites].graph

    def piece_of(self, graph: Graph) -> Piece:
        """The piece that runs one of the graphs."""
        return next(each for each in self.pieces if each.graph is graph)

    def history(self, graph: Graph) -> Sequence[str]:
        """What was done to the user's graph, for the plans of this one."""
        return self.piece_of(graph).captured.rewritten.lines


class Proof:
    """Whether a rewritten graph gives what the user's gives, as its first call has shown.

    verdict: what was seen, if anything was. refused: why the graph is not used.
    """

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.wanted = bool(piece.captured.rewritten.lines)
        self.verdict: Check | None = None
        self.refused: StrategyError | None = None

    @property
    def text(self) -> str:
        """What was rewritten, and what the first call has shown of it; empty if nothing was."""
        lines = "; ".join(self.piece.captured.rewritten.lines)
        seen = "not called yet" if self.verdict is None else f"its first call: {self.verdict}"
        return f"{lines} ({seen})" if lines else ""

    def __call__(self, inputs: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Make a call of the user's graph and then of the rewritten one; compare them.

        What is written by the first is written into copies. All ranks hear of any difference.
        """
        piece, given = self.piece, list(inputs)
        service, written = piece.service, self._written()
        for number, copy in zip(written, preserved([given[n] for n in written]), strict=True):
            given[number] = copy
        before = torch.get_rng_state()
        run_eagerly(piece.communicators, service.speaker, service.options.watchdog_s)
        wanted = piece.gm.forward(*given)
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        made = run()
        pair = [wanted, [given[n] for n in written]], [made, [inputs[n] for n in written]]
        self.verdict, self.wanted = compare(*pair), False
        worst = [float(not self.verdict)]
        if piece.communicators:
            worst = slowest(piece.communicators, worst, service.options.watchdog_s)
        if not worst[0]:
            return made
        for number in written:
            inputs[number].copy_(given[number])
        torch.set_rng_state(after)
        why = str(self.verdict) if not self.verdict else "another rank has seen it"
        lines = "; ".join(piece.captured.rewritten.lines)
        self.refused = StrategyError(
            f"gate: the rewritten graph gives other numbers than the model ({why}): {lines}.",
            rule="gate",
        )
        service.fall_back(str(self.refused), piece.graph.name)
        return wanted

    def _written(self) -> list[int]:
        """The inputs that a call writes, by number."""
        graph, slots = self.piece.graph, self.piece.captured.slots
        return [
            slots[name]
            for name in graph.inputs
            if name in slots and graph.root[name] in graph.mutated
        ]
