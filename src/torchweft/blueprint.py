"""A blueprint: the graph of a well-known model, drawn by hand from its dimensions.

For demos, tests and benchmarks where no model has to run. `transformer` is a dense decoder under
tensor parallelism (each all_reduce is a two-phase network op on one communicator):

    x -> attn0 -> reduce_a0 -> mlp0 -> reduce_m0 -> attn1 -> ... -> head
"""

from __future__ import annotations

from torchweft.graph import Batch, Collective, Graph, Op, Value
from torchweft.sizes import Size

ROWS = Batch(0)


def transformer(
    num_layers: int = 2, hidden: int = 1024, *, tensor_parallel: bool = True, kv_cache: bool = False
) -> Graph:
    """A decoder of `num_layers` layers over a batch of tokens `s0`."""
    batch, wide = Size.of("s0"), Size.of(hidden)
    values = [Value("x", (batch, wide), batch=ROWS)]
    ops: list[Op] = []
    inputs, last = ["x"], "x"

    def weight(name: str, *shape: int) -> str:
        values.append(Value(name, tuple(map(Size.of, shape))))
        inputs.append(name)
        return name

    def made(name: str, *, placeable: bool = True) -> str:
        values.append(Value(name, (batch, wide), batch=ROWS, placeable=placeable))
        return name

    def reduce(name: str, source: str) -> str:
        talk = Collective("all_reduce", "tp")
        result = made(f"{name}_out", placeable=False)
        ops.append(
            Op(
                name,
                (source,),
                (result,),
                uses="network",
                two_phase=True,
                collective=talk,
                body="all_reduce",
            )
        )
        return result

    for layer in range(num_layers):
        for kind, factor in (("attn", 4), ("mlp", 8)):
            weights = weight(
                f"w_{kind}{layer}", factor * hidden // (2 if tensor_parallel else 1), hidden
            )
            mutates: tuple[str, ...] = ()
            if kind == "attn" and kv_cache:
                values.append(Value(f"kv{layer}", (batch, Size.of(2 * hidden)), batch=ROWS))
                inputs.append(f"kv{layer}")
                mutates = (f"kv{layer}",)
            result = made(f"{kind}{layer}_out")
            flops = batch * (2 * factor * hidden * hidden // (2 if tensor_parallel else 1))
            op = Op(
                f"{kind}{layer}",
                (last, weights),
                (result,),
                mutates,
                body=kind,
                flops=flops,
                mark=kind,
            )
            ops.append(op)
            last = reduce(f"reduce_{kind}{layer}", result) if tensor_parallel else result
    ops.append(
        Op(
            "head",
            (last, weight("w_head", hidden, hidden)),
            (made("y"),),
            body="head",
            flops=batch * (2 * hidden**2),
        )
    )
    return Graph(f"transformer{num_layers}", tuple(values), tuple(ops), tuple(inputs), ("y",), "s0")
