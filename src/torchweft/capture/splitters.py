"""The `Splitter`: cuts the side state of a host into one state a part.

Side state is what calls read and write beside their arguments: attention metadata, KV slots,
positions, kept in a context of the host. A part must see its own rows of it:

    forward = Splitter(
        "forward", calls=r"host\\.attention",            which calls touch it
        current=host.get_context, enforce=host.set_context,
        fields={"positions": by_rows, "lengths": by_requests, "scale": shared},
    )
    weft.compile(model, "overlap", splitters=[forward])

    state --switch_for--> Switch: one state a range of parts; switch(2) puts the third in force

A field that no splitter knows is a `StateError` that names it. A splitter may refuse a call
(`RefusedError`): it runs whole, and the reason is counted. Ops that touch side state run in part
order, so what an earlier part of a request has written a later part may read; what one part reads
of the rows of *another* request that is written in the same call, `touched` tells, and the call is
not cut.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import accumulate, permutations
from pkgutil import resolve_name
from typing import Any

from torchweft.errors import RefusedError, StateError, StrategyError
from torchweft.plan.context import Context

STATE = "state."
"""What the name of a graph's input begins with that stands for side state."""
SOURCE = "_weft_source"
Span = tuple[int, int]
"""From a row or a part up to, not including, another."""


@dataclass(frozen=True)
class Parts:
    """The ranges of rows that one call runs on, and what the host told of the call."""

    context: Context
    rows: tuple[Span, ...]

    @cached_property
    def requests(self) -> tuple[Span, ...]:
        """For each range the requests that it has rows of. Raises `RefusedError` if not told."""
        borders = (0, *accumulate(self.context.tokens_per_request))
        if borders[-1] != self.context.batch:
            raise RefusedError("requests: the host has not told the tokens of each request")
        firsts = [bisect_right(borders, first) - 1 for first, _ in self.rows]
        ends = [bisect_left(borders, last) for _, last in self.rows]
        return tuple(zip(firsts, ends, strict=True))


Rule = Callable[[Any, Parts], Sequence[Any]]
"""How a field falls into parts: (its value, parts) -> a value for each. May raise `RefusedError`"""


def shared(value: Any, parts: Parts) -> Sequence[Any]:
    """The same for all parts."""
    return [value] * len(parts.rows)


def by_rows(value: Any, parts: Parts) -> Sequence[Any]:
    """One entry a row; a mapping is cut value by value, and None stays None."""
    return [_slice(value, span) for span in parts.rows]


def by_requests(value: Any, parts: Parts) -> Sequence[Any]:
    """One entry a request: a part sees the requests that it has rows of."""
    return [_slice(value, span) for span in parts.requests]


def each_value(cut: Callable[[Any, Any, Parts], Sequence[Any]]) -> Rule:
    """A mapping is cut value by value, by `cut(key, value, parts)`; one of several keys once."""

    def rule(mapping: Any, parts: Parts) -> Sequence[Any]:
        if not isinstance(mapping, Mapping):
            raise RefusedError(f"state: a {type(mapping).__name__} is there, and not a mapping")
        made = {id(value): cut(key, value, parts) for key, value in distinct(mapping)}
        return [
            {key: made[id(value)][number] for key, value in mapping.items()}
            for number in range(len(parts.rows))
        ]

    return rule


def distinct(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Each value of a mapping once, with the last key that has it."""
    return list({id(value): (key, value) for key, value in mapping.items()}.values())


def entering(
    current: Callable[[], Any], override: Callable[[Any], AbstractContextManager[Any]]
) -> Callable[[Any], None]:
    """An `enforce` by a context manager of the host, which is left where the next state comes."""
    entered = ExitStack()

    def enforce(state: Any) -> None:
        entered.close()
        if current() is not state:
            entered.enter_context(override(state))

    return enforce


def _slice(value: Any, span: Span) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {key: _slice(item, span) for key, item in value.items()}
    return value[span[0] : span[1]]


def blocks_touched(
    caches: Iterable[tuple[Sequence[Sequence[int]], Sequence[int], int]], parts: Parts
) -> list[tuple[set[int], set[int]]]:
    """For each part the blocks of paged caches that it finds filled, and those that it writes.

    caches: for each the blocks of every request, all tokens of every request, those of this call
    too, and how many of them a block has. A block that is found filled may belong to another
    request as well (prefix caching), which may be filling it in this very call.
    """
    tokens = parts.context.tokens_per_request
    touched: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in parts.rows]
    for tables, lengths, size in caches:
        for (first, last), (reads, writes) in zip(parts.requests, touched, strict=True):
            for at in range(first, last):
                filled = (lengths[at] - tokens[at]) // size
                reads.update(tables[at][:filled])
                writes.update(tables[at][filled : -(-lengths[at] // size)])
    return touched


@dataclass(frozen=True)
class Splitter:
    """Side state of one kind: where it is, which calls touch it, how each field is cut.

    calls: a regular expression on the targets of the calls that touch it (`host.attention`).
    by: the argument of these calls, such as a layer's name, that tells apart what they touch;
    without it a call may touch all of it, and has an op of its own.
    current: the state in force, a dataclass or a mapping; None where there is none, as at warm-up.
    enforce: puts a state in force.
    fields: how each field of the state falls into parts.
    touched: (state, parts) -> for each part what it reads and what it writes, as sets; without
    what it writes for its own requests.
    may_be_absent: whether a call without state may be cut; else it is refused.
    """

    name: str
    calls: str
    current: Callable[[], Any]
    enforce: Callable[[Any], None]
    fields: Mapping[str, Rule] = field(default_factory=dict, hash=False)
    touched: Callable[[Any, Parts], Sequence[tuple[Collection[Any], Collection[Any]]]] | None = None
    by: str = ""
    may_be_absent: bool = False

    def split(self, state: Any, parts: Parts) -> list[Any]:
        """The state of each part. Raises `StateError` and `RefusedError`."""
        items = _fields(self.name, state)
        cut = {name: self._cut(name, value, parts) for name, value in items.items()}
        touched = self.touched(state, parts) if self.touched is not None else ()
        for (reads, _), (_, writes) in permutations(touched, 2):
            if not set(reads).isdisjoint(writes):
                why = "a part reads what another part writes in the same call"
                raise RefusedError(f"state: {why} ({self.name!r})", rule="state")
        return [
            _with(state, {name: values[number] for name, values in cut.items()})
            for number in range(len(parts.rows))
        ]

    def _cut(self, name: str, value: Any, parts: Parts) -> Sequence[Any]:
        if name not in self.fields:
            known = ", ".join(sorted(self.fields)) or "none"
            raise self._error(
                name,
                f"no rule says how it falls into parts. Known: {known}. Give the splitter a "
                "rule for it: by_rows, by_requests, shared or a function.",
            )
        values = self.fields[name](value, parts)
        if len(values) != len(parts.rows):
            raise self._error(
                name, f"its rule made {len(values)} values for {len(parts.rows)} parts."
            )
        return values

    def _error(self, name: str, why: str) -> StateError:
        error = StateError(f"state: field {name!r} of {self.name!r}: {why}", rule="state")
        error.field = name
        return error


class Switch:
    """The side state of one call: `switch(number)` puts the state of a range in force, 0 the whole.

    As a context manager it leaves the whole state in force, whatever happens inside.
    """

    def __init__(self, splitters: Sequence[Splitter], states: Sequence[Sequence[Any]]) -> None:
        given = zip(splitters, states, strict=True)
        self.pairs = [(splitter.enforce, each) for splitter, each in given if each]

    def __call__(self, number: int) -> None:
        for enforce, states in self.pairs:
            enforce(states[number])

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, *error: object) -> None:
        self(0)


def switch_for(
    splitters: Sequence[Splitter], context: Context, bounds: Sequence[int], ranges: Sequence[Span]
) -> Switch:
    """The switch of a call whose parts have these row borders; `ranges` are ranges of parts.

    Raises `RefusedError` if a splitter will not cut the call, `StateError` for an unknown field.
    """
    parts = Parts(context, tuple((bounds[start], bounds[stop]) for start, stop in ranges))
    states = []
    for splitter in splitters:
        state = splitter.current()
        if state is None and not splitter.may_be_absent:
            raise RefusedError(f"state: there is no {splitter.name!r} in this call", rule="state")
        states.append([] if state is None else [state, *splitter.split(state, parts)])
    return Switch(splitters, states)


def keep_source(name: str) -> None:
    """Let all that a host's method makes know who made it, and of what: `source_of`.

    name: as in "package.module:Class.method". A host makes what lies on a device of what lies on
    the CPU: from there it is read without waiting for the device.
    """
    owner, _, method = name.rpartition(".")
    where = resolve_name(owner)
    stock = getattr(where, method)

    @wraps(stock)
    def make(maker: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(maker, given, *args, **kwargs)
        with suppress(AttributeError, TypeError):  # what takes no notes has no source
            object.__setattr__(made, SOURCE, (weakref.ref(made), maker, given))
        return made

    if not hasattr(stock, "__wrapped__"):
        setattr(where, method, make)


def source_of(made: Any) -> tuple[Any, Any]:
    """The maker and what it was given; twice None for what others made, or changed a copy of."""
    itself, *source = getattr(made, SOURCE, (lambda: None,))
    return (source[0], source[1]) if source and itself() is made else (None, None)


def check_splitters(splitters: Sequence[Splitter]) -> tuple[Splitter, ...]:
    """The splitters themselves. Raises `StrategyError` unless each has a name of its own."""
    for item in splitters:
        if not isinstance(item, Splitter) or not item.name.isidentifier():
            raise StrategyError(
                f"splitters must be Splitters whose names are identifiers; got {item!r}.",
                rule="option",
            )
    names = [item.name for item in splitters]
    if len(set(names)) < len(names):
        raise StrategyError(f"splitters must have different names; got {names}.", rule="option")
    return tuple(splitters)


def _fields(name: str, state: Any) -> Mapping[str, Any]:
    if isinstance(state, Mapping):
        return state
    if dataclasses.is_dataclass(state):
        return {item.name: getattr(state, item.name) for item in dataclasses.fields(state)}
    raise StateError(f"state: {name!r} is neither a dataclass nor a mapping.", rule="state")


def _with(state: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a state with other values."""
    if isinstance(state, Mapping):
        return dict(values)
    made = copy.copy(state)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
