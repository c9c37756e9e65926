"""The `Scheduler`: the recorder that a strategy writes a plan with. Nothing runs while it writes.

    s.split(2)                       cut the batch
    while ready := s.ready():        (op, part) pairs whose inputs are already scheduled
        for op, part in ready:
            s.run(op, part)          the lane defaults to what the op uses
    s.merge()

Authors say order and lane; `lower` adds waits, copies, frees and places. Every mistake raises
`StrategyError` at the call that makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, NoReturn

from torchweft.errors import StrategyError, clip, unknown
from torchweft.plan.context import MAX_SLACK, Context, Cut, at_least
from torchweft.plan.graph import NAME, Graph, Op
from torchweft.plan.kernels.fitting import faults_of
from torchweft.plan.kernels.kernel import Kernel, as_kernel
from torchweft.plan.machine import Costs, Lane, Machine
from torchweft.plan.plan import Edge, Pair, Plan, Range, Step, bracket, one_line, pairs_of
from torchweft.plan.precedence import precedence
from torchweft.plan.rewrite import Rewrite, check_rewrites

MAX_IDLE_CALLS = 10_000
MAX_SHARE = 1000  # the denominator of a share that is given as a number such as 1/3
Rewriter = Callable[[tuple[Rewrite, ...]], Graph]
"""What the graph becomes by rewrites. Raises `StrategyError`."""


class Scheduler:
    """Records the steps of one plan. `graph`, `context` and `machine` are there to look at.

    known: the kernels that `replace=` may name. rewriter: what carries out rewrites.
    """

    def __init__(
        self,
        graph: Graph,
        context: Context,
        machine: Machine,
        costs: Costs | None = None,
        known: Mapping[str, Kernel] | None = None,
        rewriter: Rewriter | None = None,
    ) -> None:
        self.rewriter, self.rewrites = rewriter, tuple[Rewrite, ...]()
        self.graph, self.context, self.machine = graph, context, machine
        self.costs = costs or Costs(machine)
        self.cut = Cut()
        self.steps: list[Step] = []
        self.known, self.kernels = known or {}, dict[str, Kernel]()
        self.notes: list[str] = []
        self._closed = ""
        self._idle = 0
        self._scopes: list[dict[str, Op]] = []
        self._adopted: Plan | None = None
        self._reset()

    @property
    def num_parts(self) -> int:
        """How many parts the batch is cut into; 1 before a split."""
        return self.cut.num_parts

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops that there are to run: all of the graph, or those of `within`."""
        return tuple(self._scopes[-1].values()) if self._scopes else self.graph.ops

    @contextmanager
    def within(self, ops: Iterable[Op | str]) -> Iterator[None]:
        """Inside of the block there are only these ops: for `ready` and `run`, and for a strategy
        that is called on the scheduler.

        In there a split may come late, as long as nothing was run on a part, and may be asked for
        again; `sequential` runs what is left of these ops, and `merge` says if one was forgotten.
        """
        self._open("within")
        chosen = sorted((self._op(op) for op in ops), key=lambda op: self._index[op.name])
        for op in chosen:
            if not self._is_inside((op.name, 0)):
                self._fail("within", f"{op.name!r} is outside of the block around this one.")
        self._scopes.append({op.name: op for op in chosen})
        try:
            yield
        finally:
            self._scopes.pop()

    def has_tokens(self, number: int, *, slack: float = 0.1) -> bool:
        """Whether the call has at least so many tokens.

        slack: calls that have up to this share less keep the plan of the call before them, so that
        a number of tokens that wavers around the border does not change plans at every call.
        """
        if not isinstance(number, int) or number < 0 or not 0 <= slack <= MAX_SLACK:
            limits = f"a whole number, and a slack from 0 to {MAX_SLACK}; got {number}, {slack}"
            self._fail("tokens", f"has_tokens takes {limits}.")
        return at_least(self.context.num_tokens, number, slack)

    def split(self, how: int | Sequence[Any] | Cut, *, at: str | None = None) -> None:
        """Cut the batch: into `how` even parts, parts of these sizes or shares, or a `Cut`.

        at="requests" moves the borders to those between requests, at="phases" cuts in two where
        decode requests end and prefill requests begin (or the other way round). Must come before
        any run, but for what `within` says.
        """
        self._open("split")
        if (self.steps or self.num_parts > 1) and not self._scopes:
            self._fail("split", "split comes first, and once.")
        if self.graph.batch is None:
            self._fail("split", f"graph {self.graph.name!r} has no batch to split.")
        if isinstance(how, Cut):
            cut = how
        elif isinstance(how, int):
            cut = Cut.even(how, at)
        elif not isinstance(how, Sequence):
            self._fail("split", f"{how!r} is neither a number of parts nor their sizes.")
        elif how and all(isinstance(share, float | Fraction) for share in how):
            cut = Cut(tuple(Fraction(share).limit_denominator(MAX_SHARE) for share in how), at)
        else:
            cut = Cut(Cut.sizes(how).fractions, at)
            if sum(how) != self.context.batch:
                shares = ", ".join(f"{size}/{sum(how)}" for size in how)
                self._fail(
                    "split",
                    f"parts of {sum(how)} rows; the batch has {self.context.batch}. Sizes fit one "
                    f"batch only; shares fit all: s.split([{shares}]).",
                )
            if any(size % self.graph.row_unit for size in how):
                why = f"in this graph parts are multiples of {self.graph.row_unit} rows"
                self._fail("split", f"parts of {clip(list(how))} rows; {why}.")
        self._bounds(cut)
        if self.num_parts > 1 and cut != self.cut:
            self._fail(
                "split",
                f"the batch is cut {self.cut} already, and a plan has one cut: strategies within "
                f"parts of a graph must ask for the same; got {cut}.",
            )
        if self.num_parts == 1:
            self.cut = cut
            self._reset()

    def rewrite(self, *rewrites: Rewrite) -> None:
        """Change the graph before anything is recorded; `graph` has the ops of the new one.

        Give all at once: each call captures the model anew. Raises `StrategyError` for a rewrite
        that finds nothing that it could do.
        """
        self._open("rewrite")
        if self.steps or self.num_parts > 1 or self._scopes:
            why = "the graph is rewritten first, before a split, any run and within()."
            self._fail("rewrite", why)
        if self.rewriter is None:
            self._fail("rewrite", f"there are no calls behind graph {self.graph.name!r} to rewrite;"
                       " only the graph of a model has them: weft.compile.")  # fmt: skip
        wanted = self.rewrites + check_rewrites(rewrites)
        if rewrites:
            self.graph, self.rewrites = self.rewriter(wanted), wanted
            self._reset()

    def ready(self, part: int | None = None) -> list[tuple[Op, int | None]]:
        """The (op, part) pairs that can run next, in graph order; part None: all parts at once.

        With `part`, only pairs of that part (and ops that run once for all parts).
        """
        self._open("ready")
        self._idle += 1
        if self._idle > MAX_IDLE_CALLS:
            self._fail(
                "loop", f"ready() was asked {MAX_IDLE_CALLS} times and nothing was run in between."
            )
        pairs = self._pairs(filter(self._is_inside, self._ready))
        if part is None:
            return pairs
        self._range((part,))
        return [pair for pair in pairs if pair[1] in (part, None)]

    def run(
        self,
        op: Op | str | Sequence[Op | str],
        *parts: int | None,
        lane: str | Lane | None = None,
        replace: Kernel | Callable[..., Any] | str | None = None,
        after: Sequence[tuple[Op | str, int | None]] = (),
    ) -> None:
        """Run an op on parts; several adjacent parts are one merged run, none means all parts.

        A tuple of ops with `replace=kernel` puts the kernel in their place: a function, what
        `weft.kernel` has declared, or the name of one that is given as `kernels=`.
        after: (op, part) pairs that must have ended before it starts, besides what it touches.
        """
        self._open("run")
        ops = [self._op(item) for item in ((op,) if isinstance(op, Op | str) else op)]
        if not ops or (len(ops) > 1 and replace is None):
            self._fail("run", "several ops in one run need a kernel: replace=kernel.")
        given = self._range(parts)
        wholes = {item.whole for item in ops}
        if wholes == {True, False} and given is not None and self.num_parts > 1:
            self._fail("run", f"{ops[0].name!r} and the others do not run on the same parts.")
        if True in wholes and given is not None:
            self._fail(
                "run",
                f"{ops[0].name!r} is {ops[0].rows}: it runs once for all parts, not for {given}.",
            )
        names = tuple(item.name for item in ops)
        edges = self._edges(after, pairs_of(self.graph, self.num_parts, names, given))
        for item in ops:
            if not self._is_inside((item.name, 0)):
                self._fail("within", f"{item.name!r} is not one of the ops of this block.")
            self._hold_shares(item, given)
            self._schedule(item, given)
        by = None if replace is None else self._kernel(replace, names)
        where = self._lane(ops, lane, by)
        step = Step("run", where.name, names, given, by=by, after=edges)
        self._fly(step)
        self.steps.append(step)
        self._idle = 0

    def in_flight(self) -> list[tuple[Op, int | None]]:
        """The (op, part) pairs of two-phase ops on the wire: run on a lane without a thread, and
        nothing recorded since reads what they make, or comes after them by an edge."""
        return self._pairs(self._flying)

    def sequential(self, reason: str = "") -> None:
        """All ops in program order, the batch whole: what plain PyTorch does."""
        self._open("sequential")
        if (self.steps or self.num_parts > 1) and not self._scopes:
            self._fail("sequential", "something was recorded already.")
        for number, op in enumerate(self.ops):
            pairs = pairs_of(self.graph, self.num_parts, (op.name,), None)
            left = [part for name, part in pairs if (name, part) not in self._done]
            # What reads nothing could start at once, and what it makes would fill the memory.
            early = number and op.uses == "io" and not op.touched
            after = [(self.ops[number - 1], None)] if early else []
            for part in [None] if len(left) == len(pairs) else left:
                self.run(op, part, after=after)
        self.notes.append(one_line(f"sequential: {reason}" if reason else "sequential"))
        self._closed = "" if self._scopes else "sequential()"

    def adopt(self, plan: Plan) -> None:
        """Take a lowered plan of this graph as it stands, with its waits, places and frees.

        Nothing more is recorded or lowered then; `verify` says whether it is safe.
        """
        self._open("adopt")
        if self.steps or self.num_parts > 1 or self._scopes:
            self._fail("adopt", "something was recorded already.")
        for lane in plan.lanes:
            if lane.device not in self.machine.device:
                self._fail("device", unknown("device", lane.device, self.machine.device))
        if plan.num_parts > 1:
            plan.cut.bounds(self.context.batch, self.context.tokens_per_request)
        self._adopted, self._closed = plan.bind(self.graph), "adopt()"

    def merge(self) -> None:
        """Put the outputs together. Raises `StrategyError` if an op was forgotten."""
        self._open("merge")
        self._complete()
        self._closed = "" if self._scopes else "merge()"

    def cost(self, op: Op | str, *parts: int | None) -> float:
        """Seconds that an op is expected to take on these parts (none: on the whole batch)."""
        item, span = self._op(op), self._range(parts)
        bounds = self._bounds(self.cut)
        start, stop = span or (0, self.num_parts)
        env = self.context.env(self.graph.batch, bounds[stop] - bounds[start])
        device = self.machine.lane_for(item).device
        return self.costs.run_s(self.graph, item, env, device)

    def lanes(self, op: Op | str) -> list[Lane]:
        """The lanes that may run an op."""
        return self.machine.lanes_for(self._op(op))

    def finish(self, note: str) -> Plan:
        """The recorded plan. Raises `StrategyError` if the strategy left something undone."""
        if (plan := self._adopted) is not None:
            kernels = {step.by: self.known[step.by] for step in plan.steps if step.by}
            return dataclasses.replace(
                plan, history=(f"write {note}", *plan.history), kernels=kernels
            )
        self._complete()
        if self.num_parts > 1 and self._closed != "merge()":
            self._fail("merge", "the batch was split and never merged: call s.merge() at the end.")
        graph, lane = self.graph, self.machine.lanes[0].name
        ops = [graph.op[name] for step in self.steps if step.parts for name in step.names]
        ranged = {name for op in ops for name in op.touched if graph.value[name].batch}
        heads = [Step("split", lane, (name,)) for name in graph.inputs if name in ranged]
        outputs = dict.fromkeys(graph.outputs) if self.num_parts > 1 else ()
        tails = [Step("merge", lane, (name,)) for name in outputs if graph.value[name].batch]
        steps = (*heads, *self.steps, *tails)
        history = (f"write {note}", *self.notes)
        return Plan(
            graph.name, graph.digest, self.cut, self.machine.lanes, steps,
            history=history, bound=graph, kernels=dict(self.kernels),
            declared=tuple(k.declaration for k in self.kernels.values() if k.declaration),
        )  # fmt: skip

    # What is scheduled: ops and parts, and those that each must come behind.

    def _reset(self) -> None:
        self._index = {op.name: number for number, op in enumerate(self.graph.ops)}
        self._before = precedence(self.graph, self.num_parts)
        self._after: dict[Pair, list[Pair]] = {pair: [] for pair in self._before}
        for pair, ahead in self._before.items():
            for earlier in ahead:
                self._after[earlier].append(pair)
        self._missing = {pair: len(ahead) for pair, ahead in self._before.items()}
        self._ready = {pair for pair, count in self._missing.items() if not count}
        self._done: set[Pair] = set()
        self._made_on: dict[str, list[Range | None]] = {}  # of ops that make dealt values
        self._flying: dict[Pair, tuple[Pair, ...]] = {}  # with all that the same step issued
        for step in self.steps:  # before a late split: all of them over all parts
            for op in map(self.graph.op.__getitem__, step.names):
                self._schedule(op, None)
            self._fly(step)

    def _pairs(self, pairs: Iterable[Pair]) -> list[tuple[Op, int | None]]:
        """Pairs in graph order, as callers know them."""
        ordered = sorted((self._index[name], name, part) for name, part in pairs)
        ops = [(self.graph.op[name], part) for _, name, part in ordered]
        return [(op, None if op.whole or self.num_parts == 1 else part) for op, part in ops]

    def _edges(
        self, after: Sequence[tuple[Op | str, int | None]], own: Sequence[Pair]
    ) -> tuple[Edge, ...]:
        """What a step comes after, as it stands in a plan."""
        edges: dict[Edge, None] = {}
        for item in after:
            if not isinstance(item, tuple) or len(item) != 2:
                self._fail("after", f"{item!r} is not an (op, part) pair, such as ('attn0', 0).")
            op, given = self._op(item[0]), self._range(item[1:])
            if op.whole and given is not None:
                self._fail("after", f"{op.name!r} is {op.rows}: say ({op.name!r}, None).")
            for pair in pairs_of(self.graph, self.num_parts, (op.name,), given):
                if pair not in self._done:
                    cycle = pair in own or not self._behind(pair).isdisjoint(own)
                    why = f"{self._name(own[0])} cannot come after {self._name(pair)}, which "
                    cure = "needs it: a cycle." if cycle else "has not been run yet: run it first."
                    self._fail("after", why + cure)
            edges[op.name, given] = None
        return tuple(edges)

    def _behind(self, pair: Pair) -> set[Pair]:
        """All that must come before a pair."""
        ahead, look = set[Pair](), [pair]
        while look:
            look += (fresh := set(self._before[look.pop()]) - ahead)
            ahead |= fresh
        return ahead

    def _fly(self, step: Step) -> None:
        """See what lands as a step is recorded, and whether its own ops are in flight."""
        own = pairs_of(self.graph, self.num_parts, step.names, step.parts)
        ahead = [pair for each in own for pair in self._before[each]]
        for name, parts in step.after:
            ahead += pairs_of(self.graph, self.num_parts, (name,), parts)
        for pair in ahead:
            for landed in self._flying.get(pair, ()):
                del self._flying[landed]
        if self.machine.lane[step.lane].via is not None:
            self._flying |= dict.fromkeys(own, tuple(own))

    def _schedule(self, op: Op, parts: Range | None) -> None:
        for part in range(*(parts or (0, 1 if op.whole else self.num_parts))):
            if (pair := (op.name, part)) in self._done:
                self._fail("run", f"{self._name(pair)} has been run already.")
            if pair not in self._ready:
                first = next(other for other in self._before[pair] if other not in self._done)
                where = "" if self._is_inside(first) else " (outside of this block: before it)"
                self._fail("run", f"{self._name(pair)} needs {self._name(first)} first{where}.")
            self._done.add(pair)
            self._ready.remove(pair)
            for later in self._after[pair]:
                self._missing[later] -= 1
                if not self._missing[later]:
                    self._ready.add(later)

    def _hold_shares(self, op: Op, parts: Range | None) -> None:
        """Refuse to read shares of parts in other parts than those in which they were made."""
        for name in self.graph.dealt.intersection(op.touched):
            maker = self.graph.maker[self.graph.root[name]].name
            made = self._made_on.get(maker)
            if made and parts not in made:
                spans = [bracket(s) if s else "the whole batch" for s in (parts, made[0])]
                self._fail(
                    "dealt",
                    f"{op.name!r}, run on {spans[0]}, reads {name!r}, of which each rank holds its "
                    f"share of {spans[1]}: run it on the parts on which {maker!r} ran.",
                )
        if self.graph.dealt.intersection(op.makes):
            self._made_on.setdefault(op.name, []).append(parts)

    def _complete(self) -> None:
        for pair in filter(self._is_inside, self._before):
            if pair not in self._done:
                needs = [each for each in self._before[pair] if each not in self._done]
                late = [self._name(each) for each in needs if not self._is_inside(each)]
                why = f": it needs {late[0]}, which is outside of this block" if late else ""
                self._fail("forgotten", f"{self._name(pair)} was never run{why}.")

    def _is_inside(self, pair: Pair) -> bool:
        """Whether an op is among those of the block around what is recorded now."""
        return not self._scopes or pair[0] in self._scopes[-1]

    # What a caller may say.

    def _name(self, pair: Pair) -> str:
        op, part = self.graph.op[pair[0]], pair[1]
        return op.name + ("" if op.whole or self.num_parts == 1 else bracket((part, part + 1)))

    def _op(self, op: Op | str) -> Op:
        name = op.name if isinstance(op, Op) else op
        if name not in self._index:
            self._fail("op", unknown("op", name, self._index))
        return self.graph.op[name]

    def _range(self, parts: Sequence[int | None]) -> Range | None:
        for part in parts:
            if isinstance(part, list | tuple | range | set):
                listed = ", ".join(map(str, part))
                self._fail("part", f"parts stand one by one: s.run(op, {listed}); got {part!r}.")
            if isinstance(part, Op) or (isinstance(part, str) and part in self._index):
                name = part.name if isinstance(part, Op) else part
                why = f"{name!r} is an op, and no part. A kernel for several ops takes them as one"
                self._fail("part", f"{why}: s.run((op, {name!r}), part, replace=kernel).")
        numbers = [part for part in parts if part is not None]
        if not numbers:
            return None
        for number in numbers:
            if not isinstance(number, int) or not 0 <= number < self.num_parts:
                self._fail(
                    "part", f"there is no part {number!r}; parts are 0 to {self.num_parts - 1}."
                )
        start, stop = min(numbers), max(numbers) + 1
        if len({*numbers}) != len(parts) or stop - start != len(parts):
            self._fail("part", f"{list(parts)} are not adjacent parts.")
        return None if stop - start == self.num_parts else (start, stop)

    def _lane(self, ops: list[Op], lane: str | Lane | None, by: str | None) -> Lane:
        if lane is None:
            # A kernel with two phases goes where its two-phase op would.
            halves = by is not None and by in self.kernels and self.kernels[by].issue is not None
            first = next((op for op in ops if op.two_phase), ops[0]) if halves else ops[0]
            chosen = self.machine.lane_for(first)
        else:
            name = lane.name if isinstance(lane, Lane) else lane
            if name not in self.machine.lane:
                self._fail("lane", unknown("lane", name, self.machine.lane))
            chosen = self.machine.lane[name]
        if len(ops) == 1 and ops[0].uses not in chosen.uses:
            self._fail(
                "lane",
                f"lane {chosen.name!r} does not take ops that use {ops[0].uses} ({ops[0].name}).",
            )
        if chosen.via is not None and not any(op.two_phase for op in ops):
            self._fail(
                "lane",
                f"lane {chosen.name!r} has no thread; {ops[0].name!r} has one phase and needs one.",
            )
        return chosen

    def _kernel(self, given: Kernel | Callable[..., Any] | str, names: tuple[str, ...]) -> str:
        """The name of a kernel in this plan; two of one name get a number."""
        if isinstance(given, str) and given not in self.known:
            if not NAME.fullmatch(given):
                self._fail("kernel", f"{given!r} is not a name.")
            name, declared = given, None
        else:
            kernel = self.known[given] if isinstance(given, str) else as_kernel(given)
            alike = [n for n, own in self.kernels.items() if own.called(kernel.name) == kernel]
            name = alike[0] if alike else kernel.name
            while not alike and name in self.kernels:
                name = f"{name}_{len(self.kernels)}"
            self.kernels.setdefault(name, kernel.called(name))
            declared = self.kernels[name].declaration
        for why in faults_of(self.graph, names, name, declared):
            self._fail("kernel", why)
        return name

    def _bounds(self, cut: Cut) -> tuple[int, ...]:
        context = self.context
        return cut.bounds(context.batch, context.tokens_per_request, self.graph.row_unit)

    def _open(self, call: str) -> None:
        if self._closed:
            self._fail(call, f"the plan is closed: {self._closed} was called before.")

    def _fail(self, rule: str, why: str) -> NoReturn:
        raise StrategyError(f"{rule}: {why}", rule=rule)
