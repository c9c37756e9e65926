"""The dry run under test: programs run in this Python, whose torch is a CUDA build."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchweft.dryrun.calls import Rank, read_calls
from torchweft.dryrun.run import Outcome, run

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
Dry = Callable[..., tuple[int, tuple[Rank, ...]]]

if torch.version.cuda is None:
    pytest.skip("needs a CUDA build of torch: make test-cuda", allow_module_level=True)


@pytest.fixture(scope="session")
def dry() -> Dry:
    """Run a program of ours: its exit code, and the calls of its ranks."""

    def start(name: str, *words: str, ranks: int = 1, patience_s: float = 60.0) -> Outcome:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        return run(
            [*command, str(PROGRAMS / name), *words],
            devices=ranks,
            patience_s=patience_s,
            env=environment,
            stderr=subprocess.DEVNULL if patience_s < 60 else None,
            timeout_s=300,
        )

    def finish(*args: str, **options: object) -> tuple[int, tuple[Rank, ...]]:
        outcome = start(*args, **options)  # type: ignore[arg-type]
        return outcome.code, read_calls(outcome.ranks)

    return finish


def here(program: str, function: str) -> str:
    """FILE:LINE of the line that says "here", in a function or class of a program."""
    path = PROGRAMS / program
    inside = False
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if text.startswith(("def ", "class ")):
            inside = text.split()[1].startswith(function + "(")
        if inside and "# here" in text:
            return f"{path}:{number}"
    raise AssertionError(f"{function} in {program} has no line that says here")
