"""A `Piece`: one captured graph of a model, with the plans it runs by.

    inputs --context--> bucket --strategy, lower, verify, compile: once--> program --run--> outputs

A model with graph breaks has several pieces. A call that cannot be split runs the sequential plan,
and the reason is counted; nothing is ever changed in silence.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from torchweft.capture.bodies.inner import compile_bodies, trusted_inputs
from torchweft.capture.bodies.replay import placed_by
from torchweft.capture.dynamo import Capture
from torchweft.capture.failures import FAILURE, as_own, first_line
from torchweft.capture.guards import Guards, guards_of, shared_bytes
from torchweft.capture.splitters import STATE, Switch, switch_for
from torchweft.errors import (
    CaptureError,
    RefusedError,
    RunError,
    StateError,
    StrategyError,
    WeftError,
)
from torchweft.plan.bucket import Bucket, bucket_of, watch
from torchweft.plan.context import TOLD, Context
from torchweft.plan.lower.lower import lower
from torchweft.plan.plan import Plan
from torchweft.plan.strategies import sequential
from torchweft.plan.trace import Trace
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import Strategy
from torchweft.plan.write.write import write
from torchweft.private.dynamo import CompileContext
from torchweft.ranks.talk import Talk, communicators, digests, refuse
from torchweft.run.accelerator.accelerator import devices_of, runtime_of
from torchweft.run.accelerator.pads import Pads
from torchweft.run.cpu import run, run_alone, run_traced
from torchweft.run.eager.build import check_steps
from torchweft.run.program import Program
from torchweft.run.writer import compile_program

if TYPE_CHECKING:
    from torchweft.serve.session import Session

MAX_ENTRIES = 256
MAX_SHAPES = 4096
Shape = tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]
"""Row borders of the parts, sizes that bodies need, digests of the collectives by group."""
Ready = tuple["PlanEntry", Program | None, tuple[int, ...], tuple[int, ...], dict[str, int]]
"""All that a call of known sizes needs: its entry, its program if one lane runs it all in the
caller's thread and nobody is talked to, and its shape."""


@dataclass
class PlanEntry:
    """A plan in use, with its program and what calls have shown of it."""

    plan: Plan
    program: Any
    bucket: Bucket
    told: tuple[object, ...] = (None, False, None)
    num_calls: int = 0
    trace: Trace | None = None
    shapes: dict[object, Shape] = field(default_factory=dict)
    refused: dict[object, str] = field(default_factory=dict)


class Piece:
    """One captured graph and its plans. Calls may come from several threads."""

    def __init__(self, session: Session, captured: Capture, gm: fx.GraphModule) -> None:
        self.session, self.captured, self.gm = session, captured, gm
        self.bodies = compile_bodies(captured, session.inner)
        self.graph = placed_by(captured.graph, self.bodies if session.zero_copy else {})
        self.guards: Guards = guards_of(gm, captured.graph.batch, captured.same)
        placeholders = gm.graph.find_nodes(op="placeholder")
        examples = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
        self.runtime = runtime_of(examples, graphs=session.graphs, fall_back=self._fall_back)
        self.pads = None
        if self.runtime is not None and session.graph_sizes:
            self.pads = Pads(self.graph, session.graph_sizes)
        self.unsplit = ""
        if len(devices_of(examples)) > 1:  # streams of one device do not wait for another's
            self.unsplit = "device: the inputs live on several accelerators"
        inputs = set(captured.graph.inputs)
        states = {name for name in inputs if name.startswith(STATE)}
        touched = {name.split(".")[1] for name in states}
        self.splitters = tuple(item for item in session.splitters if item.name in touched)
        self.writes = bool(captured.graph.mutated & inputs - states)
        self.talks = any(op.collective is not None for op in captured.graph.ops)
        self.entries: list[PlanEntry] = []
        self.strategy_runs = 0
        compiling = CompileContext.current_compile_id()
        self.frame = compiling.frame_id if compiling is not None else None
        self._sizes, self._pick = captured.sizes_of, captured.pick
        self._constants = (*captured.constants.values(), None)
        self._as_made = captured.gives_as_made
        self._trusted = trusted_inputs(self.graph, self.bodies)
        self._ready: dict[object, Ready] = {}
        self._by_batch: dict[object, PlanEntry] = {}
        self._refused: dict[object, str] = {}
        self._failed: dict[object, WeftError] = {}
        self._sequential: PlanEntry | None = None
        self._here = session.here
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        """Run one call. This is what Dynamo calls in the place of the graph.

        A steady call is one look-up: what its sizes lead to is known from the call before.
        """
        told = TOLD.get()
        sizes = self._sizes(inputs)
        ready = self._ready.get(sizes if told is None else (sizes, told))
        self._here.ran = True
        if ready is None or self.session.watches:
            return self._first_call(inputs)
        entry, alone, bounds, numbers, digests = ready
        given = self._given(inputs)
        if self.writes and entry.plan.num_parts > 1 and shared_bytes(given):
            return self._first_call(inputs)
        entry.num_calls += 1
        if alone is not None:
            outputs = run_alone(alone, given, bounds, numbers)
        else:
            outputs = self.run(entry, given, bounds, numbers, digests)
        return outputs if self._as_made else self._rebuild(outputs, self.captured.env(inputs))

    def _given(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The graph's inputs, from those of a call."""
        given = self._pick(inputs + self._constants)
        if self._trusted is not None:
            try:
                self._trusted.check(given)
            except WeftError:
                refuse(communicators(self.graph), self.session.speaker, self.session.watchdog_s)
                raise
        return given

    def _first_call(self, inputs: tuple[Any, ...]) -> Any:
        """Find or make the plan of a call, and run it."""
        if self.session.kept is not None:
            self.session.kept[self] = [i.clone() if isinstance(i, Tensor) else i for i in inputs]
        key, given = (self._sizes(inputs), TOLD.get()), self._given(inputs)
        try:
            if key in self._failed:
                raise self._failed[key]
            own = self.captured.env(inputs)
            env = self._padded(own) if self.pads is not None else own
            context = self.session.context(self.graph, env)
            forbidden = self.unsplit or (shared_bytes(given) if self.writes else "")
            if forbidden:
                self.session.fall_back(self, forbidden)
                entry, plain, switch = self.sequential(context), False, None
            else:
                entry, plain = self.entry(context, env)
                entry, switch = self._switch(entry, env, context)
            bounds, numbers, told = self._shape(entry, env, context)
        except (RunError, StateError):  # a rank that finds no plan tells the others first
            refuse(communicators(self.graph), self.session.speaker, self.session.watchdog_s)
            raise
        except Exception as error:  # also without parts there is no plan
            return self._run_as_it_is(inputs, key, as_own(error, "plan"))
        entry.num_calls += 1
        if switch is not None:
            given = self._pick((*inputs, *self._constants[:-1], switch))
        with switch or nullcontext():
            outputs = self.run(entry, given, bounds, numbers, told)
        if plain and entry.trace is not None and switch is None:  # else it is cut anew each time
            plain = self.runtime is None and not self.session.graphs and not told
            alone = entry.program if plain and len(entry.program.functions) == 1 else None
            self._remember(inputs, (entry, alone, bounds, numbers, told))
        return self._rebuild(outputs, own)

    def _run_as_it_is(self, inputs: tuple[Any, ...], key: object, error: WeftError) -> Any:
        """Run the user's own graph; calls of these sizes are not planned again."""
        if self.session.fallback != "error":
            if len(self._failed) >= MAX_SHAPES:
                self._failed.clear()
            self._failed[key] = error
        names = communicators(self.graph)
        if self.graph.level == "boundary":  # the model runs as it is, and not a graph
            refuse(names, self.session.speaker, self.session.watchdog_s)
            if self.session.fallback == "error":
                raise error
            raise CaptureError(str(error), rule=FAILURE) from error
        return self.session.run_as_it_is(self.gm, inputs, error, names, self)

    def _padded(self, env: dict[str, int]) -> dict[str, int]:
        """The sizes of a call filled up to one that device graphs are captured for."""
        assert self.pads is not None, "only a piece with pads fills its calls"
        batch, told = self.graph.batch, TOLD.get()
        if batch is None or (size := self.pads.size(env[batch])) == env[batch]:
            return env
        filled = {**env, batch: size}
        refused = self.pads.refused
        if not refused and told is not None and told.tokens_per_request:
            refused = "graphs: calls are not padded, for the host tells the tokens of each request"
        if not refused and (broken := self.guards.refuse(filled)):
            refused = f"graphs: calls are not padded, for {size} rows break {broken}"
        if refused:
            self._fall_back(refused)
        return env if refused else filled

    def _switch(
        self, entry: PlanEntry, env: dict[str, int], context: Context
    ) -> tuple[PlanEntry, Switch | None]:
        """What puts the side state of each part in force; the fallback if that cannot be cut."""
        if not self.splitters or entry.plan.num_parts == 1:
            return entry, None
        bounds = self._shape(entry, env, context)[0]
        try:
            return entry, switch_for(self.splitters, context, bounds, entry.program.ranges)
        except RefusedError as refused:
            self.session.fall_back(self, str(refused))
            return self.sequential(context), None

    def _remember(self, inputs: tuple[Any, ...], ready: Ready) -> None:
        """Let calls of these sizes, of which the host tells the same, take the short way."""
        told, sizes = TOLD.get(), self._sizes(inputs)
        if len(self._ready) >= MAX_SHAPES:
            self._ready.clear()
        self._ready[sizes if told is None else (sizes, told)] = ready

    def _rebuild(self, outputs: Sequence[Any], env: dict[str, int]) -> Any:
        return self.captured.rebuild(dict(zip(self.graph.outputs, outputs, strict=True)), env)

    def run(
        self,
        entry: PlanEntry,
        given: Sequence[Any],
        bounds: Sequence[int],
        numbers: Sequence[int],
        told: Mapping[str, int],
    ) -> tuple[Any, ...]:
        """Run an entry's program. Its second call is traced, so that the report can tell shares."""
        if self.session.graphs and self.runtime is None:
            self._fall_back("graphs: the inputs live on no accelerator")
        if not told:
            return self._run(entry, given, bounds, numbers)
        with Talk(entry.plan, told, self.session.speaker, self.session.watchdog_s) as talk:
            if self.session.graphs or talk.by_kernel:
                talk.agree()
            return self._run(entry, given, bounds, numbers)

    def _run(
        self, entry: PlanEntry, given: Sequence[Any], bounds: Sequence[int], numbers: Sequence[int]
    ) -> tuple[Any, ...]:
        if self.pads is not None and (rows := self.pads.rows(given)) < bounds[-1]:
            filled = self.pads.fill(given, rows, bounds[-1])
            return self.pads.take(self._run(entry, filled, bounds, numbers), rows, bounds[-1])
        lanes, threads = self.session.lanes, self.session.num_threads
        collected, runtime = self.session.traces, self.runtime
        wanted = collected is not None or (entry.num_calls == 2 and entry.trace is None)
        program = self._traced(entry) if wanted else None
        if program is None:
            if runtime is not None:
                return runtime.run(entry.program, given, bounds, numbers=numbers)
            return run(entry.program, given, bounds, lanes, numbers=numbers, num_threads=threads)
        if runtime is not None:
            outputs, entry.trace = runtime.run_traced(program, given, bounds, numbers=numbers)
        else:
            outputs, entry.trace = run_traced(
                program, given, bounds, lanes, numbers=numbers, num_threads=threads
            )
        if collected is not None:
            collected.append(entry.trace)
        return outputs

    def _traced(self, entry: PlanEntry) -> Any:
        """The program that measures its steps; None, counted, if it cannot be made."""
        try:
            return self.compile(entry.plan, traced=True)
        except Exception as error:
            own = as_own(error, "trace")
            if self.session.traces is not None:
                raise own from error
            entry.trace = Trace(self.graph.name, ())
            self._fall_back(first_line(own))
            return None

    def forget(self) -> None:
        """Forget all plans: the next call writes a new one."""
        with self._lock:
            self._ready.clear()
            self._by_batch.clear()
            self._refused.clear()
            self._failed.clear()
            self.entries.clear()

    @property
    def unplaced(self) -> dict[str, str]:
        """The values whose parts cannot be written where they belong, each with the reason."""
        found = dict(self.captured.unplaced)
        for op in self.graph.ops:
            reasons = getattr(self.bodies[op.name], "unplaced", {})
            found |= {op.makes[number]: why for number, why in reasons.items()}
        return found

    def all_entries(self) -> list[PlanEntry]:
        """The entries in use, the fallback last."""
        found = list(self.entries)
        return found + ([self._sequential] if self._sequential is not None else [])

    def compile(self, plan: Plan, *, traced: bool = False) -> Any:
        """The program of a plan, for the runtime of the piece."""
        jitter = self.session.jitter
        if self.runtime is not None:
            return self.runtime.compile(plan, self.bodies, traced=traced, jitter=jitter)
        return compile_program(plan, self.bodies, traced=traced, jitter=jitter)

    def _fall_back(self, reason: str) -> None:
        self.session.fall_back(self, reason)

    def _shape(self, entry: PlanEntry, env: dict[str, int], context: Context) -> Shape:
        """Borders, sizes and digests of a call; remembered, for a shape rarely comes alone."""
        key = _shape_key(entry, env, context)
        found = entry.shapes.get(key)
        if found is None:
            rows = env.get(self.graph.batch or "", 1)
            whole = entry.plan.num_parts == 1
            bounds = (0, rows) if whole else entry.plan.cut.bounds(rows, context.tokens_per_request)
            told = digests(entry.plan, self.captured.bodies, env, bounds) if self.talks else {}
            found = (bounds, entry.program.numbers(env, bounds), told)
            if len(entry.shapes) >= MAX_SHAPES:
                entry.shapes.clear()
            entry.shapes[key] = found
        return found

    def entry(self, context: Context, env: dict[str, int]) -> tuple[PlanEntry, bool]:
        """The plan for a call, and whether it is the strategy's own: else the reason is counted."""
        key = (context.batch, context.num_tokens, *_told(context))
        entry = self._by_batch.get(key)
        if entry is None:
            with self._lock:
                entry, why = self._find(context)
                if len(self._by_batch) >= MAX_SHAPES:
                    self._by_batch.clear()
                    self._refused.clear()
                self._by_batch[key] = entry
                if why:
                    self._refused[key] = why
        reason = self._refused.get(key) if self._refused else None
        if reason is None and entry.plan.num_parts > 1:
            reason = self._parts_refused(entry, env, context)
            if reason:
                entry = self.sequential(context)
        if reason:
            self.session.fall_back(self, reason)
        return entry, not reason

    def _find(self, context: Context) -> tuple[PlanEntry, str]:
        """An entry whose bucket fits, or a new one; with the reason if it is the fallback."""
        for entry in self.entries:
            if context.batch in entry.bucket and entry.told == _told(context):
                return entry, ""
        try:
            return self._write(context.strategy or self.session.strategy, context), ""
        except Exception as error:
            own = as_own(error, "plan")
            if self.session.fallback == "error":
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
        lanes = {step.lane for step in plan.steps}
        if self.splitters and plan.num_parts > 1 and len(lanes) > 1:
            raise StrategyError(f"state: one thread has side state in force; lanes are {lanes}.")
        entry = PlanEntry(plan, self.compile(plan), bucket_of(context, seen), _told(context))
        if len(self.entries) >= MAX_ENTRIES:
            self.entries.pop(0)
        self.entries.append(entry)
        return entry

    def plan(self, strategy: Strategy, context: Context) -> Plan:
        """A verified plan for a context."""
        session = self.session
        try:
            bare = write(strategy, self.graph, context, session.machine, costs=session.costs)
        except StrategyError as error:
            if error.rule == "split" and self.graph.batch is None:
                raise StrategyError(f"{first_line(error)} {self.captured.unbatched}") from error
            raise
        if self.graph.level == "boundary":
            check_steps(bare)
        return verify(lower(bare))

    def sequential(self, context: Context) -> PlanEntry:
        """The plan that needs no split; it serves every batch."""
        if self._sequential is None:
            plan = self.plan(sequential, context)
            self._sequential = PlanEntry(plan, self.compile(plan), Bucket(0, 2**62))
        return self._sequential

    def _parts_refused(self, entry: PlanEntry, env: dict[str, int], context: Context) -> str:
        """Why a call cannot be cut as its plan says; empty if it can. Remembered by shape."""
        key = _shape_key(entry, env, context)
        if key not in entry.refused:
            if len(entry.refused) >= MAX_SHAPES:
                entry.refused.clear()
            entry.refused[key] = self._refusal(entry, env, context)
        return entry.refused[key]

    def _refusal(self, entry: PlanEntry, env: dict[str, int], context: Context) -> str:
        batch = self.graph.batch
        assert batch is not None, "a graph without a batch is not split"
        if not self.captured.splits(env):
            return "batch: the sizes that were taken for one batch differ in this call"
        try:
            bounds = self._shape(entry, env, context)[0]
        except WeftError as error:
            return str(error)
        for start, stop in pairwise(bounds):
            if broken := self.guards.refuse({**env, batch: stop - start}):
                return f"guard: a part of {stop - start} rows breaks {broken}"
        return ""


def _shape_key(entry: PlanEntry, env: Mapping[str, int], context: Context) -> object:
    """What the borders of the parts hang on; requests only where the cut looks at them."""
    return (*env.values(), context.tokens_per_request if entry.plan.cut.rule else ())


def _told(context: Context) -> tuple[object, ...]:
    """What the host told that makes another plan: phase, strategy, whether it knows requests.

    How many tokens each request has does not: it is new at every step, and a cut by rule binds it.
    """
    return context.phase, bool(context.tokens_per_request), context.strategy
