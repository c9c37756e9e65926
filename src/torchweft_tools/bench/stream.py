"""The stream bench: a new number of tokens at almost every call, as a serving engine sees it.

    torchweft bench stream --json

A small transformer takes flat tokens; 2,000 calls have 1,000 different token counts. The bench
counts the runs of the strategy, Dynamo's compilations after warm-up, and what a call costs beyond
the model: the caller's CPU time with Weft minus that of the plain model, on the same tokens. The
control is the plain model against itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from torchweft.api import compile, session_of
from torchweft.errors import WeftError
from torchweft.plan.strategies import overlap

HIDDEN, NUM_LAYERS, MAX_TOKENS = 32, 4, 4096
MIN_TOKENS = 64
WARM = (1, *(2**power for power in range(1, 13)))
Progress = Callable[[int, int], None]
Row = dict[str, Any]


class StreamLayer(nn.Module):
    """A gated layer over flat tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        grown: Tensor = self.down(torch.nn.functional.silu(gate) * up)
        return x + grown


def run(
    *,
    num_calls: int = 2000,
    num_counts: int = 1000,
    seed: int = 0,
    quick: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each power of two of tokens, and the summary.

    num_calls: calls in all.
    num_counts: different token counts among them.
    seed: the random seed.
    quick: 100 calls, to see that everything runs.
    """
    num_calls, num_counts = (100, 50) if quick else (num_calls, num_counts)
    if not 1 <= num_counts <= min(num_calls, MAX_TOKENS):
        raise WeftError(
            f"bench stream: --counts must be from 1 to {min(num_calls, MAX_TOKENS)}, the calls "
            f"and the most tokens of a call; got {num_counts}.",
            rule="option",
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _run(num_calls, num_counts, seed, progress or (lambda done, total: None))
    finally:
        torch.set_num_threads(threads)


def _run(num_calls: int, num_counts: int, seed: int, progress: Progress) -> tuple[list[Row], Row]:
    torch.manual_seed(seed)
    plain = nn.Sequential(*(StreamLayer() for _ in range(NUM_LAYERS))).eval()
    model = nn.Sequential(*plain).eval()  # the same layers, run by weft
    compile(model, overlap(parts=2, min_tokens=MIN_TOKENS))
    tokens = torch.randn(MAX_TOKENS, HIDDEN)
    for count in WARM:
        for _ in range(2):
            model(tokens[:count])
    compiled = counters["stats"]["unique_graphs"]
    order = Random(seed)
    counts = order.sample(range(1, MAX_TOKENS + 1), num_counts)
    calls = counts + order.choices(counts, k=num_calls - num_counts)
    order.shuffle(calls)
    seen: dict[int, list[tuple[float, float]]] = {}
    control: list[float] = []
    for number, count in enumerate(calls):
        x = tokens[:count]
        wanted, plain_s = _timed(plain, x)
        made, weft_s = _timed(model, x)
        control.append(_timed(plain, x)[1] - plain_s)
        seen.setdefault(count.bit_length(), []).append((plain_s, weft_s))
        if not torch.allclose(made, wanted, atol=1e-5):
            raise WeftError(f"bench stream: the outputs of {count} tokens differ from the model's.")
        progress(number + 1, len(calls))
    over = sorted(weft - own for pairs in seen.values() for own, weft in pairs)
    rows = [_row(power, pairs) for power, pairs in sorted(seen.items())]
    return rows, {
        "calls": len(calls),
        "token_counts": len(set(calls)),
        "strategy_runs": sum(piece.plans.strategy_runs for piece in session_of(model).pieces),
        "recompiles": counters["stats"]["unique_graphs"] - compiled,
        "p99_overhead_ms": 1e3 * over[int(0.99 * len(over))],
        "median_overhead_ms": 1e3 * statistics.median(over),
        "control_p99_ms": 1e3 * sorted(control)[int(0.99 * len(control))],
    }


def _row(power: int, pairs: list[tuple[float, float]]) -> Row:
    over = sorted(weft - own for own, weft in pairs)
    return {
        "tokens": f"{2 ** (power - 1)}..{2**power - 1}",
        "calls": len(pairs),
        "plain_ms": 1e3 * statistics.median(own for own, _ in pairs),
        "weft_ms": 1e3 * statistics.median(weft for _, weft in pairs),
        "worst_overhead_ms": 1e3 * over[-1],
    }


def _timed(call: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    """The output, and the CPU seconds of this thread: others on the machine do not count."""
    start = time.thread_time()
    made = call(x)
    return made, time.thread_time() - start
