"""The doctor: what this machine can and cannot do for Weft, each finding with its cure.

Everything that could crash (a bfloat16 matmul on a machine that only claims to know how) is tried
in a process of its own.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torchweft import lab

TORCH = ("2.13.0", "2.14.1", "2.15.0")


@dataclass(frozen=True)
class Diagnosis:
    """One thing looked at: state is "ok", "warning" or "broken"."""

    what: str
    state: str
    found: str
    cure: str = ""


def examine() -> Iterator[Diagnosis]:
    """Look at everything, one diagnosis at a time."""
    yield Diagnosis("python", "ok", platform.python_version())
    yield _torch()
    yield _bfloat16()
    yield _compiler()
    yield _gloo()
    yield _namespaces()
    has_affinity = hasattr(os, "sched_getaffinity")
    yield Diagnosis(
        "cores", "ok", str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count())
    )


def _torch() -> Diagnosis:
    done = _try("import torch; print(torch.__version__, torch.version.cuda or 'cpu')")
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["failed without a message"])[-1]
        return Diagnosis("torch", "broken", why, f"pip install torch=={TORCH[0]}")
    version, build = done.stdout.split()
    good = version.split("+")[0] in TORCH
    cure = "" if good else f"Weft is tested with {', '.join(TORCH)}: pip install torch=={TORCH[0]}"
    return Diagnosis("torch", "ok" if good else "warning", f"{version}, build {build}", cure)


def _bfloat16() -> Diagnosis:
    code = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print((a @ a)[0, 0].item())"
    if _try(code).returncode == 0:
        return Diagnosis("bfloat16 matmul", "ok", "works")
    name, setting = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
    if _try(code, {name: setting}).returncode == 0:
        cure = f"Set {name}={setting} before torch is imported, or use float32."
        return Diagnosis("bfloat16 matmul", "warning", "crashes (illegal instruction)", cure)
    return Diagnosis("bfloat16 matmul", "warning", "crashes", "Use float32 on this machine.")


def _compiler() -> Diagnosis:
    if compiler := shutil.which("g++") or shutil.which("clang++"):
        return Diagnosis("C++ compiler", "ok", compiler)
    return Diagnosis("C++ compiler", "warning", "none", "Inductor needs g++ or clang++.")


def _gloo() -> Diagnosis:
    code = "import torch.distributed as d; print(d.is_available() and d.is_gloo_available())"
    if _try(code).stdout.strip() == "True":
        return Diagnosis("gloo", "ok", "there")
    cure = "This torch has no gloo: several ranks cannot run here."
    return Diagnosis("gloo", "warning", "missing", cure)


def _namespaces() -> Diagnosis:
    """Whether a bandwidth-limited link can be made here without root."""
    if reason := lab.check():
        cure = "Links run over plain loopback here; they need Linux, util-linux and iproute2."
        return Diagnosis("network namespaces", "warning", reason, cure)
    return Diagnosis("network namespaces", "ok", "unprivileged, with a token-bucket filter")


def _try(code: str, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, **(more or {})},
    )  # fmt: skip
