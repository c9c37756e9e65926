"""The `Speaker`: a compiled model as the ranks of a process group know it.

    with speaker: model(x)          its talks in this call are counted, group by group
    speaker.claim(roles)            the number that tells it from the other models of this process

Nothing in a model is surely equal on all ranks: weights are sharded, and a pipeline has other
modules on every rank. So ranks give each other's models a common number, its *role*, when they are
first called together, and hold each other to it. Until then a model claims its name and its place
among the compiled models of that name. Claims that differ are a swap only if each rank has another
model for what the other one claims; else they are models that belong together, and take one role.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from types import CodeType
from typing import Any, Protocol

import torch

_numbers = itertools.count()
_speakers: weakref.WeakValueDictionary[int, Speaker] = weakref.WeakValueDictionary()
Roles = MutableMapping["Speaker", int]
"""The numbers that the ranks of one group have given to their models."""


FIRST_COSTS = 4
"""The talk of a model in which ranks first agree on what its ops cost; then they do at 8, 16 ..."""


class AgreedCosts(Protocol):
    """The costs of a model's ops, to be the same on all ranks."""

    def wanted(self) -> bool:
        """Whether this rank has plans that depend on them."""
        ...

    def tell(self) -> bytes:
        """What was seen here."""
        ...

    def hear(self, told: Sequence[bytes], where: str) -> None:
        """Take what all ranks have seen."""
        ...

    def note_trace(self, entry: Any) -> None:
        """A plan was traced by a model that talks with nobody."""
        ...


class Speaker:
    """One compiled model of this process. A model that is compiled again stays the same one."""

    def __init__(self, name: str = "a graph of torch.compile") -> None:
        self.name = name
        self.talked = self.is_silent = False
        self.wanted: int | None = None  # the share of calls that the ranks are still to agree on
        self.share: int | None = None  # what they agreed on last; None as long as it is all
        self.costs: AgreedCosts | None = None
        self.costs_name = ""  # which costs were given to it, as errors say it
        self._here = threading.local()
        _speakers[next(_numbers)] = self

    def __enter__(self) -> None:
        self._here.talks = {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._here.talks = None
        self.is_silent = not self.talked and error is None

    def place(self, group: str) -> int:
        """How many talks of the present call have been on a group before; 0 outside of calls."""
        self.talked = True
        talks: dict[str, int] | None = getattr(self._here, "talks", None)
        if talks is None:  # a backward graph, or a model that Dynamo alone calls
            return 0
        talks[group] = talks.get(group, -1) + 1
        return talks[group]

    def asks_costs(self, number: int) -> bool:
        """Whether this talk of the model is one in which it wants to agree on costs."""
        due = number >= FIRST_COSTS and number & (number - 1) == 0
        return due and self.costs is not None and self.costs.wanted()

    def agree_on_costs(
        self, gather: Callable[[Sequence[float], torch.dtype], torch.Tensor], where: str
    ) -> None:
        """Tell all ranks what was seen here, and take what they have; each of them is here."""
        assert self.costs is not None, "only who asks for costs agrees on them"
        mine = self.costs.tell()
        size = int(gather([len(mine)], torch.int64).max())
        rows = gather([*mine.ljust(size)], torch.uint8)
        self.costs.hear([bytes(row) for row in rows.tolist()], where)

    def claim(self, roles: Roles) -> int:
        """Its role, from 1 on; below 0 if it has none yet: then its name and its place tell it.

        Models that were called and never talked to anybody have no place.
        """
        return roles.get(self) or -number_of(f"{self.name} {self._peers(roles).index(self)}")

    def _peers(self, roles: Roles) -> list[Speaker]:
        """The models of its name that have no role yet and may have one to come; itself too."""
        peers = [s for s in _living() if s.name == self.name and s not in roles]
        return [s for s in peers if s is self or not s.is_silent]

    def first_claim(self, roles: Roles) -> int:
        """Its claim before it has a role.

        Models that are gone on other ranks may still await collection here: that is done first.
        """
        if len(self._peers(roles)) > 1:
            gc.collect()
        return self.claim(roles)

    def has_other(self, claim: int, roles: Roles) -> bool:
        """Whether this process has another model that would make a claim."""
        others = [s for s in _living() if s is not self and not s.is_silent]
        return any(other.claim(roles) == claim for other in others)


def _living() -> list[Speaker]:
    """All models of this process, in the order in which they were compiled."""
    return [s for reference in _speakers.valuerefs() if (s := reference()) is not None]


def number_of(text: str) -> int:
    """63 bits that tell texts apart, and not one of the first few numbers."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    return number | 1 << 62


def stable_name(thing: Callable[..., Any]) -> str:
    """What a function, class or callable object is called; the same in every process.

    What is bound to it (a rank, a group, a tensor) does not count, for ranks differ there. Code
    counts, so that two lambdas differ.
    """
    while isinstance(thing, functools.partial):
        thing = thing.func
    inner = getattr(thing, "__func__", thing)
    if not isinstance(getattr(inner, "__name__", None), str):
        return f"an object of {stable_name(type(inner))}"
    module = str(getattr(inner, "__module__", "")).replace("__mp_main__", "__main__")
    name = f"{module}.{getattr(inner, '__qualname__', inner.__name__)}"
    owner = getattr(thing, "__self__", None)
    if inner is not thing and not inspect.isclass(owner):
        name = f"{name} of {stable_name(type(owner))}"
    code = getattr(inner, "__code__", None)
    return f"{name} {_code(code)}" if isinstance(code, CodeType) else name


def _code(code: CodeType) -> str:
    plain = [c for c in code.co_consts if isinstance(c, int | float | complex | str | bytes)]
    inside = [_code(c) for c in code.co_consts if isinstance(c, CodeType)]
    text = repr((code.co_code, code.co_names, code.co_varnames, plain, inside))
    return f"(line {code.co_firstlineno}, {number_of(text):016x})"
