"""The programs of the overlap bench, as a table: baseline, floors, peers, weft, and the control.

TABLES: name, kind, and how it is built from an `Arena` (a model, its input, its sizes).

The peers live in `peers/`, plain torch that knows nothing of weft. A candidate that cannot run
here raises `Absent` with the reason, which is put into the row.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchweft.api import compile, session_of
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import Strategy, as_strategy
from torchweft.serve.session import context
from torchweft_tools.bench.peers import domino, floors, onednn, overlap_by_hand, stock
from torchweft_tools.bench.players.overlap_race import Call

Build = Callable[["Arena"], Call]


class Absent(Exception):  # noqa: N818  (no error: a fact of the machine or of the model)
    """Why a candidate does not run."""


@dataclass(frozen=True)
class Arena:
    """What a candidate is built from."""

    name: str
    phase: str
    model: nn.Module
    x: Tensor
    sizes: Any


@dataclass(frozen=True)
class Candidate:
    """A program of the race. `comparable`: its output is that of the sequential model."""

    name: str
    kind: str
    build: Build
    parts: int = 1
    comparable: bool = True


def unoverlapped(s: Scheduler, *, parts: int = 4) -> None:
    """The negative control: `overlap`, but collectives run on the compute lane, to their end."""
    if s.graph.batch is None:
        return s.sequential("the graph has no batch")
    s.split(parts)
    while ready := s.ready():
        for op, part in ready:
            lanes = [lane for lane in s.lanes(op) if not lane.via]
            s.run(op, part, lane=lanes[0])
    s.merge()
    return None


def _sequential(arena: Arena) -> Call:
    return arena.model


def _floor(name: str, arena: Arena) -> Call:
    call: Call = (
        floors.compute_only(arena.model)
        if name == "compute"
        else floors.comm_only(arena.model, arena.x)
    )
    return call


def _by_hand(num_parts: int, inductor: bool, arena: Arena) -> Call:
    call: Call = overlap_by_hand.by_hand(arena.model, num_parts, compile=inductor)
    return call


def _by_hand_onednn(num_parts: int, arena: Arena) -> Call:
    call: Call = onednn.by_hand_onednn(arena.model, num_parts)
    return call


def _stock(arena: Arena) -> Call:
    call: Call = stock.stock(arena.model)
    return call


def _reordered(num_parts: int, arena: Arena) -> Call:
    call: Call = stock.reordered(arena.model, num_parts)
    return call


def _domino(intra: bool, arena: Arena) -> Call:
    if arena.name != "dense":
        raise Absent("Domino has no experts")
    if importlib.util.find_spec("deepspeed") is None:
        raise Absent("deepspeed is not installed; make bench-setup, then run it from .venv-bench")
    num_sequences, num_positions, _ = arena.x.shape
    call: Call = domino.domino(
        arena.sizes, num_sequences=num_sequences, num_positions=num_positions, intra=intra
    )
    return call


def _weft(strategy: Strategy, options: dict[str, Any], arena: Arena) -> Call:
    return compile(copy.copy(arena.model), strategy, **options)


def _table() -> tuple[Candidate, ...]:
    control = as_strategy(unoverlapped)
    return (
        Candidate("sequential", "baseline", _sequential),
        Candidate("sequential_again", "baseline", _sequential),
        Candidate("compute", "floor", partial(_floor, "compute"), comparable=False),
        Candidate("comm", "floor", partial(_floor, "comm"), comparable=False),
        *(
            Candidate(f"by_hand_{parts}", "peer", partial(_by_hand, parts, False), parts)
            for parts in (1, 2, 4, 8)
        ),
        *(
            Candidate(f"by_hand_inductor_{parts}", "peer", partial(_by_hand, parts, True), parts)
            for parts in (1, 2, 4, 8)
        ),
        Candidate("domino", "peer", partial(_domino, False), 2, comparable=False),
        Candidate("domino_intra", "peer", partial(_domino, True), 2, comparable=False),
        Candidate("inductor", "peer", _stock),
        *(
            Candidate(f"inductor_reordered_{parts}", "peer", partial(_reordered, parts), parts)
            for parts in (1, 2, 4)
        ),
        Candidate("weft_1", "weft", partial(_weft, sequential, {})),
        *(
            Candidate(f"weft_{parts}", "weft", partial(_weft, overlap(parts=parts), {}), parts)
            for parts in (2, 4, 8)
        ),
        *(
            Candidate(
                f"weft_onednn_{parts}",
                "weft",
                partial(_weft, overlap(parts=parts), {"inner": "onednn"}),
                parts,
            )
            for parts in (2, 4, 8)
        ),
        *(
            Candidate(f"by_hand_onednn_{parts}", "kernels", partial(_by_hand_onednn, parts), parts)
            for parts in (2, 4)
        ),
        Candidate("control", "control", partial(_weft, control(parts=4), {}), 4),
    )


@as_strategy
def by_phase(s: Scheduler, *, parts: int = 4) -> None:
    """Parts for prefill; a decode step is too small for them."""
    if s.context.phase == "decode":
        return s.sequential("a decode step is too small for parts")
    function: Callable[..., None] = overlap.function
    return function(s, parts=parts)


def _with_phase(strategy: Strategy, options: dict[str, Any], arena: Arena) -> Call:
    """Weft as a host would call it, with the phase as context."""
    model = _weft(strategy, options, arena)

    def call(x: Tensor) -> Tensor:
        with context(phase=arena.phase):
            return model(x)

    call.model = model  # type: ignore[attr-defined]
    return call


def _forgetful(strategy: Strategy, options: dict[str, Any], arena: Arena) -> Call:
    """The same without a cache of plans."""
    model = _weft(strategy, options, arena)

    def call(x: Tensor) -> Tensor:
        for piece in session_of(model).pieces:
            piece.forget()
        with context(phase=arena.phase):
            return model(x)

    call.model = model  # type: ignore[attr-defined]
    return call


def _ablation() -> tuple[Candidate, ...]:
    full = {"inner": "inductor"}
    return (
        Candidate("sequential", "baseline", _sequential),
        Candidate("sequential_again", "baseline", _sequential),
        Candidate("full", "weft", partial(_with_phase, by_phase, full)),
        Candidate(
            "no_zero_copy", "weft", partial(_with_phase, by_phase, {**full, "zero_copy": False})
        ),
        Candidate("no_plan_cache", "weft", partial(_forgetful, by_phase, full)),
        Candidate(
            "no_block_sharing", "weft", partial(_with_phase, by_phase, {**full, "blocks": False})
        ),
        Candidate("fixed_strategy", "weft", partial(_with_phase, overlap(parts=4), full)),
        Candidate("no_inductor", "weft", partial(_with_phase, by_phase, {})),
    )


def _boundary() -> tuple[Candidate, ...]:
    return (
        Candidate("sequential", "baseline", _sequential),
        Candidate("sequential_again", "baseline", _sequential),
        *(
            Candidate(
                f"{mode}_{parts}",
                "weft",
                partial(_weft, overlap(parts=parts), {"capture": mode}),
                parts,
            )
            for parts in (2, 4)
            for mode in ("graph", "boundary")
        ),
    )


TABLES = {"race": _table(), "ablation": _ablation(), "boundary": _boundary()}
