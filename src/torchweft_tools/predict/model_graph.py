"""The graph of a decoder, drawn from its shape, as one rank of a parallel layout has it.

    norm -> qkv -> rope -> attention -> o -> [all_reduce] -> norm -> mlp ... -> [all_reduce]
                    mlp: gate_up -> act -> down
                experts: [shared] -> router -> [dispatch] -> experts -> [combine] -> [add]

Every kernel that counts is an op with a mark, a path, a layer and a block; collectives have two
phases. Equal ops of different layers have one body, and `works` says for each body what it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchweft.errors import WeftError
from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.sizes import Size
from torchweft_tools.predict.hardware import Hardware
from torchweft_tools.predict.shape import ExpertShape, ModelShape
from torchweft_tools.predict.work import ModelLayout, OpWork, Workload

ROWS = Size.of("s0")
BF16 = "bfloat16"
SCALE = 1 + 4 / 128
"""Bytes of a number in fp8, with its share of the scale of 128."""
SKEW = 1.25
"""The busiest rank's rows over the mean, where experts are spread over ranks: in the published
breakdown of a prefill over 32 ranks 9 of barriers stand beside 36 of transfers and experts."""


@dataclass(frozen=True)
class ModelGraph:
    """A graph, what its ops do, and the bytes of a rank that are there before a call."""

    graph: Graph
    works: dict[str, OpWork]
    resident_bytes: int


def model_graph(
    shape: ModelShape,
    load: Workload,
    parallel: ModelLayout,
    hardware: Hardware,
    *,
    num_layers: int | None = None,
    without: tuple[str, ...] = (),
    fused: bool = False,
) -> ModelGraph:
    """The graph of a model, or of so many of its layers (those without experts come first).

    without: kinds of collectives to leave out, as studies of an upper bound do.
    fused: an all_reduce and the norm behind it are one kernel, in which each rank norms its share.
    Raises `WeftError` if the model cannot lie so.
    """
    if shape.heads % parallel.tp:
        raise WeftError(f"parallel: tp={parallel.tp} does not divide {shape.heads} heads.")
    if parallel.num_ranks > hardware.num_gpus:
        need = f"tp x dp = {parallel.num_ranks} ranks, {hardware.name!r} has {hardware.num_gpus}"
        raise WeftError(f"parallel: {need} GPUs.")
    if parallel.ep > 1 and shape.experts is None:
        raise WeftError(f"parallel: {shape.name!r} has no experts to spread: leave out ep.")
    draw = _Drawing(shape, load, parallel, hardware, without, fused and "all_reduce" not in without)
    # The embedding is there, but its gather is not drawn: it takes no time that shows.
    draw.resident_bytes = shape.vocab * shape.hidden * shape.weight_bytes / parallel.tp
    draw.value("x", shape.hidden)
    draw.inputs.append("x")
    hidden, residual = "x", ""
    for layer in range(shape.num_layers if num_layers is None else num_layers):
        draw.layer = layer
        hidden, residual = draw.block(hidden, residual, experts=layer >= shape.num_dense)
    draw.layer = None
    logits = draw.head(hidden, residual)
    graph = Graph(
        "model",
        tuple(draw.values),
        tuple(draw.ops),
        tuple(draw.inputs),
        (logits,),
        "s0",
        communicators=tuple(draw.groups.items()),
    )
    return ModelGraph(graph, draw.works, int(draw.resident_bytes))


@dataclass
class _Drawing:
    """Adds ops one by one. `layer` is where it is, None outside of all."""

    shape: ModelShape
    load: Workload
    parallel: ModelLayout
    hardware: Hardware
    without: tuple[str, ...]
    fused: bool
    layer: int | None = None
    owed: bool = False  # the next norm has to sum up first
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    works: dict[str, OpWork] = field(default_factory=dict)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    resident_bytes: float = 0.0

    def value(self, name: str, *wide: int, dtype: str = BF16, placeable: bool = False) -> str:
        """A value of one row a token."""
        dims = (ROWS, *map(Size.of, wide))
        self.values.append(Value(name, dims, dtype, Batch(0), placeable=placeable))
        return name

    def op(
        self, name: str, reads: tuple[str, ...], wide: tuple[int, ...], work: OpWork, **facts: Any
    ) -> str:
        """An op with one result; its name is its path. Equal names of two layers, equal bodies."""
        inside = "" if self.layer is None else f"layers.{self.layer}."
        full = f"{inside}{name}"
        body = facts.pop("body", name)
        self.works[body] = work
        made = self.value(f"{full}.out", *wide, placeable=work.kind in ("matmul", "experts"))
        per_row = work.flops or 2 * work.inner * work.outer * work.rows
        where = {} if self.layer is None else {"layer": self.layer, "block": "DecoderLayer"}
        facts = {"path": full.rpartition(".")[0], "flops": ROWS * int(per_row), **where, **facts}
        self.ops.append(Op(full, reads, (made,), body=body, **facts))
        return made

    def matmul(self, name: str, read: str, inner: int, outer: int, **facts: Any) -> str:
        """A product with a weight of its own."""
        weight = self.weight(name, inner * outer)
        work = self._product(inner, outer)
        return self.op(name, (read, weight), (outer,), work, mark=name.split(".")[-1], **facts)

    def _product(self, inner: int, outer: int, **more: Any) -> OpWork:
        shape = self.shape
        quantised = 3.0 * inner if shape.product_dtype != BF16 and shape.weight_bytes == 1 else 0
        return OpWork(
            "matmul",
            inner,
            outer,
            row_bytes=quantised,
            dtype=shape.product_dtype,
            weight_bytes=shape.weight_bytes,
            kernels=2 if quantised else 1,
            **more,
        )

    def weight(self, name: str, count: int) -> str:
        """An input that has no rows."""
        full = f"w.{name}" if self.layer is None else f"w.layers.{self.layer}.{name}"
        num_bytes = int(count * self.shape.weight_bytes)
        self.values.append(Value(full, (Size.of(num_bytes),), "uint8"))
        self.inputs.append(full)
        self.resident_bytes += num_bytes
        return full

    def memory(
        self, name: str, reads: tuple[str, ...], wide: int, row_bytes: float, **facts: Any
    ) -> str:
        """An op that is bound by memory."""
        work = OpWork("memory", row_bytes=row_bytes, mark=facts.get("mark", ""))
        return self.op(name, reads, (wide,), work, uses="memory", **facts)

    def talk(
        self,
        name: str,
        reads: tuple[str, ...],
        wide: tuple[int, ...],
        kind: str,
        group: str,
        work: OpWork,
        mark: str,
    ) -> str:
        """A collective of two phases; left out if it was asked to be."""
        if kind in self.without:
            return reads[0]
        count = self.parallel.tp if group == "tp" else self.parallel.ep
        self.groups.setdefault(group, tuple(range(count)))
        facts: dict[str, Any] = {"collective": Collective(kind, group), "two_phase": True}
        return self.op(name, reads, wide, work, uses="network", mark=mark, flops=Size(), **facts)

    def norm(self, name: str, hidden: str, residual: str) -> tuple[str, str]:
        """The residual sum, and its norm: one kernel that reads two rows and writes two."""
        wide = self.shape.hidden
        if not residual:
            return self.memory(name, (hidden,), wide, 4.0 * wide, mark="norm", body="norm"), hidden
        reads = hidden, residual
        if self.owed:
            work = OpWork("all_reduce_norm", row_bytes=8.0 * wide, near_bytes=2.0 * wide)
            made = self.talk(name, reads, (wide,), "all_reduce", "tp", work, "all_reduce_norm")
            self.owed = False
        else:
            made = self.memory(name, reads, wide, 8.0 * wide, mark="norm", body="add_norm")
        last = self.ops[-1]
        summed = self.value(f"{last.name}.sum", wide)
        self.ops[-1] = Op(**{**_fields(last), "makes": (made, summed)})
        return made, summed

    def reduce(self, name: str, read: str) -> str:
        """The sum over the slices of a rank's group."""
        if self.parallel.tp == 1:
            return read
        if self.fused:
            self.owed = True
            return read
        work = OpWork("all_reduce")
        return self.talk(
            name, (read,), (self.shape.hidden,), "all_reduce", "tp", work, "all_reduce"
        )

    def block(self, hidden: str, residual: str, *, experts: bool) -> tuple[str, str]:
        """One layer."""
        normed, residual = self.norm("input_layernorm", hidden, residual)
        attended = self._latent(normed) if self.shape.latent else self._attention(normed)
        made = self.reduce("self_attn.all_reduce", attended)
        normed, residual = self.norm("post_attention_layernorm", made, residual)
        if experts and self.shape.experts is not None:
            made = self._experts(normed, self.shape.experts)
        else:
            made = self._mlp("mlp", normed, self.shape.mlp)
        if not (experts and self.parallel.exchanges):
            made = self.reduce("mlp.all_reduce", made)
        return made, residual

    def _attention(self, normed: str) -> str:
        shape, tp = self.shape, self.parallel.tp
        heads, kv_heads = shape.heads // tp, max(1, shape.kv_heads // tp)
        dim = shape.head_dim
        qkv = (heads + 2 * kv_heads) * dim
        made = self.matmul("self_attn.qkv_proj", normed, shape.hidden, qkv)
        made = self._rope(made, (heads + kv_heads) * dim, qkv)
        made = self._attend(made, heads, dim, dim, 2 * kv_heads * dim, heads * dim)
        return self.matmul("self_attn.o_proj", made, heads * dim, shape.hidden)

    def _latent(self, normed: str) -> str:
        shape, latent, heads = self.shape, self.shape.latent, self.shape.heads // self.parallel.tp
        assert latent is not None, "only models with latent attention come here"
        cached = latent.kv_rank + latent.rope
        narrow = (latent.q_rank or heads * (latent.nope + latent.rope)) + cached
        made = self.matmul("self_attn.qkv_a_proj", normed, shape.hidden, narrow)
        made = self.memory("self_attn.latent_norm", (made,), narrow, 4.0 * narrow, mark="norm")
        width = heads * (latent.nope + latent.rope)
        if latent.q_rank:
            made = self.matmul("self_attn.q_b_proj", made, latent.q_rank, width)
        made = self.matmul(
            "self_attn.kv_b_proj", made, latent.kv_rank, heads * (latent.nope + latent.value)
        )
        made = self._rope(made, heads * latent.rope, width)
        if self.load.phase == "decode":  # the cache is read as it is, all heads at once
            dims = latent.kv_rank + latent.rope, latent.kv_rank
        else:
            dims = latent.nope + latent.rope, latent.value
        made = self._attend(made, heads, *dims, cached, heads * latent.value)
        return self.matmul("self_attn.o_proj", made, heads * latent.value, shape.hidden)

    def _rope(self, read: str, turned: int, wide: int) -> str:
        return self.memory("self_attn.rope", (read,), wide, 2.0 * 2 * turned, mark="rope")

    def _attend(self, read: str, heads: int, key: int, value: int, cached: int, wide: int) -> str:
        """Attention over the cache, of which a row (of one token) has `cached` numbers."""
        load = self.load
        name = f"cache.{self.layer}"
        kept = load.context + (load.seq if load.phase == "prefill" else 1)
        each = cached * (kept if load.phase == "decode" else 1)
        self.inputs.append(self.value(name, each))
        self.resident_bytes += 2.0 * cached * kept * load.batch
        flops = 2.0 * load.mean_context * heads * (key + value)
        decode = load.phase == "decode"
        moved = 2.0 * (cached * load.mean_context if decode else cached) + 2.0 * wide * 2
        work = OpWork("decode" if decode else "attention", flops=flops, row_bytes=moved)
        uses = "memory" if decode else "compute"
        return self.op(
            "self_attn.attention",
            (read, name),
            (wide,),
            work,
            mutates=(name,),
            uses=uses,
            mark="attention",
        )

    def _mlp(self, name: str, read: str, width: int) -> str:
        shape, tp = self.shape, self.parallel.tp
        tp = 1 if self.parallel.exchanges and name != "mlp" else tp
        part, up = width // tp, (2 if shape.gated else 1) * (width // tp)
        made = self.matmul(f"{name}.gate_up_proj", read, shape.hidden, up)
        made = self.memory(f"{name}.act", (made,), part, 2.0 * (up + part), mark="act")
        return self.matmul(f"{name}.down_proj", made, part, shape.hidden)

    def _experts(self, normed: str, experts: ExpertShape) -> str:
        shape, parallel = self.shape, self.parallel
        shared = self._mlp("mlp.shared_experts", normed, experts.shared) if experts.shared else ""
        routed = self.matmul("mlp.router", normed, shape.hidden, experts.num_experts)
        rows = float(experts.top_k)
        wide: tuple[int, ...] = (shape.hidden,)
        reads: tuple[str, ...] = (normed, routed)
        size = SCALE if shape.weight_bytes == 1 else 2.0
        if parallel.exchanges:
            wide = (experts.top_k, shape.hidden)
            sent = self._sent(experts)
            joined = self.memory(
                "mlp.pack", reads, shape.hidden, (2 + size) * shape.hidden, mark="permute"
            )
            reads = (self._exchange("dispatch", joined, wide, sent, size * shape.hidden),)
            rows *= (
                SKEW / parallel.tp
            )  # ranks of one group have the same tokens: each sends a share
        elif parallel.ep > 1:
            rows *= SKEW / parallel.ep
        local = -(-experts.num_experts // parallel.ep)
        width = experts.width // (parallel.tp if parallel.ep == 1 else 1)
        made = self._grouped(reads, wide, rows, local, width)
        # Rows are sorted by expert, gated, and summed up again.
        moved = rows * (2 * size * shape.hidden + 6 * width + 2 * shape.hidden)
        made = self.op(
            "mlp.unpermute",
            (made,),
            wide,
            OpWork("memory", row_bytes=moved, kernels=5),
            uses="memory",
            mark="permute",
        )
        if parallel.exchanges:
            made = self._exchange("combine", made, (shape.hidden,), sent, 2.0 * shape.hidden)
            if parallel.tp > 1:
                whole = OpWork("all_gather")
                wide = (shape.hidden,)
                made = self.talk(
                    "mlp.all_gather", (made,), wide, "all_gather", "tp", whole, "all_gather"
                )
        if shared:
            made = self.memory(
                "mlp.add", (made, shared), shape.hidden, 6.0 * shape.hidden, mark="add"
            )
        return made

    def _grouped(
        self, reads: tuple[str, ...], wide: tuple[int, ...], rows: float, local: int, width: int
    ) -> str:
        """The products of all experts of a rank."""
        shape, gates = self.shape, 3 if self.shape.gated else 2
        weight = self.weight("mlp.experts", local * gates * shape.hidden * width)
        work = OpWork(
            "experts",
            shape.hidden,
            gates * width,
            rows=rows,
            experts=local,
            dtype=shape.product_dtype,
            weight_bytes=shape.weight_bytes,
            kernels=2,
        )
        return self.op("mlp.experts", (*reads, weight), wide, work, mark="experts")

    def _exchange(
        self, mark: str, read: str, wide: tuple[int, ...], sent: tuple[float, float], size: float
    ) -> str:
        near, far = (copies * size * SKEW / self.parallel.tp for copies in sent)
        work = OpWork("all_to_all", near_bytes=near, far_bytes=far)
        return self.talk(f"mlp.{mark}", (read,), wide, "all_to_all", "ep", work, mark)

    def _sent(self, experts: ExpertShape) -> tuple[float, float]:
        """Copies of a row that leave a rank: inside its node, and to others.

        A prefill sends a row once to each node and from there to each rank that wants it; a decode
        step sends it to each expert by itself, which takes fewer hops.
        """
        ep, top_k = self.parallel.ep, experts.top_k
        node = min(ep, self.hardware.prices.gpus_per_node)
        nodes = -(-ep // node)
        if self.load.phase == "decode":
            return top_k * (node - 1) / ep, top_k * (1 - node / ep)
        ranks = ep * (1 - (1 - 1 / ep) ** top_k)
        visited = nodes * (1 - (1 - 1 / nodes) ** top_k)
        visited = min(visited, experts.groups or visited)
        return ranks * (node - 1) / node, visited * (nodes - 1) / nodes

    def head(self, hidden: str, residual: str) -> str:
        """The last norm, and the logits of the last token of each request."""
        normed, _ = self.norm("norm", hidden, residual)
        shape, load = self.shape, self.load
        wide = shape.vocab // self.parallel.tp
        weight = self.weight("lm_head", shape.hidden * wide)
        logits = Value("logits", (Size.of(load.batch), Size.of(wide)), BF16)
        self.values.append(logits)
        self.works["lm_head"] = OpWork("matmul", shape.hidden, wide, rows=0, fixed_rows=load.batch)
        flops = Size.of(2 * load.batch * shape.hidden * wide)
        self.ops.append(
            Op(
                "lm_head",
                (normed, weight),
                ("logits",),
                rows="mixing",
                mark="lm_head",
                body="lm_head",
                flops=flops,
                path="",
            )
        )
        return "logits"


def _fields(op: Op) -> dict[str, Any]:
    return {name: getattr(op, name) for name in Op.__slots__}
