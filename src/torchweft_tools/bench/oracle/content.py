"""The `Content`: what every cell of every location holds while a plan runs.

A cell of a location is a tuple: ("caller", x, 0), ("loose", device, v, 1), ("place", v, 0),
("made", device, v, 0) for a loose piece that must still be copied into its place, and the handles
("view", device, alias, part), ("split", x), ("merged", y). It holds (piece, version), or nothing.

An action (a run, a copy, an issue with its complete, ...) is a list of moves on cells:

    together   the cells are full, in one piece     see     a cell has this version (None: any)
    raise      a cell gets the next version         make    an empty cell is filled
    copy       make, with the source's version      clear   a full cell is emptied
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Cell = tuple[str | int | None, ...]
Piece = tuple[str | int, ...]
Content = dict[Cell, tuple[Piece, int]]


class UnsafeError(Exception):
    """A reason why a plan is not safe."""


class Move(NamedTuple):
    """One thing that an action does to cells; `cells` are (source, target) for a copy."""

    kind: str
    cells: tuple[Cell, ...]
    piece: Piece = ()
    version: int | None = None


class OracleTalk(NamedTuple):
    """A collective, send or receive: what matches it (`key`), and what must then agree."""

    key: tuple[str | int, ...]
    members: tuple[int, ...]
    facts: tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Action:
    """What happens from the start of step `first` to the end of step `last` of a rank's plan.

    late: the talks that begin where step `last` does; the others begin with the action.
    """

    rank: int
    first: int
    last: int
    label: str
    moves: tuple[Move, ...]
    talks: tuple[OracleTalk, ...] = ()
    late: tuple[OracleTalk, ...] = ()

    def talks_of(self, at: int) -> tuple[OracleTalk, ...]:
        """The talks that begin where a step does."""
        return (self.talks if at == self.first else ()) + (self.late if at == self.last else ())

    @cached_property
    def writes(self) -> dict[Cell, None]:
        """The cells that it changes, in a fixed order."""
        cells: dict[Cell, None] = {}
        for move in self.moves:
            if move.kind in ("raise", "make", "clear"):
                cells.update(dict.fromkeys(move.cells))
            elif move.kind == "copy":
                cells[move.cells[1]] = None
        return cells

    @cached_property
    def touches(self) -> dict[Cell, None]:
        """The cells that it reads or changes, in a fixed order."""
        return {cell: None for move in self.moves for cell in move.cells}


Overlaps = dict[Cell, tuple[Cell, ...]]


def conflict(one: Action, two: Action, overlaps: Overlaps) -> Cell | None:
    """A cell that both touch and at least one changes, or None."""
    for writer, other in ((one, two), (two, one)):
        for cell in writer.writes:
            if cell in other.touches or any(
                near in other.touches for near in overlaps.get(cell, ())
            ):
                return cell
    return None


def perform(action: Action, content: Content, overlaps: Overlaps) -> None:
    """Do the moves of an action in place. Raises `UnsafeError` where one is impossible."""
    for kind, cells, piece, version in action.moves:
        if kind == "see":
            held = content.get(cells[0])
            if held is None:
                raise UnsafeError(f"{action.label}: nothing is in {cells[0]}")
            if version is not None and held[1] != version:
                raise UnsafeError(
                    f"{action.label}: {cells[0]} has version {held[1]}, not {version}"
                )
        elif kind == "together":
            pieces = {content[cell][0] if cell in content else None for cell in cells}
            if None in pieces or len(pieces) > 1:
                raise UnsafeError(f"{action.label}: {cells} are in several pieces, or missing")
        elif kind == "clear":
            if content.pop(cells[0], None) is None:
                raise UnsafeError(f"{action.label}: nothing is in {cells[0]}")
        else:
            _write(action, content, overlaps, Move(kind, cells, piece, version))


def _write(action: Action, content: Content, overlaps: Overlaps, move: Move) -> None:
    target = move.cells[-1]
    held = content.get(target)
    if move.kind == "raise":
        assert held is not None, "an action sees what it raises"
        content[target] = (held[0], held[1] + 1)
    else:
        if held is not None:
            raise UnsafeError(f"{action.label}: {target} is full already")
        version = content[move.cells[0]][1] if move.kind == "copy" else move.version
        assert version is not None, "what is made has a version"
        content[target] = (move.piece, version)
    for near in overlaps.get(target, ()):
        content.pop(near, None)
