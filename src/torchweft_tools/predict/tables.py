"""The `MeasuredTimes`: times of ops and collectives that others have measured, by GPU and size.

    folder/published/components.csv --load_times--> MeasuredTimes
    ("matmul", "8192", 7168), 4096 rows             seconds, between two rows linear

Only between the smallest and the largest size that was measured: beyond, formulas are as good.
"""

from __future__ import annotations

import csv
import io
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchweft.errors import WeftError
from torchweft.files import read_text
from torchweft_tools.predict.hardware import Hardware

Key = tuple[str, str, int]
Points = tuple[tuple[float, float], ...]
UNITS = {"time_us": 1e-6, "time_ms": 1e-3}
COLLECTIVES = {
    "NCCL all-reduce": ("ring", "all_reduce"),
    "NCCL all-reduce (CUDA graph)": ("ring", "all_reduce"),
    "multimem (NVLS) all-reduce": ("multimem", "all_reduce"),
    "multimem reduce-scatter": ("multimem", "reduce_scatter"),
    "multimem all-gather": ("multimem", "all_gather"),
}
NO_DATA = (
    "data: the published figures are not part of the package. Name the folder that has "
    "published/{}, with --data FOLDER or the variable WEFT_DATA."
)


@dataclass(frozen=True)
class MeasuredTimes:
    """Points (size, seconds) by GPU and by what was measured; none by default."""

    points: Mapping[tuple[str, Key], Points] = field(default_factory=dict)

    def seconds(self, hardware: Hardware, key: Key, size: float) -> float | None:
        """The seconds of a size, or None if it lies outside of what was measured."""
        points = self.points.get((hardware.gpu, key), ())
        at = bisect_left(points, size, key=lambda point: point[0])
        if at < len(points) and points[at][0] == size:
            return points[at][1]
        if not 0 < at < len(points):
            return None
        (low, low_s), (high, high_s) = points[at - 1], points[at]
        return low_s + (high_s - low_s) * (size - low) / (high - low)


def published(data: str | Path | None, name: str) -> list[dict[str, str]]:
    """The rows of a file of published figures. Raises `WeftError` if there is no such file."""
    folder = str(data or os.environ.get("WEFT_DATA", ""))
    path = Path(folder) / "published" / name
    if not folder or not path.is_file():
        raise WeftError(NO_DATA.format(name), rule="data")
    rows = list(csv.DictReader(io.StringIO(read_text(path, WeftError, "data"))))
    needed = {"id", "gpu", "method", "metric", "value", "tokens", "notes"}
    if not rows or needed - rows[0].keys():
        missing = ", ".join(sorted(needed - (rows[0].keys() if rows else set())))
        raise WeftError(f"data: {path.name} has no rows, or no columns {missing}.", rule="data")
    return rows


def load_times(rows: Iterable[Mapping[str, str]]) -> MeasuredTimes:
    """The times of published components that prices can use."""
    points: dict[tuple[str, Key], dict[float, float]] = {}
    for row in rows:
        known = _key(row)
        if known is None or row["metric"] not in UNITS:
            continue
        gpu = "h100" if row["gpu"].startswith("H100 SXM") else "a100"
        key, size = known
        points.setdefault((gpu, key), {})[size] = float(row["value"]) * UNITS[row["metric"]]
    return MeasuredTimes({key: tuple(sorted(sizes.items())) for key, sizes in points.items()})


def _key(row: Mapping[str, str]) -> tuple[Key, float] | None:
    """What a row is about, and its size: rows of the batch, or bytes of a collective."""
    if not row["gpu"].startswith(("H100 SXM", "A100 80GB")):
        return None
    if row["method"] in COLLECTIVES:
        algorithm, kind = COLLECTIVES[row["method"]]
        words = (row["tokens"] if "bytes" in row["tokens"] else row["notes"]).split()
        numbers = [word for word in words if word.isdigit()]
        ranks = row["num_gpus"]
        return ((algorithm, kind, int(ranks)), float(numbers[0])) if numbers else None
    if row["method"] == "RMSNorm on all tokens":
        return ("memory", "norm", 8 * 8192), float(row["tokens"])
    if not row["phase"].startswith("op microbench: "):
        return None
    shards = int(row["parallelism"].removeprefix("TP").split()[0])
    hidden, ffn, heads, kv_heads, dim = 8192, 28672, 64, 8, 128
    if f"hidden {hidden} ffn {ffn} kv {kv_heads}" not in row["params_note"]:
        return None
    products = {
        "attn_pre_proj": (hidden, (heads + 2 * kv_heads) * dim // shards),
        "attn_post_proj": (heads * dim // shards, hidden),
        "mlp_up_proj": (hidden, 2 * ffn // shards),
        "mlp_down_proj": (ffn // shards, hidden),
    }
    op = row["phase"].removeprefix("op microbench: ")
    if op in products:
        inner, outer = products[op]
        return ("matmul", str(inner), outer), float(row["tokens"])
    streams = {
        "mlp_act": ("act", 2 * 3 * ffn // shards),
        "attn_rope": ("rope", 2 * 2 * (heads + kv_heads) * dim // shards),
    }
    if op not in streams:
        return None
    mark, row_bytes = streams[op]
    return ("memory", mark, row_bytes), float(row["tokens"])
