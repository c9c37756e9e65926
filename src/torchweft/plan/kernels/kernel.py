"""A `Kernel`: a user's function in the place of ops, with what it declares.

    @weft.kernel                                    one phase, says nothing to other ranks
    def fused(x, weight): ...

    weft.kernel(                                    two phases, which both talk
        issue=scatter, complete=gather,
        talks=[("reduce_scatter", "issue"), ("all_gather", "complete")],
    )

A function without a declaration says nothing, so it may not stand in the place of a collective.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchweft.errors import StrategyError, clip, unknown
from torchweft.plan.graph import NAME
from torchweft.plan.kernels.declaration import PATTERN, PHASES, SPEECH, Declaration

Talks = Sequence[str | tuple[str, str]]


@dataclass(frozen=True)
class Kernel:
    """A user's function, or two of them, with the declaration; None: a function that made none."""

    name: str
    function: Callable[..., Any] | None = None
    issue: Callable[..., Any] | None = None
    complete: Callable[..., Any] | None = None
    declaration: Declaration | None = None

    def called(self, name: str) -> Kernel:
        """The same kernel by another name, for two of a plan may have one."""
        own = self.declaration._replace(name=name) if self.declaration is not None else None
        return Kernel(name, self.function, self.issue, self.complete, own)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """What the function gives, for its author to try it; a plan calls the phases itself."""
        if self.function is not None:
            return self.function(*args, **options)
        raise TypeError(f"kernel {self.name!r} has two phases: call .issue, then .complete.")


def kernel(
    function: Callable[..., Any] | None = None,
    *,
    issue: Callable[..., Any] | None = None,
    complete: Callable[..., Any] | None = None,
    talks: Talks = (),
    reads: Sequence[str] | None = None,
    writes: Sequence[str] = (),
    name: str | None = None,
) -> Any:
    """A declared kernel for `s.run(ops, part, replace=kernel)`: `docs/kernels.md`.

    One function, or `issue` and `complete`; without any of them this is a decorator. A phase that
    talks is given `group=`, the process group to talk on. Raises `StrategyError`.
    """
    if function is None and issue is None and complete is None:
        return lambda given: kernel(given, talks=talks, reads=reads, writes=writes, name=name)
    given = [each for each in (function, issue, complete) if each is not None]
    if len(given) != (1 if function is not None else 2) or not all(map(callable, given)):
        raise _wrong("give one function, or issue= and complete=, which are functions.")
    said = tuple((talk, PHASES[0]) if isinstance(talk, str) else tuple(talk) for talk in talks)
    phases = PHASES if issue is not None else PHASES[:1]
    for talk in said:
        if len(talk) != 2 or talk[1] not in phases:
            ways = " or ".join(repr(("all_reduce", phase)) for phase in phases)
            raise _wrong(f"of talks, {clip(talk)} is not like {ways}.")
        if talk[0] not in SPEECH:
            raise _wrong(unknown("talk", talk[0], SPEECH))
    for what, patterns in (("reads", reads or ()), ("writes", writes)):
        if isinstance(patterns, str) or not all(re.fullmatch(PATTERN, str(p)) for p in patterns):
            raise _wrong(f"{what} must be names of values, or patterns such as ['norm*']; got "
                         f"{clip(patterns)}.")  # fmt: skip
    own = name or _name_of(function or complete)
    told = None if reads is None else tuple(reads)
    declared = Declaration(own, len(phases), told, tuple(writes), said)  # type: ignore[arg-type]
    return Kernel(own, function, issue, complete, declared)


def as_kernel(given: Any) -> Kernel:
    """A kernel from itself, or from any function. Raises `StrategyError`."""
    if isinstance(given, Kernel):
        return given
    if not callable(given):
        raise _wrong(f"{clip(given)} is neither a function nor a name.")
    return Kernel(_name_of(given), given)


def _name_of(function: object) -> str:
    name = str(getattr(function, "__name__", "kernel"))
    return name if NAME.fullmatch(name) else "kernel"


def _wrong(why: str) -> StrategyError:
    return StrategyError(f"kernel: {why}", rule="kernel")
