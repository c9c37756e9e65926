"""A blueprint: the graph of a well-known model, drawn by hand from its dimensions.

For demos, tests and benchmarks where no model has to run. `transformer` is a dense decoder under
tensor parallelism (each all_reduce is a two-phase network op on one communicator):

    x -> attn0 -> reduce_attn0 -> mlp0 -> reduce_mlp0 -> attn1 -> ... -> head
"""

from __future__ import annotations

from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.sizes import Size

ROWS = Batch(0)


def transformer(
    num_layers: int = 2,
    hidden: int = 1024,
    *,
    tensor_parallel: bool = True,
    kv_cache: bool = False,
) -> Graph:
    """A decoder of `num_layers` layers over a batch of tokens `s0`."""
    draw = _Draft(hidden, 2 if tensor_parallel else 1)
    last = draw.rows("x", hidden, given=True)
    for layer in range(num_layers):
        for kind, factor in (("attn", 4), ("mlp", 8)):
            changed: tuple[str, ...] = ()
            if kind == "attn" and kv_cache:
                changed = (draw.rows(f"kv{layer}", 2 * hidden, given=True),)
            last = draw.matmul(f"{kind}{layer}", last, kind, factor, changed)
            if tensor_parallel:
                last = draw.reduce(f"reduce_{kind}{layer}", last)
    draw.matmul("head", last, "head", draw.num_shards, made="y")
    values, ops, inputs = tuple(draw.values), tuple(draw.ops), tuple(draw.inputs)
    return Graph(f"transformer{num_layers}", values, ops, inputs, ("y",), "s0")


class _Draft:
    """A graph being drawn: values, ops and inputs so far."""

    def __init__(self, hidden: int, num_shards: int) -> None:
        self.hidden, self.num_shards = hidden, num_shards
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.inputs: list[str] = []

    def rows(self, name: str, wide: int, *, given: bool = False, placeable: bool = False) -> str:
        """A value with one row a token."""
        shape = (Size.of("s0"), Size.of(wide))
        self.values.append(Value(name, shape, batch=ROWS, placeable=placeable))
        self.inputs += [name] if given else []
        return name

    def matmul(
        self,
        name: str,
        source: str,
        body: str,
        factor: int,
        changed: tuple[str, ...] = (),
        made: str = "",
    ) -> str:
        """An op with a weight of its own; `factor` times hidden wide, shared by all shards."""
        wide = factor * self.hidden // self.num_shards
        self.values.append(Value(f"w_{name}", (Size.of(wide), Size.of(self.hidden))))
        self.inputs.append(f"w_{name}")
        made = self.rows(made or f"{name}_out", self.hidden, placeable=True)
        flops = Size.of("s0") * (2 * wide * self.hidden)
        reads = (source, f"w_{name}")
        self.ops.append(Op(name, reads, (made,), changed, mark=body, body=body, flops=flops))
        return made

    def reduce(self, name: str, source: str) -> str:
        """An all_reduce over the shards."""
        made, talk = self.rows(f"{name}_out", self.hidden), Collective("all_reduce", "tp")
        self.ops.append(
            Op(
                name,
                (source,),
                (made,),
                uses="network",
                two_phase=True,
                collective=talk,
                body="sum",
            )
        )
        return made
