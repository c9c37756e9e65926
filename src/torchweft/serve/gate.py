"""The equivalence gate: is a model under a strategy equal to plain PyTorch, and if not, where?

    check(model, x, strategy="overlap")  ->  bit-equal | within tolerance | different, at op ...

The model and its inputs are copied first, so buffers, caches and random states are not spent.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchweft.plan.plan import Step
from torchweft.private.core import tree_map
from torchweft.run.compare import Check, compare
from torchweft.run.cpu import run
from torchweft.run.program import makes_of, reads_of
from torchweft.run.rows import taker
from torchweft.run.writer import compile_program
from torchweft.serve.piece import Piece
from torchweft.serve.plans import PlanEntry, context_of

log = logging.getLogger("torchweft")


def preserved(inputs: Any) -> Any:
    """A copy of a nest of inputs; tensors that share bytes share them in the copy too."""
    try:
        return copy.deepcopy(inputs)
    except RuntimeError:  # a tensor with a gradient history: cloned one by one
        pass

    def one(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return tree_map(one, inputs)


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


def _first_difference(piece: Piece, inputs: Sequence[Any], limit: float | None) -> str | None:
    values, env = piece.captured.bind(preserved(list(inputs)))
    context = context_of(piece.graph, env)
    entry, _ = piece.plans.entry(context, env)
    sequential = piece.plans.sequential(context)
    bounds, rows = piece.plans.shape(entry, context, env).bounds, context.batch
    given = [values[name] for name in piece.graph.inputs]
    whole = _record(piece, sequential, given, env, (0, rows))
    values, _ = piece.captured.bind(preserved(list(inputs)))
    parts = _record(piece, entry, [values[name] for name in piece.graph.inputs], env, bounds)
    ranges = _ranges(entry)
    for op in piece.graph.ops:
        for made, parts_of in zip(parts.get(op.name, ()), ranges[op.name], strict=False):
            for name, found, wanted in zip(op.makes, made, whole[op.name][0], strict=True):
                if not isinstance(wanted, torch.Tensor):
                    continue
                value = piece.graph.value[name]
                if parts_of is not None and value.batch is not None:
                    start, stop = bounds[parts_of[0]], bounds[parts_of[1]]
                    wanted = taker(value)(wanted, rows, start, stop)
                if not compare(wanted, found, limit):
                    return op.name
    return None


def wrong_kernel(kept: Kept, limit: float | None) -> str | None:
    """The first kernel of a plan that gives other numbers than the ops it replaces, and how far."""
    judged = (_wrong_kernel(piece, inputs, limit) for piece, inputs in kept.items())
    return next(filter(None, judged), None)


def _wrong_kernel(piece: Piece, inputs: Sequence[Any], limit: float | None) -> str | None:
    if not any(entry.plan.kernels for entry in piece.plans.entries):
        return None
    values, env = piece.captured.bind(preserved(list(inputs)))
    context = context_of(piece.graph, env)
    entry, _ = piece.plans.entry(context, env)
    plan, bounds = entry.plan, piece.plans.shape(entry, context, env).bounds
    steps, judges = list(plan.steps), dict[str, Any]()
    names: dict[object, str] = {}  # the issue and the complete of a run have one judge
    wrong: list[str] = []
    for at, step in enumerate(steps):
        if step.by is not None:
            start, stop = step.parts or (0, plan.num_parts)
            here = {**env, piece.graph.batch or "": bounds[stop] - bounds[start]}
            name = names.setdefault((step.by, step.names, step.parts), f"judge{len(names)}")
            judge = _Judge(piece, step, plan.kernels[step.by], here, limit, wrong)
            steps[at], judges = step._replace(by=name), {name: judge, **judges}
    judged = replace(plan, steps=tuple(steps), kernels=judges)
    program = compile_program(judged, piece.captured.bodies)
    given, numbers = [values[name] for name in piece.graph.inputs], program.numbers(env, bounds)
    run(program, given, bounds, piece.service.lanes, numbers=numbers)
    return wrong[0] if wrong else None


class _Judge:
    """A kernel beside the ops that it replaces: both run, and what the kernel gives goes on."""

    def __init__(
        self,
        piece: Piece,
        step: Step,
        kernel: Any,
        env: Mapping[str, int],
        limit: float | None,
        wrong: list[str],
    ) -> None:
        self.graph, self.bodies, self.step = piece.graph, piece.captured.bodies, step
        self.kernel, self.env, self.limit, self.wrong = kernel, env, limit, wrong

    def __call__(self, *reads: Any) -> Any:
        return self.complete(self.issue(*reads, at_once=True))

    def issue(self, *reads: Any, at_once: bool = False) -> Any:
        """What the kernel makes of it, behind what was read and a copy of that."""
        start = None if at_once else getattr(self.kernel, "issue", None)
        return preserved(reads), reads, (start or self.kernel)(*reads), start is not None

    def complete(self, flight: Any) -> Any:
        """What the kernel gives. The ops have run on the copies by then, and were compared."""
        copies, reads, made, flies = flight
        made = self.kernel.complete(made) if flies else made
        names, ops = reads_of(self.graph, self.step), [self.graph.op[n] for n in self.step.names]
        kept, values = (dict(zip(names, r, strict=True)) for r in (reads, copies))
        for op in ops:
            results = self.bodies[op.name](*(values[read] for read in op.reads), env=self.env)
            values |= dict(zip(op.makes, results, strict=True))
        changed = [name for name in names if any(name in op.mutates for op in ops)]
        wanted = [values[name] for name in (*makes_of(self.graph, self.step), *changed)]
        verdict = compare(wanted, [*made, *(kept[name] for name in changed)], self.limit)
        if not verdict and all(op.rows != "random" for op in ops):
            self.wrong.append(f"kernel {self.step.by!r} in place of {self.step.label}: {verdict}")
        return made


def _record(
    piece: Piece,
    entry: PlanEntry,
    given: Sequence[Any],
    env: dict[str, int],
    bounds: Sequence[int],
) -> dict[str, list[tuple[Any, ...]]]:
    """Run an entry's plan and keep a copy of everything each op made, run by run."""
    made: dict[str, list[tuple[Any, ...]]] = {}
    bodies = {name: _Recorder(name, body, made) for name, body in piece.captured.bodies.items()}
    program = compile_program(entry.plan, bodies)
    run(program, given, bounds, piece.service.lanes, numbers=program.numbers(env, bounds))
    return made


class _Recorder:
    """A body that leaves a copy of its results."""

    def __init__(self, name: str, body: Any, made: dict[str, list[tuple[Any, ...]]]) -> None:
        self.name, self.sizes, self.made = name, body.sizes, made
        self.inside: Callable[..., Any] = getattr(body, "function", body)

    def __call__(self, *arguments: Any) -> Any:
        results = self.inside(*arguments)
        copied = tuple(r.clone() if isinstance(r, torch.Tensor) else r for r in results)
        self.made.setdefault(self.name, []).append(copied)
        return results


def _ranges(entry: PlanEntry) -> Mapping[str, list[tuple[int, int] | None]]:
    found: dict[str, list[tuple[int, int] | None]] = {op.name: [] for op in entry.plan.graph.ops}
    for step in entry.plan.steps:
        if step.kind in ("run", "issue"):
            for name in step.names:
                found[name].append(step.parts)
    return found


def run_copy(
    model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], random_state: Any
) -> tuple[Any, Any]:
    """Call a model on copies of its inputs: (outputs, everything it may have changed)."""
    held, named = preserved((list(args), dict(kwargs)))
    torch.set_rng_state(random_state)
    outputs = model(*held, **named)
    buffers = dict(model.named_buffers()) if isinstance(model, nn.Module) else {}
    return outputs, (held, named, buffers)


class Shadow:
    """Compares every N-th call of a compiled model with eager, and counts what it saw."""

    def __init__(self, every: int, tolerance: float | None = None) -> None:
        self.every, self.tolerance = every, tolerance
        self.num_calls = self.num_compared = 0
        self.failures: list[Check] = []

    def __call__(
        self, call: Callable[..., Any], plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run `call`; if it is its turn, run `plain` on copies too and compare."""
        self.num_calls += 1
        if self.num_calls % self.every:
            return call(*args, **kwargs)
        owner = getattr(plain, "__self__", None)
        buffers = dict(owner.named_buffers()) if isinstance(owner, nn.Module) else {}
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        held, named = preserved((list(args), dict(kwargs)))
        state = torch.get_rng_state()
        outputs = call(*args, **kwargs)
        after_state, after = torch.get_rng_state(), {n: b.clone() for n, b in buffers.items()}
        _restore(buffers, before)
        torch.set_rng_state(state)
        with torch.compiler.set_stance("force_eager"):
            wanted = plain(*held, **named)
        _restore(buffers, after)
        torch.set_rng_state(after_state)
        verdict = compare(wanted, outputs, self.tolerance)
        self.num_compared += 1
        if not verdict:
            self.failures.append(verdict)
            log.error("shadow check: call %d differs from eager: %s", self.num_calls, verdict)
        return outputs


def _restore(buffers: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(values[name])
