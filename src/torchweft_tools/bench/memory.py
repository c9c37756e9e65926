"""The memory bench: what a split call copies, and how much it holds, against plain eager.

    torchweft bench memory [--models llama,dense] [--inner inductor] [--json]

Each model of the zoo, and each two-rank model, runs eagerly and under `overlap` in 2 and in 4
parts. A `Meter`, which knows nothing of plans, counts what is copied and what is alive.

    copied_bytes   what the split call copies beyond what the same call copies in one part
    peak_ratio     the most bytes alive at once, over eager's
    whole_ratio    the same over those of the call in one part
    copies         each copy step left in the plan, with its reason

The call in one part is eager's own, or that of the inner compiler. A dispatch mode does not see
into compiled kernels: under `--inner` live bytes are the allocator's (`Allocations`), and copies
inside kernels are read from Inductor's code (`hidden`). A model counts as zero-copy if it is so for
both numbers of parts, on all its ranks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchweft import lab
from torchweft.api import compile, report, session_of
from torchweft.errors import WeftError
from torchweft.options import Options
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.write.strategy import Strategy
from torchweft.run.compare import compare
from torchweft.serve.session import Session, copied_values
from torchweft_tools.bench.measure.kernels import Known, hidden_copies, plain_copies
from torchweft_tools.bench.measure.messages import brief
from torchweft_tools.bench.measure.meter import Allocations, Meter
from torchweft_tools.bench.measure.options import chosen
from torchweft_tools.bench.models.zoo_models import MODELS, ROWS, ZooModel, outputs_of

PARTS = (2, 4)
NUM_WARM, NUM_METERED = 4, 3
RANKED = ("dense", "experts", "llama_tp", "mixtral_tp")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
COLUMNS = (
    *("model", "ranks", "parts", "split", "eager_copied_bytes", "copied_bytes"),
    *("eager_peak_bytes", "peak_bytes", "peak_ratio", "whole_ratio", "error"),
)
"""What people see; --json gives all."""


@dataclass
class MemoryRow:
    """One model in a number of parts."""

    model: str
    ranks: int
    parts: int
    split: bool = False
    equal: str = ""
    eager_copied_bytes: int = 0
    copied_bytes: int = 0
    eager_peak_bytes: int = 0
    whole_peak_bytes: int = 0
    peak_bytes: int = 0
    peak_ratio: float = 0.0
    whole_ratio: float = 0.0
    copies: list[str] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    error: str = ""


def run(
    *,
    models: str = "",
    inner: str = "eager",
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary of all models, or of those named.

    models: names of models, separated by commas; all by default.
    inner: the compiler inside of ops: eager or inductor.
    quick: the first two models of those, to see that everything runs.
    """
    Options("sequential", inner=inner)  # raises if there is no such compiler
    zoo = {model.name: model for model in MODELS}
    wanted = chosen("memory", "model", models, (*zoo, *RANKED))[: 2 if quick else None]
    ranked = [name for name in wanted if name in RANKED]
    rows: list[MemoryRow] = []
    for number, name in enumerate(name for name in wanted if name in zoo):
        rows += [_zoo_row(zoo[name], parts, inner) for parts in PARTS]
        if progress is not None:
            progress(number + 1, len(wanted))
    rows += on_ranks(ranked, inner) if ranked else []
    return [asdict(row) for row in rows], summary(rows)


def summary(rows: list[MemoryRow]) -> dict[str, Any]:
    """Of the models that were split: the share without any copied byte, and the worst peak."""
    models = {row.model for row in rows if row.split}
    copying = {row.model for row in rows if row.copied_bytes > 0 or row.hidden or row.error}
    split = [row for row in rows if row.split]
    return {
        "models": len(models),
        "share_zero_copy": round(len(models - copying) / max(1, len(models)), 4),
        "worst_peak_ratio": max((row.peak_ratio for row in split), default=0.0),
        "worst_whole_ratio": max((row.whole_ratio for row in split), default=0.0),
        "copying": sorted(copying),
        "failed": sorted({row.model for row in rows if row.error}),
        "unsplit": sorted({row.model for row in rows} - models),
    }


def _zoo_row(model: ZooModel, parts: int, inner: str) -> MemoryRow:
    """A row of the zoo; whatever the model raises is put into the row."""
    row = MemoryRow(model.name, 1, parts)
    try:
        torch.manual_seed(0)
        module, inputs = model.build().eval(), _doubled(model.inputs())
        batch = model.batch if isinstance(model.batch, int | str) else None
        measure(row, module, lambda: outputs_of(module(**inputs)), inner, batch=batch)
    except ImportError as error:
        raise WeftError(f"bench memory: {error}. Install it: pip install {model.library}") from None
    except Exception as error:
        row.error = brief(error)
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
    row: MemoryRow,
    module: torch.nn.Module,
    call: Callable[[], Any],
    inner: str,
    *,
    batch: int | str | None = None,
) -> None:
    """Fill in a row: the module's own call, the call in one part, then the same call in parts."""
    seen = inner == "eager"
    row.eager_copied_bytes, row.eager_peak_bytes, wanted = _metered(call, seen=seen)
    whole, row.whole_peak_bytes = row.eager_copied_bytes, row.eager_peak_bytes
    known: Known = {}
    if inner != "eager":
        with _compiled(module, call, sequential(), inner, batch) as session:
            whole, row.whole_peak_bytes, wanted = _metered(call, seen=seen)
            known = plain_copies(session)
    with _compiled(module, call, overlap(parts=row.parts), inner, batch) as session:
        copied, row.peak_bytes, outputs = _metered(call, seen=seen)
        model_report = report(module)
        row.copies = [f"{n}: {why}" for piece in session.pieces for n, why in copied_values(piece)]
        row.hidden = hidden_copies(session, known)
    verdict = compare(wanted, outputs)
    row.equal = verdict.equal
    if not verdict:
        raise WeftError(f"bench memory: {row.model} differs in {row.parts} parts: {verdict}")
    row.split = any(plan.num_parts > 1 for piece in model_report.pieces for plan in piece.plans)
    row.fallbacks = [reason for reason, _ in model_report.fallbacks]
    row.copied_bytes = copied - whole
    row.peak_ratio = round(row.peak_bytes / max(1, row.eager_peak_bytes), 4)
    row.whole_ratio = round(row.peak_bytes / max(1, row.whole_peak_bytes), 4)


@contextlib.contextmanager
def _compiled(
    module: torch.nn.Module,
    call: Callable[[], Any],
    strategy: Strategy,
    inner: str,
    batch: int | str | None,
) -> Iterator[Session]:
    """The module under a strategy while inside, warm."""
    torch._dynamo.reset()
    compile(module, strategy, batch=batch, inner=inner)
    try:
        for _ in range(NUM_WARM):
            _quiet(call)
        yield session_of(module)
    finally:
        module._compiled_call_impl = None


def _metered(call: Callable[[], Any], *, seen: bool) -> tuple[int, int, Any]:
    """Copied bytes, peak bytes and outputs of a call: the worst of several, after a warm-up.

    seen: a dispatch mode sees all that makes tensors; else the allocator is asked for the peak.
    Calls differ where gloo's own threads release a tensor a little sooner or later.
    """
    outputs = _quiet(call)
    copied, peaks = [], []
    for _ in range(NUM_METERED):
        gc.collect()
        gc.disable()  # or objects in cycles would be freed at random times
        try:
            with Meter() as meter:
                outputs = _quiet(call)
            copied.append(meter.copied_bytes)
            peaks.append(meter.peak_bytes if seen else _peak_of(call))
        finally:
            gc.enable()
    return max(copied), max(peaks), outputs


def _peak_of(call: Callable[[], Any]) -> int:
    with Allocations() as allocations:
        _quiet(call)
    return allocations.peak_bytes


def _quiet(call: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the models' own libraries
        return call()


def on_ranks(names: list[str], inner: str) -> list[MemoryRow]:
    """The rows of models on two ranks, with the worse figures of the two."""
    with tempfile.TemporaryDirectory() as folder:
        player = "torchweft_tools.bench.players.memory_rank"
        command = [sys.executable, "-m", player, json.dumps(names), inner, folder]
        with lab.spawn_ranks(command, link="none", env=ENVIRONMENT) as ranks:
            for _ in ranks.stdout:
                pass
            code = ranks.wait()
        rows = [_read(Path(folder) / f"rank{rank}.json") for rank in range(2)]
    if not all(rows):
        raise WeftError(f"bench memory: the ranks ended with code {code} and wrote no rows.")
    return [
        _worse(MemoryRow(**left), MemoryRow(**right)) for left, right in zip(*rows, strict=True)
    ]


def _read(path: Path) -> list[Mapping[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def _worse(left: MemoryRow, right: MemoryRow) -> MemoryRow:
    if left.error or right.error:
        return left if left.error else right
    worst = max(left, right, key=lambda row: (row.copied_bytes, row.peak_ratio))
    worst.split = left.split and right.split
    worst.peak_ratio = max(left.peak_ratio, right.peak_ratio)
    worst.whole_ratio = max(left.whole_ratio, right.whole_ratio)
    worst.hidden = left.hidden or right.hidden
    return worst
