"""The predictions bench: what `torchweft predict` says beside what others have published.

    torchweft bench predictions --data FOLDER --json

Each row of FOLDER/published/calibration.csv that says which model ran, on which GPUs, on how many
tokens is predicted twice: from formulas and the figures of the GPU alone, and with the measured
times of FOLDER/published/components.csv. Nothing is fitted to a row. `error` is predicted over
published, less one; `speedup` over the row's own baseline, both as published and as predicted.
Rows that say too little are listed with the reason; all predictions are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

from torchweft.errors import WeftError
from torchweft.plan.strategies import get_strategy, sequential, strategy_names
from torchweft_tools.bench.predictions.published import Figure, read_figure
from torchweft_tools.predict.hardware import load_hardware
from torchweft_tools.predict.prediction import FUSING, Call, get_engine
from torchweft_tools.predict.prediction import run as predict_run
from torchweft_tools.predict.products import product_s
from torchweft_tools.predict.shape import load_shape
from torchweft_tools.predict.tables import MeasuredTimes, load_times, published

COLUMNS = (
    "id",
    "model",
    "gpu",
    "tokens",
    "method",
    "published_s",
    "predicted_s",
    "error",
    "error_with_tables",
    "speedup",
    "predicted_speedup",
)
REWRITING = ("comet",)
WAYS = ("", "_with_tables")
LEVEL = 0.01
"""A speed-up within so much of one has no sign."""


def run(
    *,
    data: str = "",
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Predict all rows that say enough. Raises `WeftError` if there is no data.

    data: a folder with published/calibration.csv; by default WEFT_DATA.
    quick: every eighth row, to see that everything runs.
    """
    rows = published(data or None, "calibration.csv")[:: 8 if quick else 1]
    try:
        times = load_times(published(data or None, "components.csv"))
    except WeftError:
        times = MeasuredTimes()
    figures = {row["id"]: read_figure(row) for row in rows}
    cache: dict[object, float] = {}
    told = []
    for count, row in enumerate(rows):
        told.append(_row(row, figures[row["id"]], times, cache))
        if progress is not None:
            progress(count + 1, len(rows))
    _add_speedups(told, [figures[row["id"]] for row in rows])
    return told, summary(told)


def _row(
    row: Mapping[str, str],
    figure: Figure | str,
    times: MeasuredTimes,
    cache: dict[object, float],
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        name: row.get(name, "")
        for name in ("id", "model", "gpu", "num_gpus", "phase", "tokens", "method")
    }
    facts |= {"published_s": None, "speedup": None, "excluded": None, "simulated": True}
    for way in WAYS:
        facts |= {f"predicted_s{way}": None, f"error{way}": None, f"predicted_speedup{way}": None}
    if isinstance(figure, Figure):
        facts["published_s"] = figure.published_s
        if figure.product is None and figure.strategy not in strategy_names():
            figure = f"strategy {figure.strategy!r} is not registered"
        elif figure.product is None and figure.strategy in REWRITING:
            figure = f"strategy {figure.strategy!r} rewrites calls, and a config has none"
    if isinstance(figure, str):
        return facts | {"excluded": figure}
    for way, measured in zip(WAYS, (MeasuredTimes(), times), strict=True):
        key = figure, bool(way)
        if key not in cache:
            cache[key] = seconds(figure, measured)
        facts[f"predicted_s{way}"] = cache[key]
        facts[f"error{way}"] = cache[key] / figure.published_s - 1
    return facts


def seconds(figure: Figure, measured: MeasuredTimes) -> float:
    """What a figure should be, by a simulation."""
    num_gpus, per_node = figure.parallel.num_ranks, 8
    nodes = -(-num_gpus // per_node)
    name = f"{nodes}x{per_node}x{figure.machine}" if nodes > 1 else f"{num_gpus}x{figure.machine}"
    hardware = load_hardware(name)
    if figure.product is not None:
        rows, inner, outer, order = figure.product
        return product_s(
            hardware,
            measured,
            (rows, inner, outer),
            order,
            figure.parallel.tp,
            part="".join(figure.part or ()),
            fused=figure.strategy != "sequential",
        )
    call = Call(
        load_shape(figure.model, figure.dtype),
        figure.load,
        figure.parallel,
        hardware,
        get_engine(figure.engine),
        measured,
        figure.collectives,
        figure.without,
        figure.strategy in FUSING,
        "kernels" if figure.layer else "auto",
    )
    strategy = sequential if figure.strategy == "sequential" else get_strategy(figure.strategy)
    if figure.strategy == "dual_batch":
        strategy = strategy(shared="^$")  # as served: one stream for all that is computed
    found = predict_run(call, strategy, bounded=False)
    if not figure.layer:
        return found.makespan_s
    if not figure.part:
        return found.layer_s * figure.scale
    wanted = figure.part
    total = 0.0
    for mark, spent in found.marks.items():
        is_product = mark.endswith("_proj") or mark == "router"
        if mark in wanted or ("product" in wanted and is_product):
            total += spent
    return total * figure.scale


def _add_speedups(told: list[dict[str, Any]], figures: Iterable[Figure | str]) -> None:
    """The speed-up over the baseline of the same workload, published and predicted."""
    pairs = [
        (row, figure)
        for row, figure in zip(told, figures, strict=True)
        if isinstance(figure, Figure) and row["excluded"] is None
    ]
    bases = {figure.group: row for row, figure in reversed(pairs) if figure.is_baseline}
    for row, figure in pairs:
        base = bases.get(figure.group)
        if base is None or base is row or figure.part:
            continue
        row["speedup"] = base["published_s"] / row["published_s"]
        for way in WAYS:
            row[f"predicted_speedup{way}"] = base[f"predicted_s{way}"] / row[f"predicted_s{way}"]


def summary(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of errors: of times as a share, of speed-ups in points; and how many signs agree."""
    rows = [row for row in told if row["excluded"] is None]
    facts: dict[str, Any] = {"rows": len(rows), "excluded": len(list(told)) - len(rows)}
    for way in WAYS:
        errors = [abs(row[f"error{way}"]) for row in rows]
        faster = [row for row in rows if row["speedup"] is not None]
        points = [100 * abs(row[f"predicted_speedup{way}"] - row["speedup"]) for row in faster]
        signs = [
            _sign(row[f"predicted_speedup{way}"]) == _sign(row["speedup"])
            for row in faster
            if _sign(row["speedup"])
        ]
        facts |= {
            f"median_error{way}": median(errors) if errors else None,
            f"largest_error{way}": max(errors, default=None),
            f"median_speedup_points{way}": median(points) if points else None,
            f"signs_right{way}": sum(signs) / len(signs) if signs else None,
        }
    return facts


def _sign(speedup: float) -> int:
    return 0 if abs(speedup - 1) < LEVEL else 1 if speedup > 1 else -1
