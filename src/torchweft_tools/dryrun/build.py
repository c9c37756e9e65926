"""The stand-in library: the headers of a Python's CUDA wheels come in; a library goes out.

    build(include_folders_of(python))  ->  .../libweft_dryrun.so, compiled once for each content

The C files of `standin/` include NVIDIA's own headers, so a prototype that has changed is a
compiler error here and not a crash later. Functions that those headers declare and the stand-in
does not define become stubs: products of cuBLAS are recorded like kernels; any other function
reports that it is not modelled and returns an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchweft.errors import MachineError

STANDIN = Path(__file__).with_name("standin")
HEADERS = (
    "cuda_runtime_api.h",
    "cublas_v2.h",
    "cublasLt.h",
    "nccl.h",
    "ATen/detail/CUDAHooksInterface.h",
    "ATen/detail/AcceleratorHooksInterface.h",
    "c10/core/impl/PyInterpreter.h",
)
NUM_KEPT = 8
"""Compiled stand-ins in the cache; the least recently used are deleted."""
FLAGS = ("-O1", "-g", "-fPIC", "-shared", "-pthread", "-w", "-fvisibility=hidden")
# What an unmodelled function returns: "not supported" of its own library.
CODES = {"cudaError_t": 801, "cublasStatus_t": 15, "ncclResult_t": 5}
PROTOTYPE = re.compile(
    rf"\b({'|'.join(CODES)})\s+((?:cuda|cublas|nccl)\w+)\s*\(\s*([^;{{}}]*)\)\s*;"
)

# Asks a Python, without importing torch in it, where its CUDA wheels have their headers.
ASK = """
import importlib.util, json, pathlib, re
spec = importlib.util.find_spec("torch")
root = pathlib.Path(spec.origin).parent if spec else None
version = (root / "version.py").read_text() if root else ""
cuda = re.search(r"^cuda\\b[^=]*= '(.*)'", version, re.M)
folders = sorted(map(str, root.parent.glob("nvidia/*/include"))) if root else []
folders = [*folders, str(root / "include")] if root else []
print(json.dumps([bool(root), cuda and cuda[1], folders]))
"""


def include_folders_of(python: str) -> list[Path]:
    """Where the CUDA headers of a Python's torch are. Raises `MachineError` if it has none."""
    try:
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=60)
        has_torch, cuda, folders = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        raise MachineError(
            f"dryrun: {python} does not run as a Python; name one that has torch."
        ) from None
    if not has_torch:
        raise MachineError(f"dryrun: {python} has no torch. Install a CUDA build of it there.")
    if cuda is None:
        raise MachineError(
            f"dryrun: the torch of {python} is not a CUDA build. The dry run stands in for CUDA "
            "under PyTorch's real CUDA build: install one (pip install torch) in a venv of its own."
        )
    paths = [Path(folder) for folder in folders]
    for header in HEADERS:
        if not any((path / header).is_file() for path in paths):
            raise MachineError(
                f"dryrun: the wheels of {python} do not contain {header}; install torch with its "
                "dependencies (the nvidia-* wheels)."
            )
    return paths


def build(folders: Sequence[Path]) -> Path:
    """The library for these headers, compiled if it is not there yet. Raises `MachineError`."""
    if not (shutil.which("gcc") and shutil.which("g++")):
        raise MachineError("dryrun: gcc and g++ are needed to compile the stand-in; install them.")
    sources = sorted(path for path in STANDIN.rglob("*.*") if path.suffix in (".c", ".h", ".cpp"))
    headers = [path / name for path in folders for name in HEADERS if (path / name).is_file()]
    content = hashlib.sha256(" ".join(FLAGS).encode() + Path(__file__).read_bytes())
    for path in (*sources, *headers):
        content.update(path.read_bytes())
    place = cache_folder() / content.hexdigest()[:16]
    library = place / "libweft_dryrun.so"
    if not library.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)  # its files are loaded: nobody else may write them
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            _compile(folders, Path(scratch))
            (Path(scratch) / library.name).replace(library)  # atomic
    os.utime(place)
    for old in sorted(place.parent.iterdir(), key=_last_use)[:-NUM_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return library


def _last_use(place: Path) -> float:
    try:
        return place.stat().st_mtime
    except OSError:  # another process has deleted it
        return 0.0


def cache_folder() -> Path:
    """Where compiled stand-ins are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torchweft" / "dryrun"


def _compile(folders: Iterable[Path], scratch: Path) -> None:
    includes = [f"-I{STANDIN}", *(f"-I{path}" for path in folders)]
    headers = _run(["gcc", "-E", "-P", *includes, str(STANDIN / "standin.h")])
    (scratch / "stubs.c").write_text(stubs(headers), encoding="utf-8")
    slots = ["-std=c++20", "-S", "-w", *includes, str(STANDIN / "slot.cpp"), "-o", "-"]
    places = dict(re.findall(r"^weft_(\w+):\s+\.quad\s+(\d+)", _run(["g++", *slots]), re.MULTILINE))
    if set(places) != {"slot", "first_trace", "last_trace", "decref"}:
        raise MachineError("dryrun: the CUDA hooks of this torch are unknown; use torch 2.13.")
    # A pointer to a virtual member is its place, plus one.
    own = [f"-DWEFT_{name.upper()}={int(place) - 1}" for name, place in places.items()]
    sources = [STANDIN / "runtime.c", STANDIN / "libraries.c", scratch / "stubs.c"]
    output = ["-o", str(scratch / "libweft_dryrun.so")]
    _run(["gcc", *FLAGS, *own, *includes, *map(str, sources), *output, "-ldl"])


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line][:5]
        raise MachineError(
            "dryrun: the stand-in does not compile against these CUDA headers: it is written for "
            "CUDA 13, and a prototype may have changed.\n" + "\n".join(errors or [done.stderr])
        )
    return done.stdout


def stubs(headers: str) -> str:
    """C source with a weak function for every declaration in preprocessed headers."""
    declared = {name: (kind, args) for kind, name, args in PROTOTYPE.findall(headers)}
    lines = [
        "int weft_unmodelled(const char *name, int code);",
        "int weft_product(void *handle, const char *name);",
        '#define STUB __attribute__((weak, visibility("default"))) int',
    ]
    for name, (kind, args) in sorted(declared.items()):
        if _is_product(kind, name, args):
            lines.append(f'STUB {name}(void *handle) {{ return weft_product(handle, "{name}"); }}')
        else:
            lines.append(
                f'STUB {name}(void) {{ return weft_unmodelled("{name}", {CODES[kind]}); }}'
            )
    return "\n".join([*lines, ""])


def _is_product(kind: str, name: str, args: str) -> bool:
    """Whether a function of cuBLAS puts work on the stream of its handle."""
    is_setting = re.match(r"cublas(Get|Set|Create|Destroy|Logger|Lt|Xt)", name)
    return kind == "cublasStatus_t" and args.startswith("cublasHandle_t") and not is_setting
