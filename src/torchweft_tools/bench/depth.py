"""The depth bench: what one more layer costs, and what the whole stack costs once it is compiled.

    torchweft bench depth [--layers 4,16,64] [--inners eager,inductor] [--pairs 30] [--json]

A tiny model like Llama is compiled at several depths: by `torch.compile` in one graph, and by Weft,
which traces a layer once. Inductor starts with an empty cache, and a model of two layers compiles
the kernels before the clock starts, so seconds per added layer are those of tracing, planning and
Inductor's own work (without Inductor: the shortest of three). At the greatest depth both run in
turn, with an A/A control. Last, a plan of 80 layers in two parts is written, lowered and verified.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from torchweft.api import compile, report, session_of
from torchweft.capture.dynamo import mark_batch
from torchweft.capture.marks import INNERS
from torchweft.errors import WeftError
from torchweft.plan.context import Context
from torchweft.plan.strategies import overlap
from torchweft_tools.bench.measure.options import chosen
from torchweft_tools.bench.measure.pairs import MIN_PAIRS, measure
from torchweft_tools.bench.models.depth_model import VOCABULARY, DepthModel

ROWS, TOKENS, DEEP = 4, 16, 80
NUM_REPEATS = 3
COLUMNS = (
    "inner", "layers", "full_graph_s", "weft_s", "ops", "inner_compilations", "steady", "control",
)  # fmt: skip


@dataclass
class DepthRow:
    """One depth under one inner compiler; `steady` is Weft's time over that of the full graph."""

    inner: str
    layers: int
    full_graph_s: float = 0.0
    weft_s: float = 0.0
    ops: int = 0
    inner_compilations: int = 0
    max_abs_diff: float = 0.0
    full_graph_ms: float | None = None
    weft_ms: float | None = None
    steady: float | None = None
    steady_low: float | None = None
    steady_high: float | None = None
    control: float | None = None
    control_low: float | None = None
    control_high: float | None = None
    unblocked: str = ""


def run(
    *,
    layers: str = "4,16,64",
    inners: str = "eager,inductor",
    num_pairs: int = MIN_PAIRS,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by inner compiler and depth, and what one more layer costs.

    layers: depths of the model, separated by commas.
    inners: inner compilers, separated by commas: eager, inductor.
    num_pairs: timed pairs; the programs run in turn.
    quick: small depths, no Inductor and three pairs, to see that everything runs.
    """
    if quick:
        layers, inners, num_pairs = "2,4", "eager", 3
    depths = sorted(int(word) for word in layers.split(",") if word.strip().isdigit())
    if len(depths) < 2 or depths[0] < 2:
        text = f"--layers must be two or more depths of at least 2 layers; got {layers!r}"
        raise WeftError(f"depth: {text}.", rule="depth")
    names = chosen("depth", "inner compiler", inners, INNERS)
    rows: list[DepthRow] = []
    total = len(names) * len(depths) + 1
    with torch.no_grad(), fresh_cache():
        for inner in names:
            _first_calls(inner, 2)  # kernels, imports
            for depth in depths:
                rows.append(_look(inner, depth, num_pairs if depth == depths[-1] else 0))
                if progress is not None:
                    progress(len(rows), total)
        plan_s = plan_seconds(DEEP)
    return [asdict(row) for row in rows], summary(rows, depths, plan_s)


def summary(rows: list[DepthRow], depths: list[int], plan_s: float) -> dict[str, Any]:
    """The worst of all inner compilers."""
    slopes, compilations = [], dict.fromkeys(depths, 0)
    for inner in dict.fromkeys(row.inner for row in rows):
        of = {row.layers: row for row in rows if row.inner == inner}
        first, last = of[depths[0]], of[depths[-1]]
        slopes.append((last.weft_s - first.weft_s) / (last.full_graph_s - first.full_graph_s))
        for depth in depths:
            compilations[depth] = max(compilations[depth], of[depth].inner_compilations)
    steady = [(row.steady, row.control) for row in rows if row.steady is not None]
    ratio, control = max(steady, key=lambda pair: pair[0] or 0.0)
    return {
        "s_per_layer_vs_full_graph": round(max(slopes), 3),
        f"inner_compilations_{depths[0]}": compilations[depths[0]],
        f"inner_compilations_{depths[-1]}": compilations[depths[-1]],
        "steady_vs_full_graph": ratio,
        "steady_control": control,
        f"plan_s_{DEEP}_layers": round(plan_s, 3),
    }


def plan_seconds(depth: int) -> float:
    """Seconds to write, lower and verify the plan of a deep model for two parts: a median."""
    torch._dynamo.reset()
    model = DepthModel(depth).eval()
    compile(model, "sequential")
    model(_tokens())
    piece = session_of(model).pieces[0]
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        piece.plans.plan(overlap(parts=2), Context(ROWS))
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s)


def _look(inner: str, depth: int, num_pairs: int) -> DepthRow:
    row = DepthRow(inner, depth)
    stock, model, row.full_graph_s, row.weft_s = _first_calls(inner, depth)
    for _ in range(NUM_REPEATS - 1 if inner != "inductor" else 0):  # its cache would know them
        stock, model, full_graph_s, weft_s = _first_calls(inner, depth)
        row.full_graph_s = min(row.full_graph_s, full_graph_s)
        row.weft_s = min(row.weft_s, weft_s)
    tokens = _tokens()
    model_report = report(model)
    row.ops = sum(piece.num_ops for piece in model_report.pieces)
    row.inner_compilations = sum(piece.num_compiled for piece in model_report.pieces)
    row.unblocked = model_report.unblocked
    row.max_abs_diff = float((model(tokens) - stock(tokens)).abs().max())
    if num_pairs:
        faster, control = measure(lambda: stock(tokens), lambda: model(tokens), num_pairs=num_pairs)
        row.steady, row.steady_low, row.steady_high = _over(faster)
        row.control, row.control_low, row.control_high = _over(control)
        row.full_graph_ms, row.weft_ms = (_median_ms(call, tokens) for call in (stock, model))
    return row


def _first_calls(inner: str, depth: int) -> tuple[Any, DepthModel, float, float]:
    """The same model under `torch.compile` and under Weft, and the seconds of each first call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DepthModel(depth).eval()
    twin = copy.deepcopy(model)
    tokens = _tokens()
    stock = torch.compile(twin, backend=inner, fullgraph=True)
    mark_batch(tokens, 0)
    full_graph_s = _seconds(stock, tokens)
    compile(model, "sequential", inner=inner)
    return stock, model, full_graph_s, _seconds(model, _tokens())


def _tokens() -> torch.Tensor:
    return torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % VOCABULARY


def _seconds(call: Callable[[torch.Tensor], Any], tokens: torch.Tensor) -> float:
    start = time.perf_counter()
    call(tokens)
    return time.perf_counter() - start


def _median_ms(call: Callable[[torch.Tensor], Any], tokens: torch.Tensor) -> float:
    return round(1e3 * statistics.median(_seconds(call, tokens) for _ in range(MIN_PAIRS)), 3)


def _over(faster: Any) -> tuple[float, float, float]:
    """How many times as fast, as a ratio of times: median, low, high."""
    return tuple(round(1 / each, 3) for each in (faster.median, faster.high, faster.low))
