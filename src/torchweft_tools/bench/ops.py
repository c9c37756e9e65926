"""The ops bench: every operator of PyTorch's own test database, split, and compared with eager.

    torchweft bench ops [--quick] [--ops relu,cumsum] [--journal FILE] [--json]

Each entry (`OpInfo`) becomes some cases, see `op_cases`. Each case runs under `overlap(parts=2)` or
under `uneven`, which cuts off one row, and must give eager's numbers, shapes and dtypes. Cases run
in a process of their own: if it dies or takes longer than the limit, that is counted, and the bench
continues. With a journal, a bench that was stopped can be resumed.

    right_split   right everywhere, and at least one case ran in parts with no op whole
    right_whole   right everywhere, but some op of every case ran whole
    own_error     some case raised an error of ours
    wrong, foreign, hang    by name: other numbers than eager's, an error that is not ours and that
                            eager does not raise, no answer in time (or a process that died)
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchweft.api import compile, report
from torchweft.errors import WeftError
from torchweft.plan.strategies import overlap
from torchweft.plan.write.scheduler import Scheduler
from torchweft.plan.write.strategy import strategy
from torchweft.run.compare import compare
from torchweft.serve.session import Report
from torchweft_tools.bench.cases.op_cases import (
    UNDEFINED,
    UNWELL,
    OpCase,
    cases_of,
    op_infos,
    seeded,
)
from torchweft_tools.bench.measure.options import chosen

LIMIT_S = 120.0
QUICK_STEP = 13  # --quick takes every 13th entry
ORDER = ("right_split", "right_whole", "none", "own_error", "foreign", "hang", "wrong")
COLUMNS = ("op", "verdict", "num_cases", "num_split", "num_row_wise", "whole", "errors")


@strategy
def uneven(s: Scheduler) -> None:
    """One row, and then all others."""
    if s.graph.batch is None or s.context.batch < 2:
        return s.sequential("there is nothing to cut")
    s.split([1, s.context.batch - 1])
    while ready := s.ready():
        for op, part in ready:
            s.run(op, part)
    s.merge()
    return None


@dataclass
class OpRow:
    """The results of one operator. whole: why cases that are truly row-wise were not split."""

    op: str
    verdict: str = "none"
    num_cases: int = 0
    num_split: int = 0
    num_row_wise: int = 0
    num_row_wise_split: int = 0
    whole: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def worsen(self, verdict: str) -> None:
        """Take a verdict if it is worse than what was seen so far."""
        if self.verdict == "none" or ORDER.index(verdict) > ORDER.index(self.verdict):
            self.verdict = verdict


def run(
    *,
    quick: bool = False,
    ops: str = "",
    journal: str = "",
    limit_s: float = LIMIT_S,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary of all operators, or of those named.

    quick: a slice of the operators, one sample each.
    ops: names of operators, separated by commas; all by default.
    journal: a file of rows, one per line: those in it are not made again, so that a bench that was
        stopped can be resumed.
    limit_s: seconds that one operator may take.
    """
    names = _chosen(ops, quick)
    rows = {row["op"]: row for row in _kept(journal)}
    missing = [name for name in names if name not in rows]
    for row in _looked(missing, quick, limit_s):
        rows[row["op"]] = row
        if journal:
            with Path(journal).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if progress is not None:
            progress(sum(name in rows for name in names), len(names))
    asked = [rows[name] for name in names]
    return asked, summary(asked)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many operators are right, in parts or whole; those that are not, by name."""
    made = [row for row in rows if row["verdict"] != "none"]  # eager takes no batch of the others
    count = Counter(row["verdict"] for row in made)
    named = {
        verdict: [row["op"] for row in made if row["verdict"] == verdict]
        for verdict in ("wrong", "foreign", "hang")
    }
    return {
        "ops": len(made),
        **{verdict: count[verdict] for verdict in ("right_split", "right_whole", "own_error")},
        **named,
        "cases": sum(row["num_cases"] for row in made),
        "row_wise": sum(row["num_row_wise"] for row in made),
        "row_wise_split": sum(row["num_row_wise_split"] for row in made),
    }


def _chosen(ops: str, quick: bool) -> list[str]:
    known = [name for name in op_infos() if name not in UNWELL]
    names = chosen("ops", "operator", ops, known)
    return names[::QUICK_STEP] if quick and not ops else names


def _kept(journal: str) -> list[dict[str, Any]]:
    if not journal or not Path(journal).exists():
        return []
    return [json.loads(line) for line in Path(journal).read_text(encoding="utf-8").splitlines()]


# The process that looks, and the one that waits for it.


def _looked(names: list[str], quick: bool, limit_s: float) -> Iterator[dict[str, Any]]:
    """The rows of operators, made by a process that is started again where one fails."""
    spawn = multiprocessing.get_context("spawn")
    at = 0
    while at < len(names):
        here, there = spawn.Pipe()
        worker = spawn.Process(target=_work, args=(there, names[at:], quick), daemon=True)
        worker.start()
        there.close()
        try:
            assert here.poll(limit_s) and here.recv() is None, "the process says that it is there"
            while at < len(names):
                yield here.recv() if here.poll(limit_s) else _lost(names[at], limit_s)
                at += 1
        except EOFError:
            worker.join()
            yield _lost(names[at], limit_s, worker.exitcode)
            at += 1
        finally:
            worker.kill()
            worker.join()


def _lost(name: str, limit_s: float, code: int | None = None) -> dict[str, Any]:
    why = f"no answer in {limit_s:g} s"
    if code is not None:
        why = f"its process died: {signal.Signals(-code).name if code < 0 else code}"
    return asdict(OpRow(name, "hang", errors=[why]))


def _work(pipe: Any, names: list[str], quick: bool) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torchweft").setLevel(logging.ERROR)  # why a call falls back is in its row
    infos = op_infos()
    pipe.send(None)
    for name in names:
        pipe.send(asdict(look(infos[name], quick=quick)))


# One operator.


def look(info: Any, *, quick: bool = False) -> OpRow:
    """Run all cases of one operator; whatever they raise is put into the row."""
    row = OpRow(info.formatted_name)
    for number, case in enumerate(cases_of(info, quick=quick)):
        row.num_cases += 1
        _judge(case, row, uneven() if number % 2 else overlap(parts=2))
    return row


def _judge(case: OpCase, row: OpRow, how: Any) -> None:
    torch._dynamo.reset()
    wanted = case.eager()
    row.num_row_wise += case.row_wise
    try:
        compiled = compile(case.function, how, batch=case.dim)
        made = seeded(compiled, case.fresh())
    except WeftError as error:
        row.worsen("own_error")
        row.errors.append(f"{case.name}: {type(error).__name__}: {_line(error)}")
        return
    except Exception as error:
        if not _torch_fails(case):
            row.worsen("foreign")
            row.errors.append(f"{case.name}: {type(error).__name__}: {_line(error)}")
        return
    if row.op in UNDEFINED:
        wanted, made = tree_map(_shape, wanted), tree_map(_shape, made)
    verdict = compare(wanted, made)
    model_report = report(compiled)
    why = _whole(model_report)
    row.num_split += not why
    row.num_row_wise_split += case.row_wise and not why
    if case.row_wise and why:
        row.whole.append(f"{case.name}: {why}")
    if not verdict:
        row.worsen("wrong")
        row.errors.append(f"{case.name}: {verdict}")
    elif ORDER.index(row.verdict) <= ORDER.index("none"):
        row.verdict = "right_split" if row.num_split else "right_whole"


def _whole(model_report: Report) -> str:
    """Why a call did not run in parts altogether; empty if it did."""
    for piece in model_report.pieces:
        if piece.whole_ops:
            return f"{piece.whole_ops[0][0]}: {piece.whole_ops[0][2]}"
        if any(plan.num_parts < 2 for plan in piece.plans) or not piece.num_split_ops:
            return f"one part: {'; '.join(piece.notes)} {model_report.fallbacks}"
    if (
        model_report.assumed
        or model_report.fallbacks
        or model_report.num_uncaptured
        or not model_report.pieces
    ):
        reasons = f"assumed {model_report.assumed}, fallbacks {model_report.fallbacks}"
        return f"{reasons}, breaks {model_report.breaks}"
    return ""


def _torch_fails(case: OpCase) -> bool:
    """Whether Dynamo itself cannot compile it; then Weft need not run it."""
    torch._dynamo.reset()
    try:
        seeded(torch.compile(case.function, backend="eager"), case.fresh())
    except Exception:
        return True
    return False


def _shape(leaf: Any) -> Any:
    return (str(leaf.dtype), *leaf.shape) if isinstance(leaf, torch.Tensor) else leaf


def _line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return " | ".join(lines[:3])[:300]
