"""The `GpuCosts`: seconds of a model's ops on a GPU, as far as figures of its kind tell.

products     tiles over multiprocessors, in whole waves; or the bytes of weights and rows
experts      the same, with the rows of each; weights of those that are visited
attention    products over a mean context, or the bytes of the cache
memory       bytes at a share of the peak
collectives  latency and bytes: rings, sums in the switch, plain writes to peers; over nodes, the
             node's share first
kernels of users  the longer of what they say and what they compute, which no launch separates

Where times were measured (`MeasuredTimes`) they come first. `clock` is the pace of products that
the power limit leaves (`torchweft_tools.predict.prediction`); 1 is full pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import ClassVar

from torchweft.plan.graph import Graph, Op
from torchweft.plan.machine import Costs, moved_bytes, touched_bytes
from torchweft_tools.predict.hardware import Hardware
from torchweft_tools.predict.tables import MeasuredTimes
from torchweft_tools.predict.work import OpWork

Env = Mapping[str, int]
TILES = ((128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.8), (64, 64, 0.6))
"""Rows and columns of a tile, and how much of the largest one's pace smaller ones reach."""
EXPERTS_SHARE = 0.8  # of a plain product's: rows are gathered, and each expert has its own tiles
DECODE_SHARE = 0.8  # of a prefill's attention: a row's cache is cut among multiprocessors
STREAM_SHARE = 0.6  # of peak bandwidth: kernels of one pass that were written for no machine
READ_SHARE = 0.85  # of peak bandwidth: weights and caches, read in long runs
ALGORITHMS = ("auto", "ring", "multimem", "direct")


@dataclass(frozen=True)
class GpuCosts(Costs):
    """Costs on `hardware`; `works` says what each body does, and what was measured comes first."""

    hardware: Hardware | None = None
    works: Mapping[str, OpWork] = field(default_factory=dict)
    measured: MeasuredTimes = MeasuredTimes()  # noqa: RUF009
    algorithm: str = "auto"
    clock: float = 1.0

    host_share: ClassVar[float] = 0.3  # of a launch: an event that is recorded or waited for

    @property
    def _on(self) -> Hardware:
        assert self.hardware is not None, "prices need hardware"
        return self.hardware

    def run_s(self, graph: Graph, op: Op, env: Env, device: str = "gpu") -> float:
        """Seconds of one run of an op."""
        work = self.works.get(op.body)
        if op.uses == "network":
            num_bytes = moved_bytes(graph, op, env)
            rows = env.get(graph.batch, 0) if graph.batch else 0
            if work is not None and work.kind == "all_to_all":
                return self.exchange_s(work.near_bytes * rows, work.far_bytes * rows)
            kind = op.collective.kind if op.collective else "all_reduce"
            ranks = len(graph.members(op.collective.communicator, 1)) if op.collective else 1
            if work is not None and work.kind == "all_reduce_norm":
                own_s = work.row_bytes * rows / ranks / self._stream(self._on.prices.memory_share)
                return max(self.collective_s(kind, work.near_bytes * rows, ranks), own_s)
            return self.collective_s(kind, num_bytes, ranks)
        if work is None:  # the op of a rewrite: all that is known is in the graph
            flops_s = op.flops.evaluate(env) / self._pace("bfloat16")
            moved_s = touched_bytes(graph, op, env) / self._stream(STREAM_SHARE)
            return self.overhead_s + max(flops_s, moved_s)
        return self.work_s(work, env.get(graph.batch, 0) if graph.batch else 0)

    def alike(self, graph: Graph, op: Op) -> object:
        """Drawn ops of one body take the same: layers repeat."""
        return op.body if op.body in self.works else None

    def group_s(
        self, graph: Graph, ops: Sequence[Op], by: str, env: Env, device: str = "gpu"
    ) -> float:
        """Seconds of a kernel in the place of ops: the longer of what it says and what it computes.

        Inside a sum over ranks each rank works on its share of the rows. The first (or the last)
        rank's share of the shorter one has nothing beside it.
        """
        said = [self.run_s(graph, op, env, device) for op in ops if op.uses == "network"]
        sums = any(op.collective and op.collective.kind == "all_reduce" for op in ops)
        ranks = max(
            (len(graph.members(op.collective.communicator, 1)) for op in ops if op.collective),
            default=1,
        )
        rows = env.get(graph.batch or "", 0)
        own = {**env, graph.batch or "": ceil(rows / ranks)} if sums else env
        done = [
            self.run_s(graph, op, own, device) - self.overhead_s
            for op in ops
            if op.uses != "network"
        ]
        said_s, done_s = sum(said), sum(done) + self.overhead_s
        return max(said_s, done_s) + (min(said_s, done_s) / ranks if ranks > 1 else 0.0)

    def host_s(self, device: str = "gpu") -> float:
        """Seconds that a stream spends on an event, at the start and the end of a collective."""
        return self.overhead_s * self.host_share

    @property
    def overhead_s(self) -> float:
        """Seconds between two kernels of a stream."""
        return self._on.device.overhead_s

    # What one device does.

    def products_share(self, work: OpWork, rows: int) -> float:
        """The share of a work's seconds that is products."""
        if not work.parts:
            return float(bool(work.products))
        return sum(self.work_s(each, rows) for each in work.products) / self.work_s(work, rows)

    def work_s(self, work: OpWork, rows: int) -> float:
        """Seconds of a work over so many rows of the batch."""
        if work.parts:
            return sum(self.work_s(part, rows) for part in work.parts)
        fixed_s = self.overhead_s * work.kernels
        if work.kind == "memory":
            share = self._on.prices.memory_share if work.mark == "norm" else STREAM_SHARE
            key = ("memory", work.mark, int(work.row_bytes))
            seconds = work.row_bytes * rows / self._stream(share)
            return self.measured.seconds(self._on, key, rows) or fixed_s + seconds
        if work.kind in ("attention", "decode"):
            share = DECODE_SHARE if work.kind == "decode" else 1.0
            flops_s = work.flops * rows / self._pace(work.dtype, attention=True) / share
            return fixed_s + max(flops_s, work.row_bytes * rows / self._stream(READ_SHARE))
        own = ceil(work.rows * rows + work.fixed_rows)
        if work.kind == "experts":
            return fixed_s + self._grouped_s(work, own)
        before_s = work.row_bytes * rows / self._stream(STREAM_SHARE)
        key = ("matmul", str(work.inner), work.outer)
        known = None if work.weight_bytes != 2 else self.measured.seconds(self._on, key, own)
        if known is not None:
            return before_s + known / self.clock
        return fixed_s + before_s + self.product_s(work, own)

    def product_s(self, work: OpWork, rows: int) -> float:
        """Seconds of [rows, inner] by [inner, outer]: whole waves of tiles, or its bytes."""
        moved = work.inner * work.outer * work.weight_bytes + rows * (work.inner + work.outer) * 2
        tiled = self._tiled_s([rows], work.inner, work.outer, work.dtype)
        return max(tiled, moved / self._stream(READ_SHARE))

    def _grouped_s(self, work: OpWork, rows: int) -> float:
        """Seconds of the products of several experts, each with its share of the rows."""
        visited = min(work.experts, max(1, rows))
        if rows < 8 * work.experts:  # few rows: some experts have none
            visited = ceil(work.experts * (1 - (1 - 1 / work.experts) ** rows))
        each = [ceil(rows / visited)] * visited
        moved = visited * work.inner * work.outer * work.weight_bytes
        tiled = self._tiled_s(each, work.inner, work.outer, work.dtype) / EXPERTS_SHARE
        return max(tiled, moved / self._stream(READ_SHARE))

    def _tiled_s(self, rows: Sequence[int], inner: int, outer: int, dtype: str) -> float:
        """The least seconds over sizes of tiles: a wave takes as long as one of its tiles."""
        num_sms = self._on.device.num_sms or 1
        pace = self._pace(dtype) / num_sms
        best = float("inf")
        for tall, wide, share in TILES:
            tiles = sum(ceil(each / tall) for each in rows) * ceil(outer / wide)
            waves = ceil(tiles / num_sms)
            best = min(best, waves * 2.0 * tall * wide * inner / (pace * share))
        return best

    def _pace(self, dtype: str, *, attention: bool = False) -> float:
        prices = self._on.prices
        share = prices.attention_share if attention else prices.matmul_share
        return self._on.flops_per_s("bfloat16" if attention else dtype) * share * self.clock

    def _stream(self, share: float) -> float:
        return self._on.device.bytes_per_s * share

    # What ranks say to each other.

    def collective_s(self, kind: str, num_bytes: float, ranks: int) -> float:
        """Seconds of a collective of so many bytes, whole as its caller sees them."""
        if ranks <= 1:
            return self.overhead_s
        node = min(ranks, self._on.prices.gpus_per_node)
        if ranks == node:
            return self._node_s(kind, num_bytes, ranks)
        # Over nodes: the node's shares first, then a ring over nodes of each share.
        steps = {"all_reduce": ("reduce_scatter", "all_gather")}.get(kind, (kind,))
        prices, nodes = self._on.prices, -(-ranks // node)
        own = num_bytes / node
        far = own * (nodes - 1) / nodes * len(steps) / (prices.nic_bytes_per_s * prices.nic_share)
        near = sum(self._node_s(step, num_bytes, node) for step in steps)
        return near + far + len(steps) * prices.nic_latency_s

    def _node_s(self, kind: str, num_bytes: float, ranks: int) -> float:
        prices, algorithm = self._on.prices, self.algorithm
        if algorithm == "auto":
            algorithm = "multimem" if prices.multimem_share else "ring"
        known = self.measured.seconds(self._on, (algorithm, kind, ranks), num_bytes)
        if known is not None:
            return known
        around = (ranks - 1) / ranks
        if algorithm == "multimem" and prices.multimem_share:
            share, fixed_s = prices.multimem_share, prices.direct_latency_s
            copies = 1 + 1 / ranks if kind == "all_reduce" else around
        else:
            direct = algorithm != "ring"
            share = prices.direct_share if direct else prices.ring_share
            fixed_s = prices.direct_latency_s if direct else prices.ring_latency_s
            copies = around * (2 if kind == "all_reduce" else 1)
        return fixed_s + num_bytes * copies / (prices.link_bytes_per_s * share)

    def exchange_s(self, near_bytes: float, far_bytes: float) -> float:
        """Seconds of rows that travel to experts: links and NICs work side by side."""
        prices = self._on.prices
        near_s = near_bytes / (prices.link_bytes_per_s * prices.direct_share)
        far_s = far_bytes / (prices.nic_bytes_per_s * prices.nic_share)
        fixed_s = prices.nic_latency_s if far_bytes else prices.direct_latency_s
        return fixed_s + max(near_s, far_s)
