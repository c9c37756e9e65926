"""The memory bench: what a split call copies, and how much it holds, against plain eager.

    torchweft bench memory [--models llama,dense] [--json]

Each model of the zoo, and each two-rank model, runs eagerly and under `overlap` in 2 and in 4
parts. A `Meter`, which knows nothing of plans, counts what is copied and what is alive.

    copied_bytes   what the split call copies beyond what eager copies for the same call
    peak_ratio     the most bytes alive at once, over eager's
    copies         each copy step left in the plan, with its reason

A model counts as zero-copy if it is so for both numbers of parts, on all its ranks.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchweft import lab
from torchweft.api import compile, report, session_of
from torchweft.bench.meter import Meter
from torchweft.bench.zoo_models import MODELS, ROWS, Model, outputs_of
from torchweft.errors import WeftError, unknown
from torchweft.gate import compare
from torchweft.strategies import overlap

PARTS = (2, 4)
NUM_WARM, NUM_METERED = 4, 3
RANKED = ("dense", "experts", "llama_tp", "mixtral_tp")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
COLUMNS = (
    *("model", "ranks", "parts", "split", "eager_copied_bytes", "copied_bytes"),
    *("eager_peak_bytes", "peak_bytes", "peak_ratio", "error"),
)
"""What people see; --json gives all."""


@dataclass
class Row:
    """One model in a number of parts."""

    model: str
    ranks: int
    parts: int
    split: bool = False
    equal: str = ""
    eager_copied_bytes: int = 0
    copied_bytes: int = 0
    eager_peak_bytes: int = 0
    peak_bytes: int = 0
    peak_ratio: float = 0.0
    copies: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    error: str = ""


def run(
    *, models: str = "", progress: Callable[[int, int], None] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary of all models, or of those named (with commas between)."""
    zoo = {model.name: model for model in MODELS}
    known = (*zoo, *RANKED)
    wanted = [name.strip() for name in models.split(",") if name.strip()] or list(known)
    for name in wanted:
        if name not in known:
            raise WeftError(f"bench memory: {unknown('model', name, known)}", rule="model")
    ranked = [name for name in wanted if name in RANKED]
    rows: list[Row] = []
    for number, name in enumerate(name for name in wanted if name in zoo):
        rows += [_told(zoo[name], parts) for parts in PARTS]
        if progress is not None:
            progress(number + 1, len(wanted))
    rows += on_ranks(ranked) if ranked else []
    return [asdict(row) for row in rows], summary(rows)


def summary(rows: list[Row]) -> dict[str, Any]:
    """Of the models that were split: the share without any copied byte, and the worst peak."""
    models = {row.model for row in rows if row.split}
    copying = {row.model for row in rows if row.copied_bytes > 0 or row.error}
    ratios = [row.peak_ratio for row in rows if row.split]
    return {
        "models": len(models),
        "share_zero_copy": round(len(models - copying) / max(1, len(models)), 4),
        "worst_peak_ratio": round(max(ratios, default=0.0), 4),
        "copying": sorted(copying),
        "failed": sorted({row.model for row in rows if row.error}),
        "unsplit": sorted({row.model for row in rows} - models),
    }


def _told(model: Model, parts: int) -> Row:
    """A row of the zoo; whatever the model raises is told, not raised."""
    row = Row(model.name, 1, parts)
    try:
        torch.manual_seed(0)
        module, inputs = model.build().eval(), _doubled(model.inputs())
        batch = model.batch if isinstance(model.batch, int | str) else None
        measure(row, module, lambda: outputs_of(module(**inputs)), batch=batch)
    except ImportError as error:
        raise WeftError(f"bench memory: {error}. Install it: pip install {model.library}") from None
    except Exception as error:
        row.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return row


def _doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    """Twice the rows: four parts of the zoo's batch would have parts of one row."""
    return {
        name: torch.cat([item, item])
        if isinstance(item, torch.Tensor) and item.shape[0] == ROWS
        else item
        for name, item in inputs.items()
    }


def measure(
    row: Row, module: torch.nn.Module, call: Callable[[], Any], *, batch: int | str | None = None
) -> None:
    """Fill in a row: the module's own call, then the same call in parts."""
    row.eager_copied_bytes, row.eager_peak_bytes, wanted = _metered(call)
    torch._dynamo.reset()
    compile(module, overlap(parts=row.parts), batch=batch)
    try:
        for _ in range(NUM_WARM):
            _quiet(call)
        copied, row.peak_bytes, found = _metered(call)
        told = report(module)
        row.copies = _copies(module)
    finally:
        module._compiled_call_impl = None
    verdict = compare(wanted, found)
    row.equal = verdict.equal
    if not verdict:
        raise WeftError(f"bench memory: {row.model} differs in {row.parts} parts: {verdict}")
    row.split = any(plan.num_parts > 1 for piece in told.pieces for plan in piece.plans)
    row.fallbacks = [reason for reason, _ in told.fallbacks]
    row.copied_bytes = copied - row.eager_copied_bytes
    row.peak_ratio = round(row.peak_bytes / max(1, row.eager_peak_bytes), 4)


def _metered(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """Copied bytes, peak bytes and outputs of a call: the worst of several, after another one.

    They differ where gloo's own threads let go of a tensor a little sooner or later.
    """
    found = _quiet(call)
    meters = []
    for _ in range(NUM_METERED):
        gc.collect()
        gc.disable()  # or what dies in cycles would die at random
        try:
            with Meter() as meter:
                found = _quiet(call)
        finally:
            gc.enable()
        meters.append(meter)
    copied, peak = (
        max(getattr(m, name) for m in meters) for name in ("copied_bytes", "peak_bytes")
    )
    return copied, peak, found


def _quiet(call: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the models' own libraries
        return call()


def _copies(module: torch.nn.Module) -> list[str]:
    """The values that are copied together, each with the reason."""
    found = []
    for piece in session_of(module).pieces:
        for entry in piece.all_entries():
            names = dict.fromkeys(s.names[0] for s in entry.plan.steps if s.kind == "copy")
            why = piece.captured.unplaced
            found += [f"{name}: {why.get(name, 'its maker is a kernel')}" for name in names]
    return found


def on_ranks(names: list[str]) -> list[Row]:
    """The rows of models on two ranks; of both ranks the worse figures."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "torchweft.bench.memory_rank", json.dumps(names), folder]
        with lab.spawn_ranks(words, link="none", env=ENVIRONMENT) as ranks:
            for _ in ranks.stdout:
                pass
            code = ranks.wait()
        told = [_read(Path(folder) / f"rank{rank}.json") for rank in range(2)]
    if not all(told):
        raise WeftError(f"bench memory: the ranks ended with code {code} and told nothing.")
    return [_worse(Row(**left), Row(**right)) for left, right in zip(*told, strict=True)]


def _read(path: Path) -> list[Mapping[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def _worse(left: Row, right: Row) -> Row:
    if left.error or right.error:
        return left if left.error else right
    worst = max(left, right, key=lambda row: (row.copied_bytes, row.peak_ratio))
    worst.split = left.split and right.split
    worst.peak_ratio = max(left.peak_ratio, right.peak_ratio)
    return worst
