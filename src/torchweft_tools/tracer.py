"""A `Tracer`: a Dynamo backend that captures every graph of a model and runs the reference.

tracer = Tracer(rules=...)
compiled = tracer.compile(model)          # torch.compile with the settings that capture needs
compiled(x)                               # equal to model(x)
tracer.captures                           # one `Capture` a graph (graph breaks make several)
tracer.cut = lambda rows: (0, 1, rows)    # from now on row-wise ops run part by part

The reference run says what a graph means, slowly and plainly: ops in program order, each over the
whole batch or part by part. Every runtime must give the same. A part of a value is a view where its
rows lie one after another; a merge is a `torch.cat`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from torchweft.capture.dynamo import Capture, capture
from torchweft.capture.marks import MarkRule, require_matched
from torchweft.capture.rows.axes import rows_apart
from torchweft.capture.tracing import Watch, compile_by
from torchweft.plan.graph import Op


@dataclass
class Tracer:
    """Captures graphs, and runs them by the reference."""

    rules: Sequence[MarkRule] = ()
    batch: int | str | Sequence[str] | None = None
    cut: Callable[[int], Sequence[int]] | None = None
    captures: list[Capture] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend that Dynamo calls."""
        captured = capture(gm, example_inputs, rules=self.rules, batch=self.batch)
        self.captures.append(captured)

        def run(*inputs: Any) -> Any:
            _, env = captured.bind(inputs)
            rows = env.get(captured.graph.batch or "", 0)
            cuts = self.cut is not None and rows > 1 and captured.splits(env)
            bounds = self.cut(rows) if self.cut is not None and cuts else None
            return run_reference(captured, inputs, bounds)

        return run

    def compile(self, model: Callable[..., Any], *, fullgraph: bool = False) -> Callable[..., Any]:
        """The model under this tracer; the batch is dynamic from the first call on."""
        dim = self.batch if isinstance(self.batch, int) else 0
        watch = Watch(partial(compile_by, self, model, fullgraph=fullgraph), model, dim=dim)
        return lambda *args, **kwargs: watch(args, kwargs)

    def require_matched(self) -> None:
        """Raise `CaptureError` if a rule matched nothing in any captured graph."""
        matched = [rule for captured in self.captures for rule in captured.matched]
        require_matched(self.rules, matched)


def run_reference(
    captured: Capture, inputs: Sequence[Any], bounds: Sequence[int] | None = None
) -> tuple[Any, ...]:
    """Run all ops in program order. With `bounds` (0, ..., rows), row-wise ops run part by part."""
    values, env = captured.bind(inputs)
    run = _ReferenceRun(captured, values, env, list(bounds or []))
    for op in captured.graph.ops:
        run.run(op)
    whole = {name: run.whole(name) for name in captured.graph.outputs}
    return captured.rebuild(whole, env)


class _ReferenceRun:
    """Values of one run: whole, or as a list of parts."""

    def __init__(
        self, captured: Capture, values: dict[str, Any], env: dict[str, int], bounds: list[int]
    ) -> None:
        self.captured, self.graph = captured, captured.graph
        self.wholes, self.env, self.bounds = values, env, bounds
        self.parts: dict[str, list[torch.Tensor]] = {}

    def run(self, op: Op) -> None:
        body = self.captured.bodies[op.name]
        if op.rows != "row-wise" or not self.bounds:
            results = body(*[self.whole(name) for name in op.reads], env=self.env)
            self.wholes.update(zip(op.makes, results, strict=True))
            return
        made: list[tuple[Any, ...]] = []
        for number, (start, stop) in enumerate(pairwise(self.bounds)):
            reads = [self.part(name, number, writable=name in op.mutates) for name in op.reads]
            made.append(body(*reads, env=self._env(stop - start)))
        for index, name in enumerate(op.makes):
            self.parts[name] = [results[index] for results in made]

    def _env(self, num_rows: int) -> dict[str, int]:
        env = dict(self.env)
        for name in (self.graph.batch, *self.captured.same):
            if name is not None:
                env[name] = num_rows
        return env

    def whole(self, name: str) -> Any:
        """A value over all rows; its parts are joined once."""
        if name in self.parts:
            batch = self.graph.value[name].batch
            assert batch is not None, "only values with a batch are made in parts"
            pairs = zip(self.parts.pop(name), pairwise(self.bounds), strict=True)
            apart = [rows_apart(part, batch, stop - start) for part, (start, stop) in pairs]
            whole = torch.cat(apart, batch.dim + 1)
            self.wholes[name] = whole.flatten(batch.dim, batch.dim + 2)
        return self.wholes[name]

    def part(self, name: str, number: int, *, writable: bool) -> Any:
        """A value's rows of one part; a value without a batch is the same for all."""
        if name in self.parts:
            return self.parts[name][number]
        batch = self.graph.value[name].batch
        if batch is None:
            return self.wholes[name]
        start, stop = self.bounds[number], self.bounds[number + 1]
        whole, dim = self.wholes[name], batch.dim
        rows = rows_apart(whole, batch, self.bounds[-1]).narrow(dim + 1, start, stop - start)
        piece = rows.flatten(dim, dim + 2)
        return piece.contiguous() if whole.is_contiguous() and not writable else piece
