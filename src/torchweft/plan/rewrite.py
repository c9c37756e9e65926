"""The `Rewrite`: a change of a graph that is asked for by name, before a plan is written for it.

    chunk("down_proj", 4)                 a product, and its collective, in four pieces by columns
    chunk("layers.*.mlp", 2, dim=1)       by rows, in each layer
    chunk("attention", 2, dim="heads")    attention and its all_to_all, in groups of heads

It is data and holds no code: `capture/rewrites/` carries it out, on the captured calls. A name is
that of ops, of modules (`layers.3.mlp.down_proj`, or its end, `down_proj`), of a mark, of what is
called (`linear`), or a pattern of these with `*`. An `Op` stands for itself: `=layers.3.mlp`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchweft.errors import StrategyError, clip
from torchweft.plan.graph import Op

MAX_PIECES, MAX_SHOWN = 64, 4
HEADS = "heads"
Names = str | Op | Sequence[str | Op]
TARGET = re.compile(r"=?[A-Za-z0-9_.$*?\[\]]{1,200}")


@dataclass(frozen=True)
class Rewrite:
    """What is to be done, to what, in how many pieces of which dim, and past what."""

    kind: str
    targets: tuple[str, ...]
    pieces: int = 1
    dim: int = -1
    past: tuple[str, ...] = ()

    def __str__(self) -> str:
        how = {
            "chunk": f", {self.pieces} pieces, dim {self.dim}",
            HEADS: f", {self.pieces} pieces by heads",
            "decompose": f", past {_shown(self.past) or 'nothing'}" * (self.past != ("*",)),
        }
        kind = "chunk" if self.kind == HEADS else self.kind
        return f"{kind}({_shown(self.targets)}{how.get(self.kind, '')})"


def chunk(what: Names, pieces: int, dim: int | str = -1) -> Rewrite:
    """A product and the collective that it feeds, cut into pieces: the first is on the wire while
    the next is computed. `what`: one name or op, or several.

    dim: of what the product makes. -1 are its columns, any other dim are rows. "heads": attention
    and the all_to_all before and behind it, in groups of heads. Pieces may be uneven. Raises
    `StrategyError`.
    """
    if not _is_int(pieces) or not 2 <= pieces <= MAX_PIECES:
        raise _wrong(f"chunk: the number of pieces must be 2 to {MAX_PIECES}; got {clip(pieces)}.")
    if dim == HEADS:
        return Rewrite(HEADS, _targets(what), pieces)
    if not isinstance(dim, int) or isinstance(dim, bool):
        why = f"dim must be a dim of the result, such as -1, or {HEADS!r}; got {clip(dim)}."
        raise _wrong(f"chunk: {why}")
    return Rewrite("chunk", _targets(what), pieces, dim)


def decompose(what: Names, past: Names | None = "*") -> Rewrite:
    """An all_reduce as a reduce_scatter and an all_gather on the same group, and what follows row
    by row between them, on each rank's share. `what`: one name or op, or several.

    past: the calls that may stand between the two: by default whatever treats each row by itself
    up to the next product; names such as "*norm*"; None for nothing. Raises `StrategyError`.
    """
    return Rewrite("decompose", _targets(what), past=_targets(past) if past is not None else ())


def fuse(what: Names) -> Rewrite:
    """Ops that stand one behind the other as one op: one body for the inner compiler, one op for
    a strategy. `what`: names or ops, two at the least in each layer. Raises `StrategyError`.
    """
    return Rewrite("fuse", _targets(what))


def _shown(targets: Sequence[str]) -> str:
    more = len(targets) - MAX_SHOWN
    return " ".join(targets[:MAX_SHOWN]).replace("=", "") + (
        f" and {more} more" if more > 0 else ""
    )


def _targets(what: Names) -> tuple[str, ...]:
    given = [what] if isinstance(what, str | Op) or not isinstance(what, Sequence) else what
    names = [f"={each.name}" if isinstance(each, Op) else each for each in given]
    for name in names:
        if not isinstance(name, str) or not TARGET.fullmatch(name):
            raise _wrong(
                f"rewrite: {clip(name)} is neither an op nor a name such as 'down_proj' or "
                "'layers.*.mlp'."
            )
    if not names:
        raise _wrong("rewrite: no op is named.")
    return tuple(names)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(why: str) -> StrategyError:
    return StrategyError(why, rule="rewrite")


def check_rewrites(given: object) -> tuple[Rewrite, ...]:
    """What was given, as rewrites. Raises `StrategyError`."""
    items = given if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for item in items:
        if not isinstance(item, Rewrite):
            raise _wrong(f"rewrite: {clip(item)} is none; weft.chunk('down_proj', 4) is one.")
    return tuple(items)
