"""The `Declaration`: what a plan knows of a kernel. It is data, and a line in the head of the plan:

kernel gather phases 2 reads a*,w writes a* talks reduce_scatter@issue,all_gather@complete

phases    1: a function; 2: one starts it, another one completes it
reads     the values it is given, by name or pattern, in this order (default: all that its ops
          read from outside, in their order); a weight of the graph may be among them
writes    those of its reads whose bytes it may use up: nobody else wants them
talks     what it says to the ranks of the collectives that it replaces, phase by phase
"""

from __future__ import annotations

from typing import NamedTuple

from torchweft.plan.graph import NAME

CUSTOM = "custom"
SPEECH = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
    "scatter", "barrier", CUSTOM,
)  # fmt: skip
"""What a kernel may say to all ranks of a group; custom: what torch.distributed does not see."""
PHASES = ("issue", "complete")
PATTERN = r"[A-Za-z0-9_.$*?]{1,200}"
_LIST = rf"{PATTERN}(?:,{PATTERN})*"
_TALK = rf"(?:{'|'.join(SPEECH)})@(?:{'|'.join(PHASES)})"
LINE = (
    rf"({NAME.pattern})(?: phases (2))?(?: reads ({_LIST}))?(?: writes ({_LIST}))?"
    rf"(?: talks ({_TALK}(?:,{_TALK})*))?"
)


class Declaration(NamedTuple):
    """What a plan knows of a kernel: see the module. reads: None means all."""

    name: str
    phases: int = 1
    reads: tuple[str, ...] | None = None
    writes: tuple[str, ...] = ()
    talks: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        words = [self.name, *(["phases 2"] if self.phases == 2 else [])]
        words += [f"reads {','.join(self.reads)}"] if self.reads is not None else []
        words += [f"writes {','.join(self.writes)}"] if self.writes else []
        words += [f"talks {','.join(map('@'.join, self.talks))}"] if self.talks else []
        return " ".join(words)


def read_declaration(
    name: str, phases: str | None, reads: str | None, writes: str | None, talks: str | None
) -> Declaration:
    """The declaration of a line that `LINE` has matched."""
    pairs = [talk.split("@") for talk in talks.split(",")] if talks else []
    return Declaration(
        name, 2 if phases else 1, tuple(reads.split(",")) if reads else None,
        tuple(writes.split(",")) if writes else (), tuple((kind, phase) for kind, phase in pairs),
    )  # fmt: skip
