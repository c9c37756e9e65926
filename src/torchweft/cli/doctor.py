"""The doctor: what this machine can and cannot do for Weft, each finding with its cure.

Everything that could crash (a bfloat16 matmul on a machine that only claims to know how) is tried
in a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torchweft import lab

TORCH = "2.13.0"


@dataclass(frozen=True)
class Diagnosis:
    """One thing looked at: state is "ok", "warning" or "broken"."""

    what: str
    state: str
    found: str
    cure: str = ""


def examine() -> Iterator[Diagnosis]:
    """Look at everything, one diagnosis at a time."""
    yield _python()
    yield _torch()
    yield _bfloat16()
    yield _compiler()
    yield _gloo()
    yield _namespaces()
    yield _threads()


def _python() -> Diagnosis:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Diagnosis(
        "python", "ok" if good else "broken", version, "" if good else "Use 3.11 or later."
    )


def _torch() -> Diagnosis:
    code = "import torch; print(torch.__version__, torch.version.cuda or 'cpu')"
    done = _try(code)
    if done.returncode:
        return Diagnosis("torch", "broken", _last(done.stderr), f"pip install torch=={TORCH}")
    version, build = done.stdout.split()
    good = version.split("+")[0] == TORCH
    cure = "" if good else f"Weft is tested with {TORCH}: pip install torch=={TORCH}"
    return Diagnosis("torch", "ok" if good else "warning", f"{version}, build {build}", cure)


def _bfloat16() -> Diagnosis:
    code = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a)[0, 0].item())"
    if _try(code).returncode == 0:
        return Diagnosis("bfloat16 matmul", "ok", "works")
    cure = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
    name, setting = cure.split("=")
    if _try(code, {name: setting}).returncode == 0:
        text = f"Set {cure} before torch is imported, or use float32."
        return Diagnosis("bfloat16 matmul", "warning", "crashes (illegal instruction)", text)
    return Diagnosis("bfloat16 matmul", "warning", "crashes", "Use float32 on this machine.")


def _compiler() -> Diagnosis:
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        return Diagnosis("C++ compiler", "warning", "none", "Inductor needs g++ or clang++.")
    return Diagnosis("C++ compiler", "ok", found)


def _gloo() -> Diagnosis:
    code = "import torch.distributed as d; print(d.is_available() and d.is_gloo_available())"
    good = _try(code).stdout.strip() == "True"
    cure = "" if good else "This torch has no gloo: several ranks cannot run here."
    return Diagnosis("gloo", "ok" if good else "warning", "there" if good else "missing", cure)


def _namespaces() -> Diagnosis:
    """Whether a bandwidth-limited link can be made here without root."""
    if reason := lab.check():
        cure = "Links run over plain loopback here; they need Linux, util-linux and iproute2."
        return Diagnosis("network namespaces", "warning", reason, cure)
    return Diagnosis("network namespaces", "ok", "unprivileged, with a token-bucket filter")


def _threads() -> Diagnosis:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Diagnosis("cores", "ok", str(cores))


def _try(code: str, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **(more or {})},
    )  # fmt: skip


def _last(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "failed without a word"
