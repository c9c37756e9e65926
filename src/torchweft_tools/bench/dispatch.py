"""The dispatch bench: what a call costs beyond its kernels, on models whose ops are tiny.

    torchweft bench dispatch --json

Each model is a chain of marked ops, a small linear and a relu each. Programs run in turn; a ratio
is weft's time over the other's, the median of pairs:

    sequential_vs_eager       weft, sequential, against the model as it is        from 64 ops up
    sequential_vs_compile     the same against torch.compile(backend="eager")     at every size
    two_parts_vs_plain        weft in two parts against the model as it is
    two_parts_vs_two_halves   the same against torch.compile called on two halves, and their cat
    inductor_vs_inductor      weft with inner="inductor" against torch.compile    from 64 ops up

Below 64 ops the guards, which every compiled model pays for, cost more than the ops themselves.
What is compiled later lies scattered in memory, and its guards take longer, whatever they guard. So
all programs are made twice, the second time in reverse order, and no two share a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchweft.api import compile
from torchweft.capture.marks import mark_module
from torchweft.errors import WeftError
from torchweft.plan.strategies import overlap, sequential
from torchweft_tools.bench.measure.options import require_pairs
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, ratio_columns

NUM_OPS = (8, 64, 256)
LARGE = 64
INDUCTOR_OPS = (8, 64)
WIDTH, BATCH = 16, 8
MIN_RUN_S = 0.004
NUM_WARM = 5
Progress = Callable[[int, int], None]
Run = Callable[[], Tensor]
Row = dict[str, Any]
RATIOS = {
    "sequential_vs_eager": ("weft", "eager"),
    "sequential_vs_compile": ("weft", "compile"),
    "two_parts_vs_plain": ("weft_2", "eager"),
    "two_parts_vs_two_halves": ("weft_2", "two_halves"),
    "inductor_vs_inductor": ("weft_inductor", "inductor"),
    "aa": ("eager", "eager_again"),
}
FROM_LARGE = ("sequential_vs_eager", "inductor_vs_inductor")
"""These count from `LARGE` ops up."""


class Tiny(nn.Module):
    """One op: a linear and a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Chain(nn.Module):
    """A chain of tiny ops."""

    def __init__(self, num_ops: int) -> None:
        super().__init__()
        self.ops = nn.ModuleList(Tiny() for _ in range(num_ops))

    def forward(self, x: Tensor) -> Tensor:
        for op in self.ops:
            x = op(x)
        return x


def run(
    *,
    num_pairs: int = MIN_PAIRS,
    seed: int = 0,
    quick: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each size of model, and the summary: the worst median of each ratio.

    num_pairs: timed pairs; the programs run in turn.
    seed: the random seed.
    quick: the smallest model and three pairs, to see that everything runs.
    """
    require_pairs("dispatch", num_pairs, quick=quick)
    sizes, num_pairs = (NUM_OPS[:1], 3) if quick else (NUM_OPS, num_pairs)
    rows: list[Row] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number, num_ops in enumerate(sizes):
            times: dict[str, list[float]] = {}
            for backwards in (False, True):
                torch._dynamo.reset()  # the chains share code, and Dynamo bounds its cache
                torch.manual_seed(seed)
                with torch.inference_mode():
                    runs = programs(num_ops, backwards=backwards)
                    for name, seconds in race(runs, num_pairs, Random(seed)).items():
                        times.setdefault(name, []).extend(seconds)
            rows.append(row(num_ops, times))
            if progress is not None:
                progress(number + 1, len(sizes))
    finally:
        torch.set_num_threads(threads)
    return rows, summary(rows)


def programs(num_ops: int, *, backwards: bool = False) -> dict[str, Run]:
    """What runs in turn, compiled in this order or backwards."""
    plain = Chain(num_ops).eval()
    x = torch.randn(BATCH, WIDTH)
    halves = x.chunk(2)
    rules = [mark_module(Tiny, "tiny")]
    half_model = _compiled(plain, backend=_forward)

    def two_halves() -> Tensor:
        return torch.cat([half_model(half) for half in halves])

    calls: dict[str, nn.Module] = {
        "eager": plain,
        "eager_again": plain,
        "compile": _compiled(plain, backend="eager"),
        "weft": compile(_copy(plain), sequential, rules=rules),
        "weft_2": compile(_copy(plain), overlap(parts=2), rules=rules),
    }
    if num_ops in INDUCTOR_OPS:
        calls["inductor"] = _compiled(plain)
        calls["weft_inductor"] = compile(_copy(plain), sequential, inner="inductor", rules=rules)
    runs: dict[str, Run] = {name: _bound(call, x) for name, call in calls.items()}
    runs["two_halves"] = two_halves
    wanted = plain(x)
    for name, each in reversed(runs.items()) if backwards else runs.items():
        for _ in range(NUM_WARM):
            made = each()
        if not torch.allclose(made, wanted, atol=1e-6):
            raise WeftError(f"bench dispatch: the output of {name} differs from the model's.")
    return runs


def _copy(model: Chain) -> Chain:
    """The same weights in a model of its own."""
    made = Chain(len(model.ops)).eval()
    made.load_state_dict(model.state_dict())
    return made


def _compiled(model: Chain, **options: Any) -> Chain:
    made = _copy(model)
    made.compile(dynamic=True, **options)
    return made


def _forward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend "eager" by another name: equal models share what one backend made of them."""
    return gm.forward


def _bound(call: nn.Module, x: Tensor) -> Run:
    return lambda: call(x)


def race(runs: dict[str, Run], num_pairs: int, order: Random) -> dict[str, list[float]]:
    """Seconds of one call, by program and round; each round has a random order."""
    start = time.perf_counter()
    runs["eager"]()
    num_calls = max(1, round(MIN_RUN_S / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_pairs):
        for name in order.sample(list(runs), len(runs)):
            call = runs[name]
            start = time.perf_counter()
            for _ in range(num_calls):
                call()
            times[name].append((time.perf_counter() - start) / num_calls)
    return times


def row(num_ops: int, times: dict[str, list[float]]) -> Row:
    """The ratios of one model."""
    columns: Row = {
        "ops": num_ops,
        "eager_us": 1e6 * sorted(times["eager"])[len(times["eager"]) // 2],
    }
    for name, (ours, other) in RATIOS.items():
        if ours not in times:
            columns |= {name: None, f"{name}_low": None, f"{name}_high": None}
            continue
        columns |= ratio_columns(name, times[ours], times[other])
    return columns


def summary(rows: list[Row]) -> Row:
    """The worst row of each ratio, among those that count."""
    worst_ratios: Row = {}
    for name in RATIOS:
        counted = [r for r in rows if r["ops"] >= LARGE or name not in FROM_LARGE]
        worst = max(
            (r for r in counted if r[name] is not None), key=lambda r: r[name], default=None
        )
        worst_ratios[name] = worst[name] if worst else None
        worst_ratios[f"{name}_low"] = worst[f"{name}_low"] if worst else None
    return worst_ratios


COLUMNS = ("ops", "eager_us", *RATIOS)
