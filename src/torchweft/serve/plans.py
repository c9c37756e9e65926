"""The `PlanCache`: the plans of one captured graph, by the context of a call.

    context --bucket--> entry: plan, program, calls     strategy, lower, verify, compile: once
            --sizes---> shape: borders, sizes, digests  computed once, for sizes come again

A call that cannot be split gets the sequential plan and the reason; who asked counts it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torchweft.capture.dynamo import Capture
from torchweft.capture.failures import as_own, first_line
from torchweft.capture.guards import Guards
from torchweft.errors import StrategyError, WeftError
from torchweft.options import Options
from torchweft.plan.context import TOLD, Bucket, Context, bucket_of, watch
from torchweft.plan.cost import Costs
from torchweft.plan.graph import Graph
from torchweft.plan.lower.lower import lower
from torchweft.plan.plan import Plan
from torchweft.plan.strategies import sequential
from torchweft.plan.trace import Trace
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import Strategy
from torchweft.plan.write.write import write
from torchweft.ranks.talk import digests
from torchweft.run.eager.build import check_steps

MAX_ENTRIES = 256
MAX_SHAPES = 4096


class CallShape(NamedTuple):
    """Row borders of the parts, sizes that bodies need, digests of the collectives by group.

    refused: why the call must not be cut at these borders; empty if it may.
    """

    bounds: tuple[int, ...]
    numbers: tuple[int, ...]
    digests: dict[str, int]
    refused: str = ""


@dataclass
class PlanEntry:
    """A plan in use, with its program and what calls have shown of it."""

    plan: Plan
    program: Any
    bucket: Bucket
    facts: tuple[object, ...] = ()
    num_calls: int = 0
    trace: Trace | None = None
    shapes: dict[object, CallShape] = field(default_factory=dict)


class PlanCache:
    """The plans of one graph. Calls may come from several threads.

    one_lane: whether plans with parts must use one lane, for side state is in force in one thread.
    """

    def __init__(
        self,
        graph: Graph,
        captured: Capture,
        guards: Guards,
        options: Options,
        compile: Callable[[Plan], Any],
        *,
        one_lane: bool = False,
    ) -> None:
        self.graph, self.captured, self.guards, self.options = graph, captured, guards, options
        self.compile, self.one_lane = compile, one_lane
        self.entries: list[PlanEntry] = []
        self.strategy_runs = 0
        self._known: dict[object, tuple[PlanEntry, str]] = {}
        self._sequential: PlanEntry | None = None
        self._talks = any(op.collective is not None for op in graph.ops)
        self._lock = threading.Lock()

    def all_entries(self) -> list[PlanEntry]:
        """The entries in use, the fallback last."""
        return [*self.entries, *([self._sequential] if self._sequential is not None else [])]

    def forget(self) -> None:
        """Forget all plans: the next call writes a new one."""
        with self._lock:
            self._known.clear()
            self.entries.clear()

    def entry(self, context: Context, env: Mapping[str, int]) -> tuple[PlanEntry, str]:
        """The plan for a call; with the reason if it is not the strategy's own."""
        key = (context.batch, context.num_tokens, *_facts(context))
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._find(context)
                remember(self._known, key, known)
        entry, reason = known
        if not reason and entry.plan.num_parts > 1:
            try:
                reason = self.shape(entry, context, env).refused
            except WeftError as error:
                reason = str(error)
        return (self.sequential(context) if reason else entry), reason

    def sequential(self, context: Context) -> PlanEntry:
        """The plan that needs no split; it serves every batch."""
        if self._sequential is None:
            plan = self.plan(sequential, context)
            self._sequential = PlanEntry(plan, self.compile(plan), Bucket(0, 2**62))
        return self._sequential

    def shape(self, entry: PlanEntry, context: Context, env: Mapping[str, int]) -> CallShape:
        """Borders, sizes and digests of a call."""
        # Requests count only where the cut looks at them.
        key = (*env.values(), context.tokens_per_request if entry.plan.cut.rule else ())
        shape = entry.shapes.get(key)
        if shape is None:
            rows, plan = env.get(self.graph.batch or "", 1), entry.plan
            bounds: tuple[int, ...] = (0, rows)
            refused = ""
            if plan.num_parts > 1:
                bounds = plan.cut.bounds(rows, context.tokens_per_request)
                refused = self._refusal(bounds, env)
            shape = CallShape(bounds, (), {}, refused)
            if not refused:
                said = digests(plan, self.captured.bodies, env, bounds) if self._talks else {}
                shape = CallShape(bounds, entry.program.numbers(env, bounds), said)
            remember(entry.shapes, key, shape)
        return shape

    def plan(self, strategy: Strategy, context: Context) -> Plan:
        """A verified plan for a context."""
        costs = Costs(self.options.resolved_machine)
        try:
            bare = write(strategy, self.graph, context, costs.machine, costs=costs)
        except StrategyError as error:
            if error.rule == "split" and self.graph.batch is None:
                raise StrategyError(f"{first_line(error)} {self.captured.unbatched}") from error
            raise
        if self.graph.level == "boundary":
            check_steps(bare)
        return verify(lower(bare))

    def _find(self, context: Context) -> tuple[PlanEntry, str]:
        """An entry whose bucket fits, or a new one; with the reason if it is the fallback."""
        facts = _facts(context)
        for entry in self.entries:
            if context.batch in entry.bucket and entry.facts == facts:
                return entry, ""
        try:
            return self._write(context.strategy or self.options.resolved_strategy, context), ""
        except Exception as error:
            own = as_own(error, "plan")
            if self.options.fallback == "error":
                raise own from error
            return self.sequential(context), first_line(own)

    def _write(self, strategy: Strategy, context: Context) -> PlanEntry:
        watched, seen = watch(context)
        self.strategy_runs += 1
        plan = self.plan(strategy, watched)
        if plan.num_parts > 1 and all(op.whole for op in self.graph.ops):
            reasons = self.captured.reasons
            why = next((reasons[op.name] for op in self.graph.ops if op.name in reasons), "no rows")
            raise StrategyError(f"split: no op of {self.graph.name!r} may be split: {why}")
        lanes = sorted({step.lane for step in plan.steps})
        if self.one_lane and plan.num_parts > 1 and len(lanes) > 1:
            raise StrategyError(
                f"state: a plan with splitters must use one lane; this one uses {', '.join(lanes)}."
            )
        entry = PlanEntry(plan, self.compile(plan), bucket_of(context, seen), _facts(context))
        if len(self.entries) >= MAX_ENTRIES:
            self.entries.pop(0)
        self.entries.append(entry)
        return entry

    def _refusal(self, bounds: Sequence[int], env: Mapping[str, int]) -> str:
        """Why a call cannot be cut at these borders; empty if it can."""
        batch = self.graph.batch
        assert batch is not None, "a graph without a batch is not split"
        if not self.captured.splits(env):
            return "batch: the sizes that were taken for one batch differ in this call"
        for start, stop in pairwise(bounds):
            if broken := self.guards.refuse({**env, batch: stop - start}):
                return f"guard: a part of {stop - start} rows breaks {broken}"
        return ""


def context_of(graph: Graph, env: Mapping[str, int]) -> Context:
    """The context of a call: its sizes, and what the host told of it."""
    facts, rows = TOLD.get(), env.get(graph.batch or "", 1)
    sizes = {name: size for name, size in env.items() if name != graph.batch}
    if facts is None:
        return Context(rows, sizes=sizes)
    requests = facts.tokens_per_request if sum(facts.tokens_per_request) == rows else ()
    return Context(rows, facts.num_tokens, requests, facts.phase, sizes, facts.strategy)


def remember(memory: dict[object, Any], key: object, value: Any) -> None:
    """Remember a value; a memory that has grown too large is emptied first."""
    if len(memory) >= MAX_SHAPES:
        memory.clear()
    memory[key] = value


def _facts(context: Context) -> tuple[object, ...]:
    """What the host told that makes another plan: phase, strategy, whether it knows requests.

    How many tokens each request has does not: it is new at every step, and a cut by rule binds it.
    """
    return context.phase, bool(context.tokens_per_request), context.strategy
