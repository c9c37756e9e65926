"""The `Proof` of a rewritten graph: its first call gives what the user's graph gives.

    wanted = gm(inputs)     made = plan of the rewritten graph(inputs)     compare(wanted, made)

The graph as the user wrote it runs on the same inputs, and both results are compared. If they
differ by more than the tolerance, on any rank, the user's graph runs from then on, counted; under
fallback="error" the call raises. Where all numbers of a result are the same, as in a call with
zeros, nothing can be seen of rows that went astray: the next call is looked at too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchweft.errors import StrategyError
from torchweft.ranks.talk import run_eagerly, slowest
from torchweft.run.compare import Check, compare, preserved, tells

if TYPE_CHECKING:
    from torchweft.serve.piece import Piece

MAX_LOOKS = 4


class Proof:
    """Whether a rewritten graph gives what the user's gives, as its first call has shown.

    verdict: what was seen, if anything was. refused: why the graph is not used.
    """

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.wanted = bool(piece.captured.rewritten.lines)
        self.verdict: Check | None = None
        self.refused: StrategyError | None = None
        self._left = MAX_LOOKS

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
        self.verdict, self.wanted = compare(*pair, least=0.0), False
        self._left -= 1
        worst = [float(not self.verdict), float(not tells(pair[0]) and self._left > 0)]
        if piece.communicators:
            worst = slowest(piece.communicators, worst, service.options.watchdog_s)
        if not worst[0]:
            self.wanted = bool(worst[1])
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
