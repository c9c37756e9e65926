"""The zoo bench: many architectures, each captured, run by plans, and compared with eager.

    torchweft bench zoo [--models llama,t5] [--json]

Each model runs under `sequential` (must be bit-equal to eager) and under `overlap(parts=2)` on an
odd batch (equal within tolerance). All other strategies write plans for its graphs, for batches of
several sizes, and the verifier judges them (`unsafe`).
`split_share` is the measured share of op time run in parts.
A model that cannot be split counts as such only if the op that forbids it is named.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from torchweft.api import compile, report, session_of
from torchweft.errors import WeftError
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.strategies import overlap, sequential
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import Strategy, write
from torchweft.run.compare import compare
from torchweft.serve.piece import Piece
from torchweft.serve.session import Report, Session
from torchweft_tools.bench.measure.messages import brief
from torchweft_tools.bench.measure.options import chosen
from torchweft_tools.bench.models.zoo_models import MODELS, ZooModel, outputs_of

NUM_CALLS = 4
BATCHES = (1, 2, 7, 64)
PUBLISHED = ("branches", "dual_batch", "multiplex", "nanoflow", "prefetch", "single_batch")


@dataclass
class ZooRow:
    """The results of one model."""

    model: str
    captured: bool = False
    sequential_equal: bool = False
    split_equal: bool = False
    equal: str = ""
    max_abs_diff: float = float("nan")
    split_share: float | None = None
    num_graphs: int = 0
    num_ops: int = 0
    num_copies: int = 0
    whole_ops: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    plans: int = 0
    unsafe: list[str] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0


def run(
    *,
    models: str = "",
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary of all models, or of those named.

    models: names of models, separated by commas; all by default.
    quick: the first two of those, to see that everything runs.
    """
    known = {model.name: model for model in MODELS}
    names = chosen("zoo", "model", models, known)[: 2 if quick else None]
    rows = []
    for number, name in enumerate(names):
        rows.append(look(known[name]))
        if progress is not None:
            progress(number + 1, len(names))
    return [asdict(row) for row in rows], summary(rows)


def summary(rows: list[ZooRow]) -> dict[str, Any]:
    """How many models were captured, equal, split; the median share of time in parts."""
    shares = [row.split_share or 0.0 for row in rows]
    unsplit = [row for row in rows if not row.split_equal and not row.error and row.whole_ops]
    return {
        "models": len(rows),
        "captured": sum(row.captured for row in rows),
        "sequential_equal": sum(row.sequential_equal for row in rows),
        "split_equal": sum(row.split_equal for row in rows),
        "unsplittable_with_reason": len(unsplit),
        "failed": sum(bool(row.error) for row in rows),
        "plans_of_strategies": sum(row.plans for row in rows),
        "unsafe": sum(len(row.unsafe) for row in rows),
        "median_split_share": round(statistics.median(shares), 4) if shares else 0.0,
    }


def look(model: ZooModel) -> ZooRow:
    """Capture one model and run it by plans; whatever it raises is put into the row."""
    row, start = ZooRow(model.name), time.perf_counter()
    try:
        _look(model, row)
    except ImportError as error:
        raise WeftError(f"zoo: {error}. Install it: pip install {model.library}") from None
    except Exception as error:
        row.error = brief(error)
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def _look(model: ZooModel, row: ZooRow) -> None:
    torch.manual_seed(0)
    module, inputs = model.build().eval(), model.inputs()
    wanted = _outputs(module, inputs)
    outputs, model_report, session = _under(sequential, model, module, inputs)
    for piece in session.pieces:
        _judge(piece, row)
    row.captured = bool(model_report.pieces) and model_report.num_uncaptured == 0
    row.sequential_equal = compare(wanted, outputs).equal == "bit-equal"
    outputs, model_report, _ = _under(overlap(parts=2), model, module, inputs)
    verdict = compare(wanted, outputs)
    row.equal, row.max_abs_diff = verdict.equal, verdict.max_abs_diff
    row.split_share, row.num_copies = model_report.split_share, model_report.num_copies
    split = any(plan.num_parts > 1 for piece in model_report.pieces for plan in piece.plans)
    row.split_equal = bool(verdict) and split
    if not verdict:
        raise WeftError(f"zoo: the outputs of {model.name} differ under overlap: {verdict}")
    row.num_graphs = len(model_report.pieces)
    row.num_ops = sum(piece.num_ops for piece in model_report.pieces)
    row.whole_ops = [
        f"{n}: {why}" for piece in model_report.pieces for n, _, why in piece.whole_ops
    ]
    row.fallbacks = dict(model_report.fallbacks)


def _judge(piece: Piece, row: ZooRow) -> None:
    """Let each strategy write plans for a graph, and the verifier look at them."""
    graph = piece.graph
    known = [shape.context for each in piece.plans.all_entries() for shape in each.shapes.values()]
    for rows in BATCHES if graph.batch is not None and known else ():
        requests = (1,) * (rows // 2) + (rows - rows // 2,)
        context = replace(known[0], batch=rows, num_tokens=rows, tokens_per_request=requests)
        for name in PUBLISHED:
            try:
                verify(lower(write(name, graph, context, cpu(2))))
            except WeftError as error:
                row.unsafe.append(f"{name} of {rows} rows: {brief(error)}")
            row.plans += 1


def _under(
    strategy: Strategy, model: ZooModel, module: torch.nn.Module, inputs: dict[str, Any]
) -> tuple[Any, Report, Session]:
    """The outputs of the last of several calls under a strategy, the report, and the session."""
    torch._dynamo.reset()
    batch = model.batch if isinstance(model.batch, int | str) else None
    compile(module, strategy, batch=batch)
    try:
        outputs = None
        for _ in range(NUM_CALLS):
            outputs = _outputs(module, inputs)
        return outputs, report(module), session_of(module)
    finally:
        module._compiled_call_impl = None


def _outputs(module: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the models' own libraries
        return outputs_of(module(**inputs))
