"""What goes wrong: one class a kind, all of them `WeftError`.

An error says, in this order: the broken rule, where, an excerpt with an arrow, the cure.
Callers that want the facts read the fields (`rule`, `lane`, `step`, `source`), not the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class WeftError(Exception):
    """Any mistake that Weft found in what it was given."""

    def __init__(
        self,
        message: str,
        *,
        rule: str = "",
        lane: str | None = None,
        step: int | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rule = rule or message.partition(":")[0]
        self.lane = lane
        self.step = step
        self.source = source


class SizeError(WeftError):
    """A size is not an integer expression of known symbols."""


class GraphError(WeftError):
    """A graph that contradicts itself, or a graph file that is not one."""


class MachineError(WeftError):
    """A machine, lane, link or cost table that cannot exist, or a file that is none."""


class CaptureError(WeftError):
    """A model could not be turned into a graph; names the call and its source line."""


class PlacementError(WeftError):
    """No legal placement of the ops on the devices."""


class StrategyError(WeftError):
    """A strategy asked for something impossible; raised at the offending call."""


class StateError(WeftError):
    """Side state that no splitter knows how to cut; `field` names what is unknown."""

    field: str = ""


class RefusedError(WeftError):
    """A splitter will not cut this call: it runs whole, and the reason is counted."""


class MemoryPlanError(WeftError):
    """A plan holds more than a device does, or values cannot have the places that it needs."""


class PlanError(WeftError):
    """A plan is unsafe or unreadable; `step` is the index of the step at fault."""


class RunError(WeftError, RuntimeError):
    """A verified plan failed while running; `story` is what each lane had done."""

    def __init__(self, message: str, *, rule: str = "run", story: str = "", **where: Any) -> None:
        super().__init__(f"{message}\n{story}" if story else message, rule=rule, **where)
        self.story = story


def unknown(what: str, name: object, choices: Iterable[str]) -> str:
    """The sentence for an unknown name: it lists the choices, the likeliest first."""
    known = sorted(choices)
    asked = str(name)[:100]
    near = [choice for choice in known if len(known) <= 1000 or choice[:2] == asked[:2]]
    near = [choice for choice in near[:1000] if len(choice) <= 100]  # else it would take seconds
    close = get_close_matches(asked, near, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    listed = ", ".join(known[:40]) + (" ..." if len(known) > 40 else "")
    return f"unknown {what} {clip(name)}.{hint} Known: {listed or 'none'}."


def clip(text: object, limit: int = 80) -> str:
    """`text` as a quoted literal, cut to `limit` characters: safe to print, whatever it holds."""
    literal = repr(str(text))
    return literal if len(literal) <= limit else literal[: limit - 4] + "...'"


def excerpt(lines: Sequence[str], at: int, *, around: int = 3, count_from: int = 0) -> str:
    """The lines next to line `at`, numbered, with an arrow at it."""
    first, last = max(0, at - around), min(len(lines), at + around + 1)
    width = max((len(line) for line in lines[first:last]), default=0)
    shown = []
    for number in range(first, last):
        arrow = "   <-- here" if number == at else ""
        shown.append(f"  {number + count_from:>5}  {lines[number]:<{width}}{arrow}".rstrip())
    return "\n".join(shown)
