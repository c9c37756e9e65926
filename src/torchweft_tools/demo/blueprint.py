"""A blueprint: the graph of a well-known model, drawn by hand from its dimensions.

For demos, tests and benchmarks where no model has to run. `transformer` is a dense decoder under
tensor parallelism (each all_reduce is a two-phase network op on one communicator), `experts` a
decoder whose experts are spread over the ranks, with a shared one beside them on each, `on_disk` a
stack whose weights a load brings in, layer by layer, `sequence` one whose ranks share the positions
and give them for heads, and back, around each attention:

    x -> attn0 -> reduce_attn0 -> mlp0 -> reduce_mlp0 -> attn1 -> ... -> head

    x -> qkv0 -> attn0 (memory) -> route0 -> dispatch0 -> experts0 -> combine0 -> weigh0 -> join0
                                      |----> shared0 ------------------------------------>|

    x -> qkv0 -> heads0 (all_to_all) -> attn0 -> back0 (all_to_all) -> mlp0 -> qkv1 -> ...
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.sizes import Size

ROWS = Size.of("s0")
POSITIONS = 64  # that a token of `experts` attends to


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


def experts(num_layers: int = 2, hidden: int = 1024) -> Graph:
    """A decoder of `num_layers` layers with experts on all ranks, over a batch of tokens `s0`."""
    values, ops, inputs = [_rows("x", hidden)], list[Op](), ["x"]

    def add(
        name: str, reads: tuple[str, ...], wide: int, factor: int, uses: str = "compute"
    ) -> str:
        """An op of `factor` square products a row, with weights (or a cache) of its own."""
        made, kind = f"{name}_out", name.rstrip("0123456789")
        values.append(_rows(made, wide * hidden, placeable=True))
        place: Any = {"path": f"layers.{layer}.{kind}", "layer": layer, "block": "Layer"}
        if uses == "network":
            talk = Collective("all_to_all", "ep")
            op = Op(name, reads, (made,), uses=uses, two_phase=True, collective=talk, body=kind)
        else:
            own = f"w_{name}"
            cached = uses == "memory"
            shape = (Size.of(factor * hidden), Size.of(hidden))
            values.append(_rows(own, 2 * POSITIONS * hidden) if cached else Value(own, shape))
            inputs.append(own)
            flops = ROWS * (2 * factor * hidden * hidden)
            op = Op(name, (*reads, own), (made,), uses=uses, mark=kind, body=kind, flops=flops)
        ops.append(replace(op, **place))
        return made

    last = "x"
    for layer in range(num_layers):
        qkv = add(f"qkv{layer}", (last,), 3, 3)
        attention = add(f"attn{layer}", (qkv,), 1, 0, "memory")
        routed = add(f"route{layer}", (attention,), 1, 1)
        sent = add(f"dispatch{layer}", (routed,), 1, 0, "network")
        grown = add(f"experts{layer}", (sent,), 1, 6)
        back = add(f"combine{layer}", (grown,), 1, 0, "network")
        weighed = add(f"weigh{layer}", (back,), 1, 0)
        shared = add(f"shared{layer}", (routed,), 1, 3)
        last = add(f"join{layer}", (weighed, shared), 1, 0)
    return Graph(f"experts{num_layers}", tuple(values), tuple(ops), tuple(inputs), (last,), "s0")


def on_disk(num_layers: int = 2, hidden: int = 1024) -> Graph:
    """A stack of layers over a batch of rows `s0`, the weights of each brought in by a load."""
    values, ops, last = [_rows("x", hidden)], list[Op](), "x"
    for layer in range(num_layers):
        load, weight, made = f"load{layer}", f"w{layer}", f"layer{layer}_out"
        place: Any = {"path": f"layers.{layer}", "layer": layer, "block": "Layer"}
        values.append(Value(weight, (Size.of(4 * hidden), Size.of(hidden))))
        values.append(_rows(made, hidden, placeable=True))
        free: Any = {"uses": "io", "rows": "batch-free", "mark": "load", "body": "load"}
        ops.append(Op(load, makes=(weight,), **free, **place))
        flops = ROWS * (8 * hidden * hidden)
        ops.append(Op(f"layer{layer}", (last, weight), (made,), body="layer", flops=flops, **place))
        last = made
    return Graph(f"on_disk{num_layers}", tuple(values), tuple(ops), ("x",), (last,), "s0")


def sequence(num_layers: int = 2, hidden: int = 1024) -> Graph:
    """A stack of sequence-parallel layers, as Ulysses has them, over a batch of rows `s0`."""
    values, ops, inputs, last = [_rows("x", hidden)], list[Op](), ["x"], "x"
    for layer in range(num_layers):
        for kind, wide, factor in (("qkv", 3, 3), ("heads", 3, 0), ("attn", 1, 2), ("back", 1, 0),
                                   ("mlp", 1, 5)):  # fmt: skip
            name, weight, made = f"{kind}{layer}", f"w_{kind}{layer}", f"{kind}{layer}_out"
            place: Any = {"path": f"layers.{layer}.{kind}", "layer": layer, "block": "Layer"}
            values.append(_rows(made, wide * hidden, placeable=True))
            if not factor:
                talk = Collective("all_to_all", "sp")
                both: Any = {"uses": "network", "two_phase": True, "collective": talk}
                ops.append(Op(name, (last,), (made,), body=kind, **both, **place))
            else:
                own = [] if kind == "attn" else [weight]
                shape = (Size.of(factor * hidden), Size.of(hidden))
                values += [Value(each, shape) for each in own]
                inputs += own
                flops = ROWS * (2 * factor * hidden * hidden)
                read: Any = {"mark": kind, "body": kind, "flops": flops}
                ops.append(Op(name, (last, *own), (made,), **read, **place))
            last = made
    return Graph(f"sequence{num_layers}", tuple(values), tuple(ops), tuple(inputs), (last,), "s0")


def _rows(name: str, wide: int, *, placeable: bool = False) -> Value:
    """A value with one row a token."""
    return Value(name, (ROWS, Size.of(wide)), batch=Batch(0), placeable=placeable)


def _all_reduce(name: str, source: str) -> Op:
    talk = Collective("all_reduce", "tp")
    both = (source,), (f"{name}_out",)
    return Op(name, *both, uses="network", two_phase=True, collective=talk, body="sum")
