"""The dry run under test: programs run in this Python, whose torch is a CUDA build."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planted import PROGRAMS, Dry

from torchweft_tools.dryrun.calls import RankCalls, read_calls
from torchweft_tools.dryrun.run import Outcome, run

ROOT = Path(__file__).parents[2]

# They need a CUDA build of torch: make test-cuda.
collect_ignore_glob = ["test_*.py"] if torch.version.cuda is None else []


@pytest.fixture(autouse=True)
def own_cache() -> None:
    """The stand-in is compiled once for all tests, and kept."""


@pytest.fixture(scope="session")
def dry() -> Dry:
    """Run a program of ours: its exit code, and the calls of its ranks."""

    def start(
        name: str, *words: str, ranks: int = 1, devices: int = 0, patience_s: float = 60.0
    ) -> Outcome:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        path = os.pathsep.join(
            map(str, (ROOT / "src", ROOT / "tests", ROOT / "tests" / "accelerator"))
        )
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return run(
            [*command, str(PROGRAMS / name), *words],
            devices=devices or ranks,
            patience_s=patience_s,
            env=environment,
            stderr=subprocess.DEVNULL if patience_s < 60 else None,
            timeout_s=300,
        )

    def finish(*args: str, **options: object) -> tuple[int, tuple[RankCalls, ...]]:
        outcome = start(*args, **options)  # type: ignore[arg-type]
        return outcome.code, read_calls(outcome.ranks)

    return finish
