"""Systems other than Linux, where torch is needed: workers and ranks."""

from __future__ import annotations

import os
import sys

import pytest

import torchweft as weft
from torchweft.run.workers.pool import Spot, WorkerPool
from torchweft_tools.bench.players import overlap_rank


def test_cores_of_a_worker_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert Spot("anywhere").cores == ()
    with pytest.raises(weft.MachineError, match="cores= of 'pinned' needs Linux; leave it out"):
        Spot("pinned", cores=(0,))


def test_there_are_no_workers_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(weft.MachineError, match="leave workers= out"):
        WorkerPool([Spot("one")])


def test_ranks_of_a_bench_are_pinned_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    overlap_rank.pin(0)
