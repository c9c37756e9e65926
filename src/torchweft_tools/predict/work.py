"""The `Workload` of a call, the `ModelLayout` of a model, and the `OpWork` of its ops.

    Workload(batch=4, seq=4096, phase="prefill")      16,384 tokens a rank
    ModelLayout(tp=8), ModelLayout(ep=32)                   tensor slices; experts spread over ranks
    OpWork("matmul", inner=8192, outer=7168)            what one op does to the rows that it gets

A work says what prices cannot see in a graph: where a row goes, how long its context is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from torchweft.errors import WeftError, clip, unknown

PHASES = ("prefill", "decode")
DEFAULT_CONTEXT = 1024
PRODUCTS = ("matmul", "experts", "attention", "decode")


@dataclass(frozen=True)
class Workload:
    """What one rank (of its data-parallel group) is asked for in a call.

    batch: requests. seq: tokens of each that the call computes (decode: one). context: tokens of
    each that are in the cache before the call.
    """

    batch: int = 1
    seq: int = 1
    context: int = 0
    phase: str = "prefill"

    @property
    def num_tokens(self) -> int:
        """Rows of the call."""
        return self.batch * self.seq

    @property
    def mean_context(self) -> float:
        """How many tokens a token looks at, on average."""
        return self.context + (self.seq + 1) / 2


def workload(phase: str, tokens: int | None, batch: int | None, seq: int | None) -> Workload:
    """The workload of the options of a command. Raises `WeftError` for what does not fit."""
    if phase not in PHASES:
        raise WeftError(f"phase: {unknown('phase', phase, PHASES)}")
    for name, number in (("tokens", tokens), ("batch", batch), ("seq", seq)):
        if number is not None and number < 1:
            raise WeftError(f"{name}: must be a whole number from 1 on; got {number}.")
    if tokens is None and batch is None and (seq is None or phase == "decode"):
        raise WeftError("tokens: give --tokens, or --batch and --seq.")
    if phase == "decode":
        rows = batch or tokens or 1
        if tokens is not None and rows != tokens:
            raise WeftError(f"tokens: a decode step of {rows} requests has {rows} tokens.")
        return Workload(rows, 1, DEFAULT_CONTEXT if seq is None else seq, phase)
    requests = batch or ((tokens or 0) // seq if seq and tokens else 1) or 1
    each = seq or (tokens or 1) // requests
    if tokens is not None and requests * each != tokens:
        raise WeftError(f"tokens: {requests} requests of {each} tokens are not {tokens}.")
    return Workload(requests, each, 0, phase)


@dataclass(frozen=True)
class ModelLayout:
    """How a model lies over ranks: tensor slices, data-parallel copies of what is not experts, and
    ranks that its experts are spread over (1: experts are sliced as the rest is)."""

    tp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """How many GPUs it takes."""
        return self.tp * self.dp

    @property
    def exchanges(self) -> bool:
        """Whether tokens travel to experts (else every rank has all tokens)."""
        return self.ep > 1 and self.dp > 1


def read_parallel(text: str) -> ModelLayout:
    """`tp=8`, `dp=2,tp=4,ep=8`, `ep=32`. Raises `WeftError`."""
    names = [spec.name for spec in fields(ModelLayout)]
    sizes: dict[str, int] = {}
    for word in filter(None, re.split(r"[,\s]+", text)):
        name, _, number = word.partition("=")
        if name not in names:
            raise WeftError(f"parallel: {unknown('way', name, names)}")
        if not number.isdecimal() or not 1 <= int(number) <= 4096:
            raise WeftError(f"parallel: {name} must be from 1 to 4096; got {clip(number)}.")
        sizes[name] = int(number)
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
    dp = sizes.get("dp", max(1, ep // tp))
    if ep not in (1, tp * dp):
        raise WeftError(f"parallel: ep={ep} must be tp x dp, here {tp} x {dp} = {tp * dp}.")
    return ModelLayout(tp, dp, ep)


@dataclass(frozen=True)
class OpWork:
    """What an op does: `kind` is matmul, experts, attention, decode (attention of one token a
    request), memory, all_reduce, all_reduce_norm (one kernel), all_gather or all_to_all.

    rows: its rows for each row of the batch; fixed_rows: and for any batch.
    inner, outer: of a product of [rows, inner] by [inner, outer]; experts: so many of them, each
    with its share of the rows. flops: of attention, a row. row_bytes: of memory that it moves, a
    row (of a product: in a pass of its own before it).
    near_bytes, far_bytes: what a row sends inside its node, and to others; of an
    all_reduce_norm, what is summed up. mark: of a norm. parts: of a block, several
    ops in one.
    """

    kind: str
    inner: int = 0
    outer: int = 0
    rows: float = 1.0
    fixed_rows: float = 0.0
    experts: int = 1
    flops: float = 0.0
    row_bytes: float = 0.0
    near_bytes: float = 0.0
    far_bytes: float = 0.0
    dtype: str = "bfloat16"
    weight_bytes: float = 2.0
    kernels: int = 1
    mark: str = ""
    parts: tuple[OpWork, ...] = ()

    @property
    def launches(self) -> int:
        """How many kernels it starts."""
        return sum(part.launches for part in self.parts) if self.parts else self.kernels

    @property
    def products(self) -> tuple[OpWork, ...]:
        """What of it is products, whose pace is that of the clock."""
        own = (self,) if self.kind in PRODUCTS else ()
        return (*own, *(each for part in self.parts for each in part.products))
