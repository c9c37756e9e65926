"""The programs of these tests, and the lines in them that findings must name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchweft_tools.dryrun.calls import RankCalls

PROGRAMS = Path(__file__).with_name("programs")
Dry = Callable[..., tuple[int, tuple[RankCalls, ...]]]


def here(program: str, function: str) -> str:
    """FILE:LINE of the line that says "here", in a function or class of a program."""
    path = PROGRAMS / program
    inside = False
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text.startswith(("def ", "class ")):
            inside = text.split()[1].startswith(function + "(")
        if inside and "# here" in text:
            return f"{path}:{number}"
    raise AssertionError(f"{function} in {program} has no line that says here")
