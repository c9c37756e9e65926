"""Old import paths lead to the modules of today, each with a warning."""

from __future__ import annotations

import subprocess
import sys

import pytest

from torchweft._moved import moved


def test_every_new_path_is_there() -> None:
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    made = subprocess.run([sys.executable, "-c", code, *sorted({*moved().values()})], check=False)
    assert made.returncode == 0


@pytest.mark.parametrize("old", ["bucket", "runtimes.kernels", "placement.exhaustive", "gate"])
def test_an_old_path_gives_the_module_of_today(old: str) -> None:
    code = f"import torchweft.{old} as m; print(m.__name__)"
    made = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() == moved()[f"torchweft.{old}"]
    assert "DeprecationWarning" in made.stderr and "has moved to" in made.stderr
