"""Gloo ranks for tests, two or more: started once, they run many cases; failures come back by case.

    results = run_cases(folder, {"all reduce": case, ...})     results["all reduce"] == "" if fine
    results = run_once(tmp_path_factory, __name__, make)       make(folder) gives the cases

A case is a function of the rank that raises if something is wrong. Where one fails, its peer may
wait for it: the ranks tell each other after each case, and behind a failure of only one of them no
further case is run.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import torchweft as weft
from torchweft.api import session_of
from torchweft.plan.plan import Plan
from torchweft.serve import budget

PATIENCE_S = 180
LIMIT = datetime.timedelta(seconds=60)
Case = Callable[[int], None]


def fork_server() -> ForkServerContext:
    """Starts ranks by forks of one process that has everything loaded (`warm`), once a session."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # it sees no other path
        forkserver.ensure_running()
    return context


def run_cases(
    folder: Path, cases: Mapping[str, Case], *, patience_s: int = PATIENCE_S, size: int = 2
) -> dict[str, str]:
    """What went wrong in each case, on any rank; no process outlives this."""
    fork_server()
    told = (size, str(folder), dict(cases))
    context = mp.start_processes(rank_main, told, size, join=False, start_method="forkserver")
    assert context is not None
    try:
        left = patience_s
        while left > 0 and not context.join(timeout=1):
            left -= 1
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    found = {}
    for name in cases:
        said = [folder / f"{name} {rank}" for rank in range(size)]
        found[name] = "".join(f.read_text() if f.exists() else "it was not run" for f in said)
    return found


def run_once(
    factory: pytest.TempPathFactory,
    name: str,
    make: Callable[[Path], Mapping[str, Case]],
    *,
    size: int = 2,
) -> dict[str, str]:
    """The results of the cases that `make` gives: run by the first worker that asks, for all of
    them. Workers steal tests from each other, and each would run all cases of a file again."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"ranks {name}"
    folder.mkdir(exist_ok=True)
    results = folder / "results.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not results.exists():
            results.write_text(json.dumps(run_cases(folder, make(folder), size=size)))
    found: dict[str, str] = json.loads(results.read_text())
    return found


def rank_main(rank: int, size: int, folder: str, cases: dict[str, Case]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    budget.SHARE = math.inf  # `auto` tries ways at once, though calls take no time
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LIMIT)
    store.set_timeout(LIMIT)
    for name, case in cases.items():
        torch._dynamo.reset()
        torch.manual_seed(rank)
        text = ""
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error")
                case(rank)
        except BaseException:
            text = f"rank {rank}: {traceback.format_exc()}"
        (Path(folder) / f"{name} {rank}").write_text(text)
        store.set(f"{name} {rank}", "bad" if text else "fine")
        if len({store.get(f"{name} {other}") for other in range(size)}) > 1:
            break
    dist.destroy_process_group()


def talks(model: Callable[..., object]) -> list[tuple[str, str]]:
    """Kind and rows of every collective of a compiled model."""
    return [
        (op.collective.kind, op.rows)
        for piece in session_of(model).pieces
        for op in piece.graph.ops
        if op.collective is not None
    ]


def check_phases(plan: Plan) -> None:
    """Every collective is issued and completed, none is run in one go."""
    names = {op.name for op in plan.graph.ops if op.collective is not None}
    kinds = [(step.kind, step.names[0]) for step in plan.steps if names & set(step.names)]
    issued = [name for kind, name in kinds if kind == "issue"]
    completed = [name for kind, name in kinds if kind == "complete"]
    assert sorted(issued) == sorted(completed) and set(issued) == names, str(plan)
    assert not [name for kind, name in kinds if kind == "run"], str(plan)


def check_overlap(plan: Plan) -> None:
    """Some collective of part 0 is in flight while part 1 is computed."""
    check_phases(plan)
    steps = list(plan.steps)
    for start, step in enumerate(steps):
        if step.kind == "issue" and step.parts == (0, 1):
            end = next(
                at for at, other in enumerate(steps)
                if (other.kind, other.names, other.parts) == ("complete", step.names, step.parts)
            )  # fmt: skip
            if any(s.kind == "run" and s.parts == (1, 2) for s in steps[start:end]):
                return
    raise AssertionError(f"nothing of part 1 runs beside a collective of part 0:\n{plan}")


def check_clean(model: Callable[..., object]) -> None:
    """No call fell back and every graph was captured."""
    report = weft.report(model)
    assert report.fallbacks == (), report
    assert report.num_uncaptured == 0, report
