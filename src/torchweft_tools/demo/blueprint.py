"""A blueprint: the graph of a well-known model, drawn by hand from its dimensions.

For demos, tests and benchmarks where no model has to run. `transformer` is a dense decoder under
tensor parallelism (each all_reduce is a two-phase network op on one communicator):

    x -> attn0 -> reduce_attn0 -> mlp0 -> reduce_mlp0 -> attn1 -> ... -> head
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.sizes import Size

ROWS = Size.of("s0")


def transformer(
    num_layers: int = 2,
    hidden: int = 1024,
    *,
    tensor_parallel: bool = True,
    kv_cache: bool = False,
) -> Graph:
    """A decoder of `num_layers` layers over a batch of tokens `s0`."""
    num_shards = 2 if tensor_parallel else 1
    values, ops, inputs = [_rows("x", hidden)], list[Op](), ["x"]

    def matmul(
        name: str, source: str, body: str, factor: int, made: str, changed: tuple[str, ...] = ()
    ) -> str:
        """An op with a weight of its own; `factor` times hidden wide, shared by all shards."""
        wide, weight = factor * hidden // num_shards, f"w_{name}"
        values.append(Value(weight, (Size.of(wide), Size.of(hidden))))
        values.append(_rows(made, hidden, placeable=True))
        inputs.append(weight)
        reads, flops = (source, weight), ROWS * (2 * wide * hidden)
        ops.append(Op(name, reads, (made,), changed, mark=body, body=body, flops=flops))
        return made

    last = "x"
    for layer in range(num_layers):
        for kind, factor in (("attn", 4), ("mlp", 8)):
            name, caches = f"{kind}{layer}", [f"kv{layer}"] if kind == "attn" and kv_cache else []
            num_before = len(ops)
            values += [_rows(cache, 2 * hidden) for cache in caches]
            inputs += caches
            last = matmul(name, last, kind, factor, f"{name}_out", tuple(caches))
            if tensor_parallel:
                values.append(_rows(f"reduce_{name}_out", hidden))
                ops.append(_all_reduce(f"reduce_{name}", last))
                last = values[-1].name
            place: Any = {"path": f"layers.{layer}.{kind}", "layer": layer, "block": "Layer"}
            ops[num_before:] = [replace(op, **place) for op in ops[num_before:]]
    matmul("head", last, "head", num_shards, "y")
    name = f"transformer{num_layers}"
    return Graph(name, tuple(values), tuple(ops), tuple(inputs), ("y",), "s0")


def _rows(name: str, wide: int, *, placeable: bool = False) -> Value:
    """A value with one row a token."""
    return Value(name, (ROWS, Size.of(wide)), batch=Batch(0), placeable=placeable)


def _all_reduce(name: str, source: str) -> Op:
    talk = Collective("all_reduce", "tp")
    both = (source,), (f"{name}_out",)
    return Op(name, *both, uses="network", two_phase=True, collective=talk, body="sum")
