"""The messages of a placed call: which were waited for, by whom, and how long."""

from __future__ import annotations

import torch

from torchweft.run.driver.executor import waited_copies
from torchweft.run.workers.cell import Spec
from torchweft.run.workers.program import Task
from torchweft_tools.bench.players.dynamic_placed import Runs

ROW = Spec((2,), torch.float32)  # 8 bytes
BLOCKS = dict.fromkeys(("c", "h", "x", "y"), (ROW, 0, 1))


def a_task(*needs: str) -> Task:
    return Task("group", None, needs=list(needs))  # type: ignore[arg-type]


def test_values_of_one_message_count_once_and_only_if_waited_for() -> None:
    spans = [
        ("copy c to slow", "fast.to.slow", "slow", 1.0, 2.0),
        ("copy h to slow", "fast.to.slow", "slow", 1.0, 2.1),
        ("copy x to slow", "fast.to.slow", "slow", 3.0, 3.5),
        ("copy y to home", "slow.to.home", "slow", 6.0, 6.4),
        ("group", "slow", "slow", 2.2, 4.0),
        ("group", "slow", "slow", 4.0, 6.0),
    ]
    tasks = {"slow": [a_task("c", "h", "input"), a_task("x")]}
    found = waited_copies(spans, BLOCKS, tasks)
    assert set(found) == {("fast", "slow"), ("slow", "home")}
    ((num_bytes, seconds),) = found["fast", "slow"]  # x was there before the device was free
    assert (num_bytes, round(seconds, 6)) == (16, 1.2)
    ((num_bytes, seconds),) = found["slow", "home"]
    assert (num_bytes, round(seconds, 6)) == (8, 0.4)


def test_what_a_group_sends_is_one_message_a_device() -> None:
    sends = [("c", "slow"), ("y", "home"), ("h", "slow")]
    task = Task("group", None, sends=sends)  # type: ignore[arg-type]
    assert task.messages() == {"slow": ["c", "h"], "home": ["y"]}


def test_the_error_of_a_simulation_is_told_apart_from_noise() -> None:
    runs = Runs(lambda given: [], None)  # type: ignore[arg-type]
    runs.simulated_s, runs.call_s = [1.1, 2.2], [1.0]
    runs.measured_s = [[0.5, 1.0, 1.5], [1.0, 2.0, 3.0]]
    row = runs.row()
    assert round(row["simulator_error"], 6) == 0.1, "against the median of the runs"
    assert row["noise"] == 0.5
    assert row["error_of_one_run"] > 0.2
