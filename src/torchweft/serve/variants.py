"""The `Variants` of a piece: its graph as strategies have rewritten it, each a piece of its own.

    s.rewrite(chunk("down_proj", 4))  --graph_of-->  captured anew  -->  Piece, plans, programs

Each proves itself at its first call: `run/proof`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torchweft.capture.dynamo import untried
from torchweft.errors import StrategyError
from torchweft.plan.graph import Graph
from torchweft.plan.rewrite import Rewrite

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
