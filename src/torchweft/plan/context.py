"""The `Context` of a call, the `Cut` of its batch, and the `Bucket` of batches that share a plan.

A context is what is known when a call arrives, and the only thing a strategy may decide by:

    batch             rows of this call (the size of the graph's batch symbol)
    num_tokens        tokens of this call; equal to the batch unless the host knows better
    tokens_per_request, phase   what a serving host adds: [512, 17, 1], "prefill" | "decode"
    sizes             values of the other symbols, e.g. {"s1": 128}
    strategy          the strategy that the host wants for this call, instead of the model's own

A plan holds a cut, fractions and not sizes, so one plan serves a whole bucket of batches:

    1/2 1/2               two parts of equal size, whatever the batch
    1/4 1/4 1/2           uneven parts are normal
    1/2 1/2 at requests   each border moves to the nearest border between two requests
    1/2 1/2 at phases     two parts: the requests of one token (decode), and the others (prefill)

A strategy runs once a bucket, not on every call. By default a bucket is a power of two of tokens,
cut where the strategy itself looked: while it writes, the numbers of its context remember what they
were compared with (`if s.context.num_tokens < 4096` cuts at 4096).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from torchweft.errors import StrategyError, clip, unknown

if TYPE_CHECKING:
    from torchweft.plan.graph import Graph
    from torchweft.plan.write.strategy import Strategy


RULES = ("requests", "phases")
MAX_PARTS = 1024
POSSIBLE = f"the number of parts must be whole, from 1 to {MAX_PARTS}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Fractions of the batch, one a part, that add up to one; `rule` moves the borders."""

    fractions: tuple[Fraction, ...] = (Fraction(1),)
    rule: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.fractions) <= MAX_PARTS:
            raise StrategyError(f"split: {POSSIBLE}; got {len(self.fractions)}.")
        if any(fraction <= 0 for fraction in self.fractions) or sum(self.fractions) != 1:
            raise StrategyError(f"split: parts must be positive and add up to 1; got {clip(self)}.")
        if self.rule is not None and self.rule not in RULES:
            raise StrategyError(f"split: {unknown('rule', self.rule, RULES)}")
        if self.rule == "phases" and len(self.fractions) != 2:
            raise StrategyError(f"split: there are two phases; got {len(self.fractions)} parts.")

    @staticmethod
    def even(num_parts: int, rule: str | None = None) -> Cut:
        """Parts of equal size."""
        if not isinstance(num_parts, int) or not 1 <= num_parts <= MAX_PARTS:
            raise StrategyError(f"split: {POSSIBLE}; got {clip(num_parts)}.")
        return Cut((Fraction(1, num_parts),) * num_parts, rule)

    @staticmethod
    def sizes(sizes: Sequence[int]) -> Cut:
        """Parts in the proportion of `sizes`."""
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
            got = clip(list(sizes))
            raise StrategyError(f"split: sizes must be whole numbers, from 1 on; got {got}.")
        return Cut(tuple(Fraction(size, sum(sizes)) for size in sizes))

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self.fractions)

    def __str__(self) -> str:
        rule = f" at {self.rule}" if self.rule else ""
        return " ".join(map(str, self.fractions)) + rule

    def bounds(
        self, num_rows: int, requests: Sequence[int] = (), unit: int = 1, *, empty: bool = False
    ) -> tuple[int, ...]:
        """Row borders 0 = b0 < b1 < ... = num_rows; `requests` are the rows of each request.

        unit: borders are multiples of it (`Graph.row_unit`). empty: parts may have no rows. Raises
        `StrategyError` where there are fewer rows (or requests) than parts otherwise, or rows that
        do not divide by the unit.
        """
        if num_rows % unit and self.num_parts > 1:
            raise StrategyError(
                f"split: parts are multiples of {unit} rows here; the batch has {num_rows}."
            )
        ends = list(accumulate(self.fractions))[:-1]
        inner = [round(end * num_rows / unit) * unit for end in ends]
        if self.rule and sum(requests) != num_rows:
            raise StrategyError(
                f"split: requests of {sum(requests)} rows in a batch of {num_rows}."
            )
        borders = list(accumulate(requests))[:-1] or [0]
        if self.rule == "requests":
            borders = [at for at in borders if at % unit == 0] or [0]
            inner = [min(borders, key=lambda at: abs(at - want)) for want in inner]
        if self.rule == "phases":
            pairs = zip(borders, pairwise(requests), strict=False)
            inner = [at for at, (left, right) in pairs if (left == 1) != (right == 1)]
            if len(inner) == 1 and inner[0] % unit:
                why = f"parts are multiples of {unit} rows here"
                raise StrategyError(f"split: {inner[0]} rows are of one phase, and {why}.")
            if len(inner) != 1:
                told = "decode requests and prefill requests, one kind behind the other"
                raise StrategyError(f"split: a batch is cut at phases if it has {told}.")
        bounds = (0, *inner, num_rows)
        if any(end < start + (not empty) for start, end in pairwise(bounds)):
            what = f"{len(requests)} requests" if self.rule else f"{num_rows} rows"
            units = f" of a multiple of {unit} rows" if unit > 1 else ""
            raise StrategyError(
                f"split: {what} cannot make {self.num_parts} parts{units} ({self})."
            )
        return bounds


@dataclass(frozen=True)
class HostFacts:
    """What the host knows of a call beyond its shapes."""

    phase: str | None = None
    tokens_per_request: tuple[int, ...] = ()
    num_tokens: int = 0
    strategy: Strategy | None = None


def phase_of(tokens_per_request: Sequence[int]) -> str:
    """What a step of a serving host does: a token a request is decode, one of several is mixed."""
    if max(tokens_per_request) == 1:
        return "decode"
    return "mixed" if min(tokens_per_request) == 1 else "prefill"


TOLD: ContextVar[HostFacts | None] = ContextVar("weft context", default=None)
"""What the host says about the calls of this thread: `with weft.context(...)`."""


@dataclass(frozen=True)
class Context:
    """What is known when a call arrives."""

    batch: int = 1
    num_tokens: int = 0
    tokens_per_request: tuple[int, ...] = ()
    phase: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        for number in (self.batch, self.num_tokens, *self.tokens_per_request):
            if not isinstance(number, int) or number < 0:
                text = f"numbers of rows and tokens must be whole, from 0 on; got {number!r}"
                raise StrategyError(f"context: {text}.")
        if not self.num_tokens:
            object.__setattr__(self, "num_tokens", sum(self.tokens_per_request) or self.batch)

    def env(self, symbol: str | None, rows: int | None = None) -> dict[str, int]:
        """Values for all symbols; the batch symbol stands for `rows` (default: the batch)."""
        env = dict(self.sizes)
        if symbol is not None:
            env[symbol] = self.batch if rows is None else rows
        return env


EXACT_BELOW = 4
"""Smaller batches have a bucket each: one row more or less decides whether they can be split."""


def _noting(compare: Callable[[Any, Any], bool], *borders: int) -> Any:
    """A comparison that notes the numbers at which it changes its answer."""

    def method(number: WatchedNumber, other: Any) -> bool:
        if isinstance(other, int | float) and abs(other) < 2**62:
            number.seen |= {math.floor(other) + 1 if at else math.ceil(other) for at in borders}
        return compare(int(number), other)

    return method


class WatchedNumber(int):
    """A number that remembers what it was compared with."""

    seen: set[int | Band]

    __lt__, __ge__ = _noting(operator.lt, 0), _noting(operator.ge, 0)
    __le__, __gt__ = _noting(operator.le, 1), _noting(operator.gt, 1)
    __eq__ = _noting(operator.eq, 0, 1)
    __hash__ = int.__hash__


MAX_SLACK = 0.5


class Band(NamedTuple):
    """Numbers from `first` to below `border`, where a plan for either side of the border serves."""

    first: int
    border: int


def at_least(number: int, border: int, slack: float) -> bool:
    """Whether a number of a context reaches a border, with a band below it."""
    if isinstance(number, WatchedNumber):
        number.seen.add(Band(math.ceil(border * (1 - slack)), border))
    return int(number) >= border


@dataclass(frozen=True)
class Bucket:
    """Batches from `first` up to, not including, `end`.

    bands: in these it is not the only one; the plan that was used last serves on.
    """

    first: int
    end: int
    bands: tuple[Band, ...] = ()

    def wavers(self, batch: int) -> bool:
        """Whether a call of this batch may have to look which plan was used last."""
        return any(band.first <= batch < band.border for band in self.bands)

    def meets(self, other: Bucket) -> bool:
        """Whether some batch is in both."""
        return self.first < other.end and other.first < self.end

    def __contains__(self, batch: int) -> bool:
        return self.first <= batch < self.end

    def __str__(self) -> str:
        return f"{self.first}..{self.end - 1}" if self.end > self.first + 1 else str(self.first)


def watch(context: Context) -> tuple[Context, set[int | Band]]:
    """The same context with numbers that remember, and what they will have seen."""
    seen: set[int | Band] = set()

    def watched(number: int) -> WatchedNumber:
        watching = WatchedNumber(number)
        watching.seen = seen
        return watching

    return replace(
        context, batch=watched(context.batch), num_tokens=watched(context.num_tokens)
    ), seen


def bucket_of(context: Context, seen: set[int | Band]) -> Bucket:
    """The batches for which a strategy that saw these numbers does the same."""
    batch = int(context.batch)
    if batch < EXACT_BELOW or int(context.num_tokens) != batch:
        return Bucket(batch, batch + 1)
    first = 1 << (batch.bit_length() - 1)
    bands = tuple(sorted(each for each in seen if isinstance(each, Band)))
    hard = {each for each in seen if isinstance(each, int)}
    cuts = {*hard, *(band.border for band in bands)}
    lower = max([first, *(cut for cut in cuts if cut <= batch)])
    end = min([2 * first, *(cut for cut in cuts if cut > batch)])
    for band in bands:  # a plan from above a border serves in the band below it, too
        if band.first < lower <= band.border <= batch:
            lower = max([band.first, EXACT_BELOW, *(cut for cut in hard if cut <= lower)])
    return Bucket(lower, end, bands)


def context_of(graph: Graph, env: Mapping[str, int]) -> Context:
    """The context of a call: its sizes, and what the host told of it."""
    facts, rows = TOLD.get(), env.get(graph.batch or "", 1)
    sizes = {name: size for name, size in env.items() if name != graph.batch}
    if facts is None:
        return Context(rows, sizes=sizes)
    requests = facts.tokens_per_request if sum(facts.tokens_per_request) == rows else ()
    phase = facts.phase or (phase_of(requests) if requests else None)
    return Context(rows, facts.num_tokens, requests, phase, sizes, facts.strategy)
