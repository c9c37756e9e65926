"""The `probe`: ops that no rule vouches for, tried on real rows.

    whole:     y = op(x)
    in parts:  op(x[:1]), op(x[1:4]), op(x[4:])   must join to y
    permuted:  op(x[order])                       must be y[order]

An op that passes is row-wise as far as anybody saw: it is listed in `Capture.assumed`. That is no
proof (it may mix rows once a number is large), so only strict=False has ops tried. Only
marked ops and custom operators are tried, on the values of one real call; never an op that
writes, draws random numbers or talks to other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from torchweft.capture.dynamo import Capture
from torchweft.plan.graph import Batch, Op

MIN_ROWS = 4
TOLERANCE = 1e-4
CURE = "(if it is row-wise, weft.row_wise or rows='row-wise' says so; strict=False tries it)"


def untried(captured: Capture) -> Capture:
    """What was captured, with a cure beside the reason of each op that could be tried."""
    told = {op.name for op in captured.graph.ops if _is_candidate(captured, op)}
    items = captured.reasons.items()
    return replace(captured, reasons={n: f"{why} {CURE}" if n in told else why for n, why in items})


def probe(captured: Capture, inputs: Sequence[Any]) -> Capture:
    """Try ops that are mixing for want of a rule; those that pass become row-wise, as assumed."""
    copies = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    values, env = captured.bind(copies)  # ops that write leave the caller's tensors alone
    batch = captured.graph.batch
    candidates = {op.name for op in captured.graph.ops if _is_candidate(captured, op)}
    if batch is None or env[batch] < MIN_ROWS or not captured.splits(env) or not candidates:
        return captured
    passed: list[str] = []
    with torch.no_grad():
        for op in captured.graph.ops:
            reads = [values[name] for name in op.reads]
            if op.collective is not None:
                made = _unheard(captured, op, reads, env)
            else:
                made = captured.bodies[op.name](*reads, env=env)
            values.update(zip(op.makes, made, strict=True))
            if op.name in candidates and _passes(captured, op, reads, made, env):
                passed.append(op.name)
    if not passed:
        return captured
    ops = [replace(op, rows="row-wise") if op.name in passed else op for op in captured.graph.ops]
    reasons = {name: why for name, why in captured.reasons.items() if name not in passed}
    graph = replace(captured.graph, ops=tuple(ops))
    return replace(captured, graph=graph, reasons=reasons, assumed=tuple(passed))


def _is_candidate(captured: Capture, op: Op) -> bool:
    if op.rows != "mixing" or op.mutates or op.collective is not None or not op.makes:
        return False
    made = [captured.graph.value[name] for name in op.makes]
    if any(value.batch is None or value.alias_of is not None for value in made):
        return False
    why = captured.reasons.get(op.name, "")
    return op.mark is not None or (
        "no rule says how" in why and "no rule says how aten." not in why
    )


def _passes(
    captured: Capture, op: Op, reads: list[Any], made: Sequence[Any], env: dict[str, int]
) -> bool:
    """Whether parts join to the whole, and permuted rows give permuted results."""
    batch = captured.graph.batch
    assert batch is not None, "a graph without a batch has no rows to try"
    rows = env[batch]

    def run(chosen: torch.Tensor) -> tuple[Any, ...]:
        """What the op makes of some rows."""
        pairs = zip(op.reads, reads, strict=True)
        given = [_rows_at(captured, name, read, chosen, env) for name, read in pairs]
        sizes = {**env, **dict.fromkeys((batch, *captured.same), len(chosen))}
        return captured.bodies[op.name](*given, env=sizes)

    order = torch.roll(torch.arange(rows), 1).flip(0)
    try:
        parts = [run(torch.arange(*span)) for span in pairwise((0, 1, rows // 2 + 1, rows))]
        permuted = run(order)
        for number, (name, whole) in enumerate(zip(op.makes, made, strict=True)):
            place = captured.graph.value[name].batch
            assert place is not None, "only values with a batch are tried"
            if not _close(merge([part[number] for part in parts], place, env), whole):
                return False
            if not _close(permuted[number], _rows_at(captured, name, whole, order, env)):
                return False
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True


def _rows_at(
    captured: Capture, name: str, value: Any, chosen: torch.Tensor, env: dict[str, int]
) -> Any:
    """Some rows of a value, copied; all of it if it has no rows."""
    place = captured.graph.value[name].batch
    if place is None:
        return value
    apart = rows_apart(value, place, env).index_select(place.dim + 1, chosen)
    return apart.flatten(place.dim, place.dim + 2)


def _unheard(
    captured: Capture, op: Op, reads: Sequence[Any], env: dict[str, int]
) -> tuple[Any, ...]:
    """What stands in for the results of a collective: other ranks may have nothing to try.

    Its own share where that has the right shape, else numbers at random.
    """
    made = []
    for value in map(captured.graph.value.__getitem__, op.makes):
        shape = [size.evaluate(env) for size in value.shape]
        alike = [r for r in reads if isinstance(r, torch.Tensor) and list(r.shape) == shape]
        dtype = getattr(torch, value.dtype)
        made.append(alike[0].clone() if alike else torch.rand(shape).to(dtype))
    return tuple(made)


def _close(got: Any, want: Any) -> bool:
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return bool(torch.allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))


def merge(parts: Sequence[torch.Tensor], batch: Batch, env: dict[str, int]) -> torch.Tensor:
    """Parts joined to the whole."""
    apart = [rows_apart(part, batch, env) for part in parts]
    return torch.cat(apart, batch.dim + 1).flatten(batch.dim, batch.dim + 2)


def rows_apart(tensor: torch.Tensor, batch: Batch, env: dict[str, int]) -> torch.Tensor:
    """The dim of the rows as three: outer, rows, inner."""
    outer, inner = batch.outer.evaluate(env), batch.inner.evaluate(env)
    shape = list(tensor.shape)
    return tensor.reshape(*shape[: batch.dim], outer, -1, inner, *shape[batch.dim + 1 :])
