"""The equivalence gate: is a model under a strategy equal to plain PyTorch, and if not, where?

    check(model, x, strategy="overlap")  ->  bit-equal | within tolerance | different, at op ...

The model and its inputs are copied first, so buffers, caches and random states are not spent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchweft.plan.context import context_of
from torchweft.plan.graph import Op
from torchweft.plan.kernels.declaration import Declaration
from torchweft.plan.kernels.fitting import makes_of, reads_of
from torchweft.plan.plan import Plan, Range, Step
from torchweft.private.core import tree_leaves
from torchweft.run.compare import Check, compare, difference, preserved
from torchweft.run.cpu import run
from torchweft.run.eager.build import Arguments, rows_at
from torchweft.run.kernels import KernelRun
from torchweft.run.writer import compile_program, taker
from torchweft.serve.piece import Piece

log = logging.getLogger("torchweft")
LOW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Types in which a sum depends on how many rows are summed beside it: libraries choose by sizes."""


Kept = Mapping[Piece, Sequence[Any]]
"""What each piece was called with."""


def first_difference(kept: Kept, limit: float | None) -> str | None:
    """The first op that gives other rows in parts than on the whole batch; with its source."""
    for piece, inputs in kept.items():
        if piece.graph.level == "boundary":  # its ops are the model's own calls, not ours
            continue
        if name := _first_difference(piece, inputs, limit):
            source = piece.graph.op[name].source
            return f"{name} of {piece.graph.name}" + (f", at {source}" if source else "")
    return None


class _Repeat:
    """A call of a piece that is run again, on copies of its inputs."""

    def __init__(self, piece: Piece, inputs: Sequence[Any]) -> None:
        self.piece, self.inputs = piece, inputs
        self.env = piece.captured.env(inputs)
        self.context = context_of(piece.graph, self.env)
        self.entry, _ = piece.plans.entry(self.context, self.env)
        self.bounds = piece.plans.shape(self.entry, self.context, self.env).bounds

    def run(self, plan: Plan, bodies: Mapping[str, Any], bounds: Sequence[int]) -> None:
        program = compile_program(plan, bodies)
        values, _ = self.piece.captured.bind(preserved(list(self.inputs)))
        given = [values[name] for name in self.piece.graph.inputs]
        numbers = program.numbers(self.env, bounds)
        run(program, given, bounds, self.piece.service.lanes, numbers=numbers)

    def record(self, plan: Plan, bounds: Sequence[int]) -> dict[str, list[tuple[Any, ...]]]:
        """Run the call by a plan and keep a copy of everything each op made, run by run."""
        made: dict[str, list[tuple[Any, ...]]] = {}

        def recorded(name: str, function: Any) -> Any:
            def run(*arguments: Any) -> Any:
                results = function(*arguments)
                copied = tuple(r.clone() if isinstance(r, torch.Tensor) else r for r in results)
                made.setdefault(name, []).append(copied)
                return results

            return run

        bodies = dict(self.piece.captured.bodies)
        for name, body in bodies.items():
            into = body.into and replace(body.into, function=recorded(name, body.into.function))
            run = recorded(name, body.function)
            bodies[name] = replace(body, compiled=run, issue=None, complete=None, into=into)
        self.run(plan, bodies, bounds)
        return made


def _first_difference(piece: Piece, inputs: Sequence[Any], limit: float | None) -> str | None:
    call = _Repeat(piece, inputs)
    plan, bounds, rows = call.entry.plan, call.bounds, call.context.batch
    whole = call.record(piece.plans.sequential(call.context).plan, (0, rows))
    parts = call.record(plan, bounds)
    ranges: dict[str, list[Range | None]] = {op.name: [] for op in piece.graph.ops}
    for step in plan.steps:
        if step.kind in ("run", "issue"):
            for name in step.names:
                ranges[name].append(step.parts)
    for op in piece.graph.ops:
        for results, parts_of in zip(parts.get(op.name, ()), ranges[op.name], strict=False):
            for name, result, wanted in zip(op.makes, results, whole[op.name][0], strict=True):
                if not isinstance(wanted, torch.Tensor):
                    continue
                value = piece.graph.value[name]
                if parts_of is not None and value.batch is not None:
                    start, stop = bounds[parts_of[0]], bounds[parts_of[1]]
                    wanted = taker(value)(wanted, rows, start, stop)
                if not compare(wanted, result, limit):
                    return op.name
    return None


def wrong_kernel(kept: Kept, limit: float | None) -> str | None:
    """The first kernel of a plan that gives other numbers than the ops it replaces, and how far."""
    judged = (_wrong_kernel(piece, inputs, limit) for piece, inputs in kept.items())
    return next(filter(None, judged), None)


def _wrong_kernel(piece: Piece, inputs: Sequence[Any], limit: float | None) -> str | None:
    if not any(entry.plan.kernels for entry in piece.plans.entries):
        return None
    call = _Repeat(piece, inputs)
    plan, bounds = call.entry.plan, call.bounds
    steps, judges, told = list(plan.steps), dict[str, Any](), list[Declaration]()
    names: dict[object, str] = {}  # the issue and the complete of a run have one judge
    wrong: list[str] = []
    for at, step in enumerate(steps):
        if step.by is None:
            continue
        name = names.setdefault((step.by, step.names, step.parts), f"judge{len(names)}")
        steps[at] = step._replace(by=name)
        if name not in judges:
            start, stop = step.parts or (0, plan.num_parts)
            here = {**call.env, piece.graph.batch or "": bounds[stop] - bounds[start]}
            judges[name] = judge = _Judge(piece, plan, step, here, limit, wrong)
            declared = plan.declaration.get(step.by, Declaration(name))
            told.append(declared._replace(name=name, reads=tuple(judge.names)))
    judged = replace(plan, steps=tuple(steps), kernels=judges, declared=tuple(told))
    call.run(judged, piece.captured.bodies, bounds)
    return wrong[0] if wrong else None


@dataclass(eq=False)
class _Judge:
    """A kernel beside the ops that it replaces: both run, and what the kernel gives goes on."""

    piece: Piece
    plan: Plan
    step: Step
    env: Mapping[str, int]
    limit: float | None
    wrong: list[str]

    def __post_init__(self) -> None:
        graph, names = self.piece.graph, self.step.names
        kernel = self.plan.kernels[self.step.by or ""]
        self.judged = KernelRun(self.plan, self.step, kernel)
        self.sizes = self.judged.sizes
        self.names = list(dict.fromkeys([*reads_of(graph, names), *self.judged.names]))

    def run(self, sizes: tuple[int, ...], *reads: Any) -> Any:
        return self.complete(sizes, self.issue(sizes, *reads))

    def issue(self, sizes: tuple[int, ...], *reads: Any) -> Any:
        """What the kernel makes of it, behind what was read and a copy of that."""
        kept = dict(zip(self.names, reads, strict=True))
        copies = dict(zip(self.names, preserved(reads), strict=True))
        return copies, kept, self.judged.issue(sizes, *map(kept.__getitem__, self.judged.names))

    def complete(self, sizes: tuple[int, ...], flight: Any) -> Any:
        """What the kernel gives. The ops have run on the copies by then, and were compared."""
        values, kept, flown = flight
        made = self.judged.complete(sizes, flown)
        graph, bodies = self.piece.graph, self.piece.captured.bodies
        ops = [graph.op[name] for name in self.step.names]
        for op in ops:
            results = bodies[op.name](*(values[read] for read in op.reads), env=self.env)
            values |= dict(zip(op.makes, results, strict=True))
        changed = [name for name in self.names if self._is_changed(name, ops)]
        wanted = [values[name] for name in (*makes_of(graph, self.step.names), *changed)]
        verdict = compare(wanted, [*made, *(kept[name] for name in changed)], self.limit)
        if not verdict and all(op.rows != "random" for op in ops):
            where = f"kernel {self.step.by!r} in place of {self.step.label}"
            self.wrong.append(f"{where}: {verdict}")
        return made

    def _is_changed(self, name: str, ops: Sequence[Op]) -> bool:
        """Whether the ops change a value and somebody else sees it afterwards."""
        graph, root = self.piece.graph, self.piece.graph.root[name]
        if not any(name in op.mutates for op in ops):
            return False
        behind = graph.ops[graph.ops.index(ops[-1]) + 1 :]
        seen = {graph.root[read] for op in behind if op not in ops for read in op.touched}
        return root in seen.union(graph.inputs, (graph.root[name] for name in graph.outputs))


def run_copy(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], random_state: Any
) -> tuple[Any, Any]:
    """Call a model on copies of its inputs: (outputs, everything it may have changed)."""
    held, named = preserved((list(args), dict(kwargs)))
    torch.set_rng_state(random_state)
    outputs = model(*held, **named)
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    return outputs, (held, named, buffers)


def own_differences(
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Any,
    dim: int,
) -> dict[int, float]:
    """By how much a model's outputs of low precision, by number, differ in batches of other sizes.

    None of them if the model draws numbers, cannot be called so, or has no rows.
    """
    whole, given = tree_leaves(outputs), Arguments.of(args, kwargs, dim)
    rows = given.rows
    low = [n for n, leaf in enumerate(whole) if getattr(leaf, "dtype", None) in LOW]
    if not low or rows < 2:
        return {}
    random_state = torch.get_rng_state()
    worst: dict[int, float] = {}
    for cut in sorted({1, rows // 3 or 1, rows // 2, rows - 1}):
        parts = []
        for start, count in ((0, cut), (cut, rows - cut)):
            pairs = zip(given.tensors, given.batched, strict=True)
            tensors = [t.narrow(dim, start, count) if has_rows else t for t, has_rows in pairs]
            part_args, part_kwargs = given.nest.with_tensors(tensors)
            try:
                made, _ = run_copy(plain, part_args, part_kwargs, random_state)
            except Exception:  # a model for batches of one size only
                return {}
            if not torch.equal(random_state, torch.get_rng_state()):
                return {}
            parts.append(tree_leaves(made))
        for number in low:
            at = rows_at(whole[number].shape, rows, dim)
            pieces = [part[number] for part in parts] if at is not None else []
            if pieces and sum(each.shape[at] for each in pieces) == whole[number].shape[at]:
                diff, _ = difference(whole[number], torch.cat(pieces, at or 0))
                worst[number] = max(worst.get(number, 0.0), diff)
    return worst


class Shadow:
    """Compares calls of a compiled model with eager, and counts what it saw.

    every: the N-th ones, or, below 1, as many as take that share of the time of all calls.
    """

    def __init__(self, every: float, tolerance: float | None = None) -> None:
        self.every, self.tolerance = every, tolerance
        self.num_calls = self.num_compared = 0
        self.called_s = self.compared_s = 0.0
        self.failures: list[Check] = []

    def __call__(
        self, call: Callable[..., Any], plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run `call`; if it is its turn, run `plain` on copies too and compare."""
        self.num_calls += 1
        start = time.perf_counter()
        over = self.compared_s > self.every * self.called_s
        if over if self.every < 1 else self.num_calls % self.every:
            outputs = call(*args, **kwargs)
            self.called_s += time.perf_counter() - start
            return outputs
        owner = getattr(plain, "__self__", None)
        buffers = dict(owner.named_buffers()) if isinstance(owner, nn.Module) else {}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        held, named = preserved((list(args), dict(kwargs)))
        state = torch.get_rng_state()
        called = time.perf_counter()
        outputs = call(*args, **kwargs)
        called_s = time.perf_counter() - called
        after_state, after = torch.get_rng_state(), {n: b.clone() for n, b in buffers.items()}
        _restore(buffers, before)
        torch.set_rng_state(state)
        with torch.compiler.set_stance("force_eager"):
            wanted = plain(*held, **named)
        _restore(buffers, after)
        torch.set_rng_state(after_state)
        verdict = compare(wanted, outputs, self.tolerance)
        self.num_compared += 1
        self.called_s += called_s
        self.compared_s += time.perf_counter() - start - called_s
        if not verdict:
            self.failures.append(verdict)
            log.error("shadow check: call %d differs from eager: %s", self.num_calls, verdict)
        return outputs


def _restore(buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])
