"""The reference run: ops in program order, each over the whole batch or part by part.

It is slow and plain, and says what a graph means: every runtime must give the same. A part of a
value is a view where its rows lie one after another; a merge is a `torch.cat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from torchweft.capture.dynamo import Capture
from torchweft.plan.graph import Batch, Op


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
        """A value over all rows; parts are joined once and for all."""
        if name in self.parts:
            batch = self.graph.value[name].batch
            assert batch is not None, "only values with a batch are made in parts"
            self.wholes[name] = merge(self.parts.pop(name), batch, self.env)
        return self.wholes[name]

    def part(self, name: str, number: int, *, writable: bool) -> Any:
        """A value's rows of one part; a value without a batch is the same for all."""
        if name in self.parts:
            return self.parts[name][number]
        batch = self.graph.value[name].batch
        if batch is None:
            return self.wholes[name]
        start, stop = self.bounds[number], self.bounds[number + 1]
        return take_rows(self.wholes[name], batch, start, stop, self.env, keep_view=writable)


def take_rows(
    tensor: torch.Tensor,
    batch: Batch,
    start: int,
    stop: int,
    env: dict[str, int],
    *,
    keep_view: bool = False,
) -> torch.Tensor:
    """Rows `start` to `stop` of a tensor whose rows are where `batch` says."""
    outer, inner = batch.outer.evaluate(env), batch.inner.evaluate(env)
    if outer == 1:
        piece = tensor.narrow(batch.dim, start * inner, (stop - start) * inner)
    else:
        apart = _apart(tensor, batch.dim, outer, inner)
        piece = apart.narrow(batch.dim + 1, start, stop - start).flatten(batch.dim, batch.dim + 2)
    if not keep_view and tensor.is_contiguous() and not piece.is_contiguous():
        return piece.contiguous()
    return piece


def merge(parts: Sequence[torch.Tensor], batch: Batch, env: dict[str, int]) -> torch.Tensor:
    """Parts joined to the whole."""
    outer, inner = batch.outer.evaluate(env), batch.inner.evaluate(env)
    if outer == 1:
        return torch.cat(list(parts), batch.dim)
    apart = [_apart(part, batch.dim, outer, inner) for part in parts]
    return torch.cat(apart, batch.dim + 1).flatten(batch.dim, batch.dim + 2)


def permute_rows(
    tensor: torch.Tensor, batch: Batch, order: torch.Tensor, env: dict[str, int]
) -> torch.Tensor:
    """The rows of a tensor in another order."""
    outer, inner = batch.outer.evaluate(env), batch.inner.evaluate(env)
    apart = _apart(tensor, batch.dim, outer, inner).index_select(batch.dim + 1, order)
    return apart.flatten(batch.dim, batch.dim + 2)


def _apart(tensor: torch.Tensor, dim: int, outer: int, inner: int) -> torch.Tensor:
    """Dim `dim` as three: outer, rows, inner."""
    shape = list(tensor.shape)
    return tensor.reshape(*shape[:dim], outer, -1, inner, *shape[dim + 1 :])


def even_bounds(num_rows: int, num_parts: int) -> tuple[int, ...]:
    """Borders of parts of nearly equal size."""
    return tuple(round(number * num_rows / num_parts) for number in range(num_parts + 1))
