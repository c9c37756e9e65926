"""The `Calls` of a body: what it does, call by call, so that a program can do it without the body.

    l0 = k0(v3, v1)         a function is a constant of the program; reads are its variables
    v4 = l0.relu()          the last name is that of the make
    l0 = None               nothing is kept longer than the body itself would

To call a body costs a frame, a tuple, and a look-up for every name in it. Where ops are tiny that
is most of what a call costs beyond its kernels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"\{?\w+\}?|z\[\d+\]")


@dataclass(frozen=True)
class Calls:
    """Lines in which `{0}` is an argument of the body, `{k0}` a constant, `{l0}` what is made.

    makes: what the body's makes are called in the lines.
    """

    lines: tuple[str, ...]
    constants: tuple[Any, ...]
    makes: tuple[str, ...]

    def write(
        self,
        arguments: Sequence[str],
        targets: Sequence[str],
        constant: Callable[[Any], str],
    ) -> list[str] | None:
        """The lines of a program, where makes go to the targets; None if it must call the body.

        An argument is written as often as it is used, so it has to be a name. constant: the name
        of a constant in the program.
        """
        if not all(NAME.fullmatch(argument) for argument in arguments):
            return None
        names = {f"l{number}": f"l{number}" for number in range(len(self.lines))}
        names |= {f"k{number}": constant(value) for number, value in enumerate(self.constants)}
        names |= dict(zip(self.makes, targets, strict=True))
        return [line.format(*arguments, **names) for line in self.lines]
