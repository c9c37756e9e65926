"""Failures of ours on two gloo ranks: all fall back together, or all hear of it; nobody hangs."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_once
from torch.distributed import _functional_collectives as funcol

import torchweft as weft
from torchweft.serve import piece as piece_module
from torchweft.serve import session as session_module

STAGES = {
    "capture": (session_module, "capture"),
    "bodies": (piece_module, "compile_bodies"),
    "lower": (piece_module, "lower"),
}
WATCHDOG_S = 20


class Shard(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 8), torch.nn.Linear(8, 16)

    def forward(self, x):
        part = self.down(torch.relu(self.up(x)))
        return x + funcol.all_reduce(part, "sum", dist.group.WORLD)


def check_all(rank, stage):
    """All ranks fail: all run their own graphs, and the sums are right."""
    model, x = Shard().eval(), torch.randn(8, 16)
    wanted = model(x)
    with mock.patch.object(*STAGES[stage], side_effect=KeyError("dim0")):
        weft.compile(model, weft.overlap(parts=2), watchdog_s=WATCHDOG_S)
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted)
    ((reason, count),) = weft.report(model).fallbacks
    assert "KeyError: 'dim0'" in reason and count == 3
    check_well()


def check_one(rank, stage, fallback):
    """One rank fails alone: both raise before anything is started, and can go on."""
    model, x = Shard().eval(), torch.randn(8, 16)
    weft.compile(model, weft.overlap(parts=2), fallback=fallback, watchdog_s=WATCHDOG_S)
    broken = mock.patch.object(*STAGES[stage], side_effect=KeyError("dim0"))
    with broken if rank else contextlib.nullcontext():
        for _ in range(2):
            match = "KeyError" if rank and fallback == "error" else "do not plan the same"
            with pytest.raises(weft.WeftError, match=match) as caught:
                model(x)
            if not rank:
                told = "cannot do it" if fallback == "error" else "runs the model as it is"
                assert told in str(caught.value)
    check_well()


def check_memory(rank, limited, fallback="sequential"):
    """No plan fits the memory of these ranks: all run as they are, or one alone is noticed."""
    model, x = Shard().eval(), torch.randn(8, 16)
    wanted = model(x)
    machine = weft.cpu(memory_bytes=1) if rank in limited else weft.cpu()
    kept = {"machine": machine, "fallback": fallback, "watchdog_s": WATCHDOG_S}
    weft.compile(model, weft.overlap(parts=2), **kept)
    for _ in range(3):
        if len(limited) == 2:
            torch.testing.assert_close(model(x), wanted)
            continue
        own = rank in limited and fallback == "error"
        match = "more than its memory_bytes" if own else "do not plan the same"
        with pytest.raises(weft.WeftError, match=match):
            model(x)
    if len(limited) == 2:
        assert all("memory_bytes" in reason for reason, _ in weft.report(model).fallbacks)
    check_well()


def check_well():
    model, x = Shard().eval(), torch.randn(8, 16)
    wanted = model(x)
    weft.compile(model, weft.overlap(parts=2), fallback="error", watchdog_s=WATCHDOG_S)
    torch.testing.assert_close(model(x), wanted)


CASES = {f"all {stage}": functools.partial(check_all, stage=stage) for stage in STAGES} | {
    f"one {stage} {fallback}": functools.partial(check_one, stage=stage, fallback=fallback)
    for stage in STAGES
    for fallback in ("sequential", "error")
}
CASES |= {
    "all memory": functools.partial(check_memory, limited=(0, 1)),
    "one memory": functools.partial(check_memory, limited=(1,)),
    "one memory error": functools.partial(check_memory, limited=(1,), fallback="error"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_once(tmp_path_factory, __name__, lambda folder: CASES)


@pytest.mark.parametrize("name", CASES)
def test_case(results, name):
    assert results[name] == "", results[name]
