"""The self-test of a node: a device and a number of ranks come in, a bundle of outcomes goes out.

    bundle = run(device="cpu", num_ranks=2)
    bundle["failed"]          names of the checks that failed

The bundle is plain data without names of hosts, users or folders.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torchweft import lab
from torchweft.errors import MachineError, WeftError, unknown
from torchweft_tools.bench.measure.messages import listen
from torchweft_tools.cli.doctor import Diagnosis, examine
from torchweft_tools.selftest.checks import APART, TOGETHER

Outcome = dict[str, Any]
RECORDED, CALLS = "recorded", "calls"
CHECK_S = 120.0
"""Longer than this a check hangs, and its ranks are ended."""
HOSTS = ("vllm", "sglang", "transformers", "megatron-core", "xfuser", "fastvideo", "diffusers")
Progress = Callable[[int, int], None]


def run(
    *,
    device: str = "cpu",
    num_ranks: int = 2,
    dryrun: bool = False,
    only: Sequence[str] = (),
    num_pairs: int = 30,
    check_s: float = CHECK_S,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Run all checks, or only some. Raises `WeftError` for what cannot be asked for here."""
    names = [RECORDED] if dryrun else [*TOGETHER, *APART, *([CALLS] if device == "cuda" else [])]
    if wrong := [name for name in only if name not in names]:
        raise WeftError(f"selftest: {unknown('check', wrong[0], names)}", rule="option")
    if num_ranks < 1:
        raise WeftError(f"selftest: ranks must be 1 or more; got {num_ranks}.", rule="option")
    wanted = [name for name in names if not only or name in only]
    if not dryrun:
        _require(device, num_ranks)
    outcomes: list[Outcome] = []
    start = time.perf_counter()
    diagnoses = list(examine())
    if dryrun:
        from torchweft_tools.selftest.dry import recorded

        outcomes.append(recorded(num_ranks))
    else:
        spec = {"device": device, "dtypes": _dtypes(device, diagnoses), "num_pairs": num_pairs}
        together = [name for name in wanted if name in TOGETHER]
        for some in filter(None, (together, *([name] for name in wanted if name in APART))):
            for outcome in _ranks({**spec, "checks": some}, num_ranks, check_s):
                outcomes.append(outcome)
                progress(len(outcomes), len(wanted))
        if CALLS in wanted:
            outcomes.append(_calls(num_ranks))
            progress(len(outcomes), len(wanted))
    return {
        "selftest": 1,
        "device": "dryrun" if dryrun else device,
        "ranks": num_ranks,
        "seconds": round(time.perf_counter() - start, 1),
        "checks": outcomes,
        "failed": [each["check"] for each in outcomes if each["state"] == "failed"],
        "environment": {**environment(), "doctor": {each.what: each.state for each in diagnoses}},
    }


def _ranks(spec: dict[str, Any], num_ranks: int, check_s: float) -> Iterator[Outcome]:
    """Start ranks for some checks; an outcome for each, also where ranks die or hang."""
    left = list(spec["checks"])
    if num_ranks == 1 and left[0] in APART:
        yield _outcome(left[0], "skipped", "one rank has nobody to agree with")
        return
    words = [sys.executable, "-m", "torchweft_tools.selftest.rank"]
    words.append(json.dumps(spec))
    silence = {"TORCH_CPP_LOG_LEVEL": "FATAL", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with lab.spawn_ranks(words, link="none", num_ranks=num_ranks, env=silence) as ranks:
        hangs = threading.Event()

        def end() -> None:
            hangs.set()
            ranks.close()

        clock = threading.Timer(check_s, end)

        def restart(*_: object) -> None:
            nonlocal clock
            clock.cancel()
            clock = threading.Timer(check_s, end)
            clock.daemon = True
            clock.start()

        restart()
        reason = ""
        try:
            for outcome in listen(ranks, "selftest", restart):
                left.remove(outcome["check"])
                yield outcome
        except (WeftError, ValueError) as error:  # ValueError: closed by the clock
            reason = str(error)
        finally:
            clock.cancel()
    if hangs.is_set():
        reason = f"it took longer than {check_s:g} s"
    for number, name in enumerate(left):
        text = reason or "the ranks ended early"
        yield _outcome(name, "failed", text if not number else f"not reached: {text}")


def _calls(num_ranks: int) -> Outcome:
    from torchweft_tools.selftest.calls import calls

    try:
        return calls(num_ranks)
    except MachineError as error:
        return _outcome(CALLS, "skipped", f"there is no dry run here: {error}")


def _outcome(name: str, state: str, reason: str, **figures: Any) -> Outcome:
    return {"check": name, "state": state, "reason": reason, "figures": figures, "seconds": 0.0}


def _require(device: str, num_ranks: int) -> None:
    import torch

    if device == "cpu":
        return
    if device != "cuda":
        raise WeftError(f"selftest: {unknown('device', device, ('cpu', 'cuda'))}", rule="option")
    if not torch.cuda.is_available():
        raise MachineError(
            "selftest: torch sees no CUDA device here. Use --device cpu, or --dryrun with a CUDA "
            "build of torch.",
            rule="device",
        )
    if (count := torch.cuda.device_count()) < num_ranks:
        raise MachineError(
            f"selftest: {num_ranks} ranks need {num_ranks} devices; torch sees {count}. Give "
            f"--ranks {count}.",
            rule="device",
        )


def _dtypes(device: str, diagnoses: Sequence[Diagnosis]) -> list[str]:
    """float32, and bfloat16 where this machine's matrix products can do it."""
    good = device != "cpu" or any(
        each.what.startswith("bfloat16") and each.state == "ok" for each in diagnoses
    )
    return ["float32", "bfloat16"] if good else ["float32"]


def summary(bundle: dict[str, Any]) -> str:
    """The outcomes as text: a line for each check, then the verdict."""
    lines = []
    for each in bundle["checks"]:
        told = each["reason"] or ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in each["figures"].items()
            if not isinstance(value, dict)
        )
        lines.append(f"{each['state']:8} {each['check']:12} {each['seconds']:6.1f} s  {told}")
    failed = ", ".join(bundle["failed"])
    where = f"{bundle['device']}, {bundle['ranks']} ranks, {bundle['seconds']:g} s"
    return "\n".join([*lines, f"selftest on {where}: " + (f"failed: {failed}" if failed else "ok")])


def environment() -> dict[str, Any]:
    """Versions and topology, without names of hosts, users or folders."""
    import torch

    packages = ("torchweft", "torch", "triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12", *HOSTS)
    devices = [
        {
            "name": torch.cuda.get_device_name(number),
            "memory_bytes": torch.cuda.get_device_properties(number).total_memory,
            "multiprocessors": torch.cuda.get_device_properties(number).multi_processor_count,
            "peers": [
                other
                for other in range(torch.cuda.device_count())
                if other != number and torch.cuda.can_device_access_peer(number, other)
            ],
        }
        for number in range(torch.cuda.device_count())
    ]
    settings = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_P2P_DISABLE", "OMP_NUM_THREADS")
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
        "packages": {name: found for name in packages if (found := _version(name))},
        "devices": devices,
        "settings": {name: os.environ[name] for name in settings if name in os.environ},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
