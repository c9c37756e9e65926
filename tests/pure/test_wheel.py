"""The wheel: both packages and their data are in it, and its commands run far from a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DATA = (
    "torchweft/py.typed",
    "torchweft/placement/learn/policies/seed0.safetensors",
    "torchweft_tools/bench/peers/models.py",
    "torchweft_tools/dryrun/child/sitecustomize.py",
    "torchweft_tools/dryrun/standin/runtime.c",
    "torchweft_tools/dryrun/standin/standin.h",
    "torchweft_tools/dryrun/standin/crt/host_defines.h",
    "torchweft_tools/lab/inside.py",
)
COMMANDS = (
    "demo --quick",
    "demo --help",
    "bench overlap --help",
    "bench verify --plans 4 --workers 1",
    "lab run --link none -- true",
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), *options, "-w", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


@pytest.mark.parametrize("name", DATA)
def test_wheel_holds(installed: Path, name: str) -> None:
    assert (installed / name).is_file()


@pytest.mark.parametrize("words", COMMANDS)
def test_command_runs_from_the_wheel(installed: Path, tmp_path: Path, words: str) -> None:
    code = (
        "import sys, torchweft, torchweft_tools; from torchweft_tools.cli.app import main;"
        f"assert all(item.__file__.startswith({str(installed)!r})"
        " for item in (torchweft, torchweft_tools)); main()"
    )
    command = [sys.executable, "-c", code, *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
