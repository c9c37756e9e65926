"""A `Piece`: one captured graph of a model, called in its place.

    inputs --sizes--> ready: program, borders --run--> outputs       a steady call: one look-up
           --context--> `PlanCache` --> entry --run--> outputs       the first of these sizes

A model with graph breaks has several pieces. A call that cannot be split runs the sequential plan,
and the reason is counted; nothing is ever changed in silence.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx

from torchweft.capture.bodies.bodies import Body
from torchweft.capture.bodies.inner import TrustedInputs, compile_bodies, trusted_inputs
from torchweft.capture.dynamo import Capture
from torchweft.capture.failures import FAILURE, as_own, first_line
from torchweft.capture.guards import guards_of, shared_bytes
from torchweft.capture.splitters import STATE, Switch, switch_for
from torchweft.errors import (
    CaptureError,
    RefusedError,
    RunError,
    StateError,
    StrategyError,
    WeftError,
)
from torchweft.plan.context import TOLD, Bucket, Context, bucket_of, context_of, watch
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import Costs
from torchweft.plan.plan import Plan
from torchweft.plan.strategies import sequential
from torchweft.plan.trace import Trace
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import Strategy, write
from torchweft.private.dynamo import CompileContext
from torchweft.ranks.checksums import Checksums
from torchweft.ranks.ranks import EVERY
from torchweft.ranks.talk import communicators, digests, group_of, is_planned
from torchweft.run.accelerator.accelerator import devices_of, runtime_of
from torchweft.run.accelerator.graphs import Pads
from torchweft.run.cpu import run, run_alone, run_traced
from torchweft.run.program import Program
from torchweft.run.proof import Proof
from torchweft.run.service import Service
from torchweft.run.writer import compile_program
from torchweft.serve.book.entry import CallShape, PlanEntry
from torchweft.serve.book.measured import asks
from torchweft.serve.memory_limit import MemoryLimit
from torchweft.serve.together import Together
from torchweft.serve.variants import Variants

MAX_ENTRIES = 256
MAX_SHAPES = 4096
NO_DEVICE = "graphs: the inputs live on no accelerator"


class PlanCache:
    """The plans of one graph, by the context of a call. Calls may come from several threads.

    context --bucket--> entry: plan, program, calls     strategy, lower, verify, compile: once
            --sizes---> shape: borders, sizes, digests  computed once, for sizes come again
    """

    def __init__(self, piece: Piece) -> None:
        self.piece, self.graph, self.captured = piece, piece.graph, piece.captured
        self.guards = guards_of(piece.gm, self.graph.batch, self.captured.same)
        self.options, self.compile = piece.service.options, piece.compile
        # Side state is in force in one thread, so plans with parts must use one lane.
        self.one_lane = bool(piece.splitters)
        self.entries: list[PlanEntry] = []
        self.strategy_runs = 0
        self._known: dict[object, tuple[PlanEntry, str]] = {}
        self._recent: dict[object, list[PlanEntry]] = {}
        self._sequential: PlanEntry | None = None
        self._talks = piece.talks
        self.limit = MemoryLimit(self.options.resolved_machine)
        self.costs = self.options.resolved_costs  # equal on all ranks that the model talks with
        self._lock = threading.Lock()

    def all_entries(self) -> list[PlanEntry]:
        """The entries in use, the fallback last."""
        return [*self.entries, *([self._sequential] if self._sequential is not None else [])]

    def forget(self) -> None:
        """Forget all plans: the next call writes a new one."""
        with self._lock:
            self._known.clear()
            self._recent.clear()
            self.entries.clear()

    def take_costs(self, costs: Costs) -> None:
        """Plans are written at these costs from now on; those that depend on them, anew."""
        with self._lock:
            self.costs = costs
            for entry in filter(asks, self.entries):
                entry.is_spent = True
            self._known.clear()
            self._recent.clear()

    def entry(self, context: Context, env: Mapping[str, int]) -> tuple[PlanEntry, str]:
        """The plan for a call; with the reason if it is not the strategy's own."""
        key = (context.batch, context.num_tokens, *_facts(context))
        known = self._known.get(key)
        if known is None:
            with self._lock:
                known = self._find(context)
                if not known[0].bucket.wavers(context.batch):
                    remember(self._known, key, known)
        entry, reason = known
        if entry.piece is not self.piece:
            return known
        if not reason and (entry.plan.num_parts > 1 or self.limit.is_set):
            try:
                shape = self.shape(entry, context, env)
            except WeftError as error:
                return self.sequential(context), str(error)
            if shape.error is not None and self.options.fallback == "error":
                raise shape.error
            reason = shape.refused
        return (self.sequential(context) if reason else entry), reason

    def sequential(self, context: Context) -> PlanEntry:
        """The plan that needs no split; it serves every batch."""
        if self._sequential is None:
            plan = self.plan(sequential, context)
            self._sequential = PlanEntry(self.piece, plan, self.compile(plan), Bucket(0, 2**62))
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
                bounds = plan.bounds(rows, context.tokens_per_request)
                refused = self._refusal(bounds, env)
            error = None if refused else self.limit.refusal(plan, context)
            refused = first_line(error) if error is not None else refused
            shape = CallShape(bounds, (), {}, refused, error=error)
            if not refused:
                said = digests(plan, self.captured.bodies, env, bounds) if self._talks else {}
                numbers = entry.program.numbers(env, bounds)
                shape = CallShape(bounds, numbers, said, context=context)
            remember(entry.shapes, key, shape)
        return shape

    def plan(self, strategy: Strategy, context: Context) -> Plan:
        try:
            bare = self._bare(strategy, context)
        except StrategyError as error:
            if error.rule == "split" and self.graph.batch is None:
                raise StrategyError(f"{first_line(error)} {self.captured.unbatched}") from error
            raise
        if self.graph.level == "boundary":
            from torchweft.run.eager.build import check_steps

            check_steps(bare)
        return verify(lower(bare))

    def _bare(self, strategy: Strategy, context: Context) -> Plan:
        """What a strategy writes, of this graph or of one that it has rewritten."""
        variants = self.piece.variants  # a fallback runs the graph that it stands in for
        base = self.graph if strategy is sequential else variants.base
        plan = write(
            strategy, base, context, self.costs.machine, costs=self.costs,
            kernels=self.options.kernels, rewriter=variants.graph_of,
        )  # fmt: skip
        done = [line for line in variants.history(plan.graph) if line not in plan.history]
        return replace(plan, history=(*plan.history[:1], *done, *plan.history[1:]))

    def _find(self, context: Context) -> tuple[PlanEntry, str]:
        """An entry whose bucket fits, or a new one; with the reason if it is the fallback."""
        facts = _facts(context)
        for entry in [*self._recent.get(facts, ()), *self.entries]:
            fits = context.batch in entry.bucket and entry.facts == facts
            if fits and not entry.is_spent:
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
        home, bucket = self.piece.variants.piece_of(plan.graph), bucket_of(context, seen)
        entry = home.plans.adopt(strategy, plan, context, bucket)
        return entry if home is self.piece else self._keep(entry)

    def adopt(self, strategy: Strategy, plan: Plan, context: Context, bucket: Bucket) -> PlanEntry:
        """A plan for this graph as an entry."""
        if plan.num_parts > 1 and all(op.whole for op in self.graph.ops):
            reasons = self.captured.reasons
            why = next((reasons[op.name] for op in self.graph.ops if op.name in reasons), "no rows")
            raise StrategyError(f"split: no op of {self.graph.name!r} may be split: {why}")
        lanes = sorted({step.lane for step in plan.steps})
        if self.one_lane and plan.num_parts > 1 and len(lanes) > 1:
            raise StrategyError(
                f"state: a plan with splitters must use one lane; this one uses {', '.join(lanes)}."
            )
        facts = _facts(context)
        for entry in self.entries:
            known = entry.is_spent and (entry.bucket, entry.facts, entry.inner)
            if known == (bucket, facts, strategy.inner) and _alike(entry.plan, plan):
                entry.plan, entry.trace, entry.is_spent = plan, None, False  # it is traced again
                return self._keep(entry)
        program = self.compile(plan, strategy.inner)
        return self._keep(PlanEntry(self.piece, plan, program, bucket, facts, strategy.inner))

    def _keep(self, entry: PlanEntry) -> PlanEntry:
        entry.recent = self._recent.setdefault(entry.facts, [])
        alike = [e for e in self.entries if e.facts == entry.facts and e.bucket.meets(entry.bucket)]
        gone = [entry, *(e for e in alike if e.is_spent)]
        kept = [e for e in self.entries if all(e is not other for other in gone)]
        self.entries = [*kept[-MAX_ENTRIES + 1 :], entry]
        return entry

    def predict(self, strategy: Strategy, context: Context, costs: Costs) -> float:
        """Seconds of a call by a strategy, as simulated; without end if it cannot run so."""
        try:
            plan = lower(self._bare(strategy, context))
            if plan.num_parts > 1:
                bounds = plan.bounds(context.batch, context.tokens_per_request)
                if self._refusal(bounds, context.env(self.graph.batch)):
                    return math.inf
            return self.limit.seconds(strategy, plan, context, costs)
        except WeftError:
            return math.inf

    def _refusal(self, bounds: Sequence[int], env: Mapping[str, int]) -> str:
        """Why a call cannot be cut at these borders; empty if it can."""
        batch = self.graph.batch
        assert batch is not None, "a graph without a batch is not split"
        if not self.captured.splits(env):
            return "batch: the sizes that were taken for one batch differ in this call"
        for start, stop in pairwise(bounds):
            if stop - start == 1 and self.captured.lone:
                return f"rows: {self.captured.lone}"
            if broken := self.guards.refuse({**env, batch: stop - start}):
                return f"guard: a part of {stop - start} rows breaks {broken}"
        return ""


def remember(memory: dict[object, Any], key: object, value: Any) -> None:
    """Remember a value; a memory that has grown too large is emptied first."""
    if len(memory) >= MAX_SHAPES:
        memory.clear()
    memory[key] = value


def _alike(one: Plan, other: Plan) -> bool:
    return replace(one, history=()) == replace(other, history=())


def _facts(context: Context) -> tuple[object, ...]:
    """What the host told that makes another plan: phase, strategy, whether it knows requests.

    How many tokens each request has does not: it is new at every step, and a cut by rule binds it.
    """
    return context.phase, bool(context.tokens_per_request), context.strategy


class Ready(NamedTuple):
    """All that a call of known sizes needs.

    alone: its program, if it has one lane and no collectives: the caller's thread runs it all.
    """

    entry: PlanEntry
    alone: Program | None
    shape: CallShape
    trusted: TrustedInputs | None
    piece: Any = None  # the rewritten graph that runs it, if there is one


class Inner(NamedTuple):
    """The bodies of a graph by one inner compiler, and the inputs that they take for granted."""

    bodies: Mapping[str, Body]
    trusted: TrustedInputs | None


class Piece:
    """One captured graph and its plans. Calls may come from several threads.

    unsplit: why the graph must run whole, or nothing. variants: those that this one is among.
    """

    def __init__(
        self,
        captured: Capture,
        gm: fx.GraphModule,
        service: Service,
        unsplit: str = "",
        variants: Variants | None = None,
    ) -> None:
        options = service.options
        self.service, self.captured, self.gm = service, captured, gm
        self.graph = captured.graph
        self._inners: dict[str, Inner] = {}
        placeholders = gm.graph.find_nodes(op="placeholder")
        examples = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
        self.runtime = runtime_of(
            examples, graphs=bool(options.graphs), fall_back=self.fall_back,
            constants=captured.constants, saved=captured.saved,
        )  # fmt: skip
        self.device = self.runtime.device if self.runtime is not None else None
        threads: Any = {"lanes": service.lanes, "num_threads": options.num_threads}
        self._runs: Any = partial(run, **threads)
        self._runs_traced: Any = partial(run_traced, **threads)
        if self.runtime is not None:
            self._runs, self._runs_traced = self.runtime.run, self.runtime.run_traced
        padded = self.runtime is not None and options.graph_sizes
        self.pads = Pads(self.graph, options.graph_sizes) if padded else None
        several = len(devices_of(examples)) > 1  # streams of one device do not wait for another's
        self.unsplit = "device: the inputs live on several accelerators" if several else unsplit
        inputs = set(self.graph.inputs)
        states = {name for name in inputs if name.startswith(STATE)}
        touched = {name.split(".")[1] for name in states}
        self.splitters = tuple(item for item in options.splitters if item.name in touched)
        self.writes = bool(self.graph.mutated & inputs - states)
        self.communicators = communicators(self.graph)
        self.checksums = Checksums(self.graph, captured.alike, group_of)
        self.variants = variants or Variants(self)
        self.proof = Proof(self)
        self.plans = PlanCache(self)
        self.together = Together(self)
        compiling = CompileContext.current_compile_id()
        self.frame = compiling.frame_id if compiling is not None else None
        self._constants = (*captured.constants.values(), None)
        self.inner(None)
        self.traced: CallShape | None = None  # the last call that was traced
        self._ready: dict[object, Ready] = {}
        self._failed: dict[object, WeftError] = {}
        # What every call needs, looked up once.
        self._sizes, self._pick, self._here = captured.sizes_of, captured.pick, service.here
        self._as_made = captured.gives_as_made

    def __call__(self, *inputs: Any) -> Any:
        """Run one call. This is what Dynamo calls in the place of the graph.

        A steady call is one look-up: what its sizes lead to is known from the call before.
        """
        facts = TOLD.get()
        sizes = self._sizes(inputs)
        key = sizes if facts is None else (sizes, facts)
        ready = self._ready.get(key)
        self._here.ran = True
        if self.service.speaker.share is not None and not self.is_planned:
            return self.service.run_stock(self.gm, inputs, self.communicators)
        if ready is None or self.service.watches:
            return self._first_call(inputs, key)
        entry, alone, shape, trusted, other = ready
        if other is not None:
            return other(*inputs)
        given = self._pick(inputs + self._constants)
        if trusted is not None and (changed := trusted.changed(given)) is not None:
            return self._run_as_it_is(inputs, key, changed)
        if self.writes and entry.plan.num_parts > 1 and shared_bytes(given):
            return self._first_call(inputs, key)
        entry.num_calls += 1
        entry.recent[:] = (entry,)
        if alone is not None:
            outputs = run_alone(alone, given, shape.bounds, shape.numbers)
        else:
            outputs = self.run(entry, given, shape)
        return outputs if self._as_made else self._rebuild(outputs, self.captured.env(inputs))

    def inner(self, name: str | None) -> Inner:
        """The bodies as an inner compiler makes them, by default as the model was compiled."""
        name = name or self.service.options.inner
        if name not in self._inners:
            bodies = compile_bodies(self.captured, name)
            self._inners[name] = Inner(bodies, trusted_inputs(self.graph, bodies))
        return self._inners[name]

    @property
    def bodies(self) -> list[Body]:
        """The bodies of all inner compilers in use."""
        return [body for inner in self._inners.values() for body in inner.bodies.values()]

    def _first_call(self, inputs: tuple[Any, ...], key: object) -> Any:
        """Find or make the plan of a call, and run it."""
        self.service.keep(self, inputs)
        given = self._pick(inputs + self._constants)
        try:
            if failed := self._failed.get(key) or self.proof.refused:
                raise failed
            own = self.captured.env(inputs)
            env = self._padded(own) if self.pads is not None else own
            context, switch = context_of(self.graph, env), None
            reason = self.unsplit or (shared_bytes(given) if self.writes else "")
            if not reason:
                entry, reason = self.plans.entry(context, env)
            if not reason and entry.piece is not self:
                return self._hand_on(entry, inputs, key)
            if not reason and self.splitters and entry.plan.num_parts > 1:
                switch, reason = self._switch(entry, context, env)
            if reason:
                entry = self.plans.sequential(context)
                self.fall_back(reason)
            shape = self.plans.shape(entry, context, env)
            if shape.error is not None:  # nor does the plan without parts fit
                raise shape.error
        except (RunError, StateError):  # a rank that finds no plan tells the others first
            self.service.refuse(self.communicators)
            raise
        except Exception as error:  # there is no plan, not even without parts
            return self._run_as_it_is(inputs, key, as_own(error, "plan"))
        trusted = self.inner(entry.inner).trusted
        if trusted is not None and (changed := trusted.changed(given)) is not None:
            return self._run_as_it_is(inputs, key, changed)
        entry.num_calls += 1
        entry.recent[:] = (entry,)
        if switch is not None:
            given = self._pick((*inputs, *self._constants[:-1], switch))
        with switch or nullcontext():
            if self.proof.wanted:
                return self.proof(inputs, lambda: self._rebuild(self.run(entry, given, shape), own))
            outputs = self.run(entry, given, shape)
        if not reason and entry.trace is not None and switch is None:  # else it is cut anew
            self._remember(key, entry, shape)
        return self._rebuild(outputs, own)

    def _hand_on(self, entry: PlanEntry, inputs: tuple[Any, ...], key: object) -> Any:
        """Run a call by the rewritten graph that its strategy has asked for."""
        self.service.forget_inputs(self)
        remember(self._ready, key, Ready(entry, None, CallShape((), (), {}), None, entry.piece))
        return entry.piece(*inputs)

    def _run_as_it_is(self, inputs: tuple[Any, ...], key: object, error: WeftError) -> Any:
        """Run the user's own graph; calls of these sizes are not planned again."""
        raises = self.service.options.fallback == "error"
        if not raises:
            remember(self._failed, key, error)
        if self.graph.level == "boundary":  # the model runs as it is, and not a graph
            self.service.refuse(self.communicators)
            if raises:
                raise error
            raise CaptureError(str(error), rule=FAILURE) from error
        told = error, self.communicators, self.graph.name
        return self.service.run_as_it_is(self.gm, inputs, *told)

    def _padded(self, env: dict[str, int]) -> dict[str, int]:
        """The sizes of a call filled up to one that device graphs are captured for."""
        assert self.pads is not None, "only a piece with pads fills its calls"
        batch, facts = self.graph.batch, TOLD.get()
        if batch is None or (size := self.pads.size(env[batch])) == env[batch]:
            return env
        filled = {**env, batch: size}
        refused = self.pads.refused
        if not refused and facts is not None and facts.tokens_per_request:
            refused = "graphs: calls are not padded, for the host tells the tokens of each request"
        if not refused and (broken := self.plans.guards.refuse(filled)):
            refused = f"graphs: calls are not padded, for {size} rows break {broken}"
        if refused:
            self.fall_back(refused)
        return env if refused else filled

    def _switch(
        self, entry: PlanEntry, context: Context, env: Mapping[str, int]
    ) -> tuple[Switch | None, str]:
        """What puts the side state of each part in force, or why it cannot be cut."""
        bounds = self.plans.shape(entry, context, env).bounds
        try:
            return switch_for(self.splitters, context, bounds, entry.program.ranges), ""
        except RefusedError as refused:
            return None, str(refused)

    def _remember(self, key: object, entry: PlanEntry, shape: CallShape) -> None:
        """Let calls of these sizes, of which the host tells the same, take the short way."""
        by_plan = self.runtime is None and not self.service.options.graphs and not shape.digests
        alone = entry.program if by_plan and len(entry.program.functions) == 1 else None
        if entry.bucket.wavers(shape.context.batch):  # it depends on the call before
            return
        if entry.is_spent:
            return
        trusted = self.inner(entry.inner).trusted
        remember(self._ready, key, Ready(entry, alone, shape, trusted))

    def _rebuild(self, outputs: Sequence[Any], env: dict[str, int]) -> Any:
        return self.captured.rebuild(dict(zip(self.graph.outputs, outputs, strict=True)), env)

    def run(self, entry: PlanEntry, given: Sequence[Any], shape: CallShape) -> tuple[Any, ...]:
        """Run an entry's program. Its second call is traced, so that the report can tell shares."""
        for reason in filter(None, self._limits(entry)):
            self.fall_back(reason)
        if not shape.digests:
            return self.run_agreed(entry, given, shape)
        return self.together(entry, given, shape)

    def _limits(self, entry: PlanEntry) -> Iterator[str]:
        """What the device cannot do of what was asked for."""
        if self.service.options.graphs:
            yield self.device.no_graphs if self.device else NO_DEVICE
        if self.device is not None and self.device.one_stream:
            steps = entry.plan.steps  # lanes that nothing runs on would have had no stream
            used = {step.on if step.kind == "issue" else step.lane for step in steps}
            has_budget = any(lane.num_sms for lane in entry.plan.lanes)
            if has_budget or len(used | {step.lane for step in steps}) > 1:
                yield self.device.one_stream

    def run_agreed(
        self, entry: PlanEntry, given: Sequence[Any], shape: CallShape
    ) -> tuple[Any, ...]:
        """Run an entry's program, traced or not, whatever other ranks do."""
        bounds, numbers = shape.bounds, shape.numbers
        if self.pads is not None and (rows := self.pads.rows(given)) < bounds[-1]:
            filled = self.pads.fill(given, rows, bounds[-1])
            return self.pads.take(self.run_agreed(entry, filled, shape), rows, bounds[-1])
        collected = self.service.traces
        wanted = collected is not None or (entry.num_calls >= 2 and entry.trace is None)
        if self.device is not None and self.device.is_capturing():  # a host must not wait inside
            wanted = False
        program = self._traced(entry) if wanted else None
        if program is None:
            outputs: tuple[Any, ...] = self._runs(entry.program, given, bounds, numbers=numbers)
            return outputs
        outputs, entry.trace = self._runs_traced(program, given, bounds, numbers=numbers)
        self.traced = entry.traced = shape
        measured = self.service.speaker.costs
        if measured is not None and not self.communicators and self.runtime is None:
            measured.note_trace(entry)
        if collected is not None:
            collected.append(entry.trace)
        return outputs

    def _traced(self, entry: PlanEntry) -> Any:
        """The program that measures its steps; None, counted, if it cannot be made."""
        try:
            if self.device is not None and self.device.no_times:
                raise RunError(self.device.no_times)
            return self.compile(entry.plan, entry.inner, traced=True)
        except Exception as error:
            own = as_own(error, "trace")
            if self.service.traces is not None:
                raise own from error
            entry.trace = Trace(self.graph.name, ())
            self.fall_back(first_line(own))
            return None

    def compile(self, plan: Plan, inner: str | None = None, *, traced: bool = False) -> Any:
        """The program of a plan, for the runtime of the piece."""
        compiler = compile_program if self.runtime is None else self.runtime.compile
        bodies, jitter = self.inner(inner).bodies, self.service.options.jitter
        return compiler(plan, bodies, traced=traced, jitter=jitter)

    def take_costs(self, costs: Costs) -> None:
        """Write plans at these costs from the next call on."""
        for piece in self.variants.pieces:
            piece.plans.take_costs(costs)
            piece._ready.clear()

    def forget(self) -> None:
        """Forget all plans: the next call writes a new one."""
        self.plans.forget()
        self._ready.clear()
        self._failed.clear()

    @property
    def is_planned(self) -> bool:
        """Whether the next call is among those that run by plans. The ranks agree on it."""
        speaker = self.service.speaker
        if not self.communicators:
            return speaker.share in (None, EVERY)
        return is_planned(self.communicators, speaker)

    @property
    def talks(self) -> bool:
        return bool(self.communicators)

    def fall_back(self, reason: str) -> None:
        self.service.fall_back(reason, self.graph.name)
