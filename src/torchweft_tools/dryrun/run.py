"""A program under the dry run: a command comes in; its exit code and calls of its ranks go out.

    run(["torchrun", "--nproc-per-node", "2", "serve.py"], devices=2)  ->  Outcome

The command is not changed: its environment preloads the stand-in and adds the watch to PYTHONPATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchweft.errors import MachineError
from torchweft_tools import need_linux
from torchweft_tools.dryrun.build import build, include_folders_of
from torchweft_tools.dryrun.calls import gather

CHILD = Path(__file__).with_name("child")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The exit code of a command, and the plain records of its ranks."""

    code: int
    ranks: list[dict[str, Any]]


def run(
    command: Sequence[str],
    *,
    devices: int = 1,
    events: str = "lazy",
    patience_s: float = 60.0,
    python: str | None = None,
    timeout_s: float | None = None,
    **options: Any,
) -> Outcome:
    """Run a command under the dry run. `options` go to `subprocess.run`.

    Raises `MachineError` on systems other than Linux, if there is no such command, or if its torch
    is not a CUDA build.
    """
    need_linux("dryrun", "its stand-in for CUDA is preloaded")
    if not command or shutil.which(command[0]) is None:
        raise MachineError(
            f"dryrun: there is no command {command[0]!r}."
            if command
            else "dryrun: there is no command; give one, such as: -- python train.py"
        )
    if not 1 <= devices <= 64:
        raise MachineError(f"dryrun: devices must be a number from 1 to 64; got {devices}.")
    if events not in ("lazy", "eager"):
        raise MachineError(f"dryrun: events must be lazy or eager; got {events!r}.")
    if not patience_s > 0:
        raise MachineError(
            f"dryrun: patience must be a positive number of seconds; got {patience_s:g}."
        )
    library = build(include_folders_of(python or python_of(command)))
    with tempfile.TemporaryDirectory(prefix="weft-dryrun-") as folder:
        known = options.pop("env", None) or os.environ
        paths = [str(CHILD), known.get("PYTHONPATH", "")]
        preloads = [str(library), known.get("LD_PRELOAD", "")]
        environment = {
            **known,
            "LD_PRELOAD": " ".join(filter(None, preloads)),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TORCH_DISABLE_NATIVE_JIT": "1",  # torch's own Triton kernels: their ATen forms run
            "WEFT_DRYRUN_FOLDER": folder,
            "WEFT_DRYRUN_DEVICES": str(devices),
            "WEFT_DRYRUN_EVENTS": events,
            "WEFT_DRYRUN_PATIENCE_S": str(patience_s),
        }
        done = subprocess.run(command, env=environment, timeout=timeout_s, **options)
        return Outcome(done.returncode, gather(Path(folder)))


def python_of(command: Sequence[str]) -> str:
    """The Python of a command: the command itself, or the interpreter of its script."""
    path = shutil.which(command[0])
    if path is None or Path(path).name.startswith("python"):
        return path or sys.executable
    with Path(path).open("rb") as file:
        first = file.readline(4096)
    if first.startswith(b"#!") and b"python" in first:
        return first[2:].decode(errors="replace").split()[0]
    return sys.executable
