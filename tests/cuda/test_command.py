"""The command `torchweft dryrun`: what it prints, writes and returns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from planted import PROGRAMS, here

from torchweft_tools.dryrun.calls import load_calls
from torchweft_tools.selftest.calls import calls as selftest_calls
from torchweft_tools.selftest.calls import run_dry as selftest_dry


def torchweft(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torchweft", "dryrun", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_bug_is_shown_with_its_line_and_fails(tmp_path: Path) -> None:
    calls, program = tmp_path / "calls.json", str(PROGRAMS / "streams.py")
    words = ("--calls", str(calls), "--", sys.executable, program, "race", "bug")
    done = torchweft(*words)
    assert done.returncode == 1, done.stderr
    assert "findings: 1" in done.stdout and here("streams.py", "race") in done.stdout
    assert "stream 0" in done.stdout and "add.Tensor" in done.stdout
    assert load_calls(calls)[0].events == "lazy"


def test_the_exit_code_is_the_programs() -> None:
    code = "import torch; x = torch.ones(2, device='cuda:3'); raise SystemExit(7)"
    done = torchweft("--devices", "4", "--events", "eager", "--", sys.executable, "-c", code)
    assert done.returncode == 7
    assert "no findings" in done.stdout


def test_what_is_not_modelled_fails_and_is_named() -> None:
    code = "import torch; torch.ones(2, device='cuda')"
    setting = "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"
    done = torchweft("--", "env", setting, sys.executable, "-c", code)
    assert done.returncode != 0
    assert "is not modelled" in done.stderr and "unmodelled: cuda" in done.stdout


def test_the_self_test_compares_the_calls_of_two_devices() -> None:
    """The dry run in the place of the node's devices; then with a call too many on one of them."""
    same = selftest_calls(1, on_device=selftest_dry)
    assert same["state"] == "passed", same["reason"]
    assert same["figures"]["overlap"] > same["figures"]["overlap-graphs"] > 0

    def waits(command: list[str], num_ranks: int) -> int:
        patch = (
            "import sys; from torchweft_tools.selftest import recorded; "
            "recorded.NUM_STEADY = 4; recorded.main(*sys.argv[1:])"
        )
        return selftest_dry([command[0], "-c", patch, *command[3:]], num_ranks)

    other = selftest_calls(1, on_device=waits)
    assert other["state"] == "failed"
    assert "on the device, nothing more in the dry run" in other["reason"]
