"""The doctor's look at GPUs, on answers as nvidia-smi and torch give them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from torchweft_tools.selftest import gpu_doctor

SMI = """\
NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB, Disabled
NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB, Disabled
"""
LINKS = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""
TORCH: dict[str, Any] = {
    "cuda": "13.0", "count": 2, "peers": 2, "nccl": "2.29.3", "capability": [9, 0],
}  # fmt: skip


def test_a_node_that_is_well() -> None:
    diagnoses = [
        gpu_doctor.driver(SMI, TORCH),
        gpu_doctor.nccl(TORCH),
        gpu_doctor.peers(TORCH),
        gpu_doctor.nvlink(LINKS, TORCH),
        gpu_doctor.symmetric_memory(TORCH),
        gpu_doctor.connections({}),
        gpu_doctor.mig(SMI),
    ]
    assert {each.state for each in diagnoses} == {"ok"}
    assert diagnoses[0].found == "580.65.06, 2 x NVIDIA H100 80GB HBM3; CUDA 13.0"
    assert diagnoses[3].found == "2 a device, 26.562 GB/s each"


def test_what_takes_the_gain_away_is_named_with_its_cure() -> None:
    ill = [
        gpu_doctor.driver("", TORCH),
        gpu_doctor.driver(SMI, {**TORCH, "cuda": None}),
        gpu_doctor.driver(SMI, {**TORCH, "count": 0}),
        gpu_doctor.nccl({**TORCH, "nccl": ""}),
        gpu_doctor.peers({**TORCH, "peers": 0}),
        gpu_doctor.connections({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        gpu_doctor.mig(SMI.replace("Disabled", "Enabled")),
    ]
    assert [each.state for each in ill] == [
        "warning", "warning", "broken", "broken", "warning", "warning", "warning",
    ]  # fmt: skip
    assert all(each.cure for each in ill)


def test_older_devices_and_single_ones_are_no_fault() -> None:
    one = {**TORCH, "count": 1, "peers": 0, "capability": [8, 0]}
    assert gpu_doctor.peers(one).state == "ok"
    assert gpu_doctor.symmetric_memory(one).state == "ok"
    assert gpu_doctor.nvlink("", one).found.startswith("none")


def test_the_tool_of_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$1" in nvlink) exit 9;; esac\nprintf "%s" "{SMI}"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_doctor, "_torch", lambda: TORCH)
    diagnoses = {each.what: each for each in gpu_doctor.examine_gpus()}
    assert diagnoses["GPU driver"].state == "ok"
    assert diagnoses["NVLink"].found.startswith("none"), "a tool that fails has said nothing"


def test_hosts_of_other_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "9.9.9", "sglang": "0.5.23", "transformers": "5.22.2"}
    monkeypatch.setattr(gpu_doctor, "_version", lambda name: installed.get(name, ""))
    states = {each.what: each.state for each in gpu_doctor.hosts()}
    assert states == {"host transformers": "ok", "host vllm": "warning", "host sglang": "warning"}


def test_a_machine_without_gpus_hears_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_doctor, "_torch", lambda: {"cuda": None, "count": 0})
    monkeypatch.setattr(gpu_doctor, "_smi", lambda *words: "")
    assert all(each.what.startswith("host ") for each in gpu_doctor.examine_gpus())
