"""The contract of every runtime, for workers: a worker runs its lanes of the plan, waits included.

What applies of `tests/contract.py`: its diamond without the state that ops change in place (cells
make tensors from tensors), each op a module, dealt to three workers at random.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract import ROWS, WIDE
from torch import Tensor, nn

import torchweft as weft
from torchweft.errors import PlanError, RunError
from torchweft.placement import placed
from torchweft.plan.verify import verify
from torchweft.run.workers.program import HOME, write_script

THREE = tuple(weft.Spot(name) for name in ("one", "two", "three"))


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Cosine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos()


class Start(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3 + 1


class Join(nn.Module):
    def forward(self, left: Tensor, right: Tensor, third: Tensor) -> Tensor:
        return left + right * third


class Diamond(nn.Module):
    """x -> a -> (left, right, third) -> joined, several times over."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.left, self.right, self.third = Start(), Sine(), Cosine(), Start()
        self.join = Join()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            a = self.start(x)
            x = self.join(self.left(a), self.right(a), self.third(a))
        return x


def scattered(seed: int) -> Any:
    """A planner that deals ops to devices at random: many copies and waits."""

    def planner(problem: Any, *, deadline_s: float | None, seed: int = seed) -> Any:
        rng = random.Random(planner.seed)  # type: ignore[attr-defined]
        devices = [rng.choice(allowed) for allowed in problem.allowed]
        return placed(problem, devices, range(problem.num_ops))

    planner.seed = seed  # type: ignore[attr-defined]
    return planner


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    with torch.no_grad(), weft.dynamic(Diamond(), workers=THREE, watchdog_s=60.0) as dynamic:
        yield dynamic


@pytest.fixture
def given() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(ROWS, WIDE, generator=generator))


@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_the_bits_of_one_device(workers: Any, given: list[Tensor], seed: int) -> None:
    with torch.no_grad():
        wanted = weft.dynamic(Diamond()).map(given)
        workers.placer.planner = scattered(seed)
        for slowness in (1.0, 5.0):  # with other delays in every lane: the same bits
            for name, mate in workers.pool.mates.items():
                slow = slowness if name != "two" else 1.0
                mate.send({"kind": "throttle", "slowness": slow})
            found = workers.map(given)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_runs_is_the_verified_plan(workers: Any, given: list[Tensor]) -> None:
    workers.placer.planner = scattered(7)
    with torch.no_grad():
        workers.map(given)
    plan, trace = verify(workers.plan()), workers.trace()
    on = {step.names[0]: step.lane for step in plan.steps if step.kind == "run"}
    for device in ("one", "two", "three"):
        mine = [step.label for step in plan.steps if step.kind == "run" and step.lane == device]
        ran = [span.label for span in trace.spans if span.kind == "run" and span.lane == device]
        assert ran == mine, "in the order of the lane"
    copies = [(step.lane, step.label) for step in plan.steps if step.kind == "copy"]
    sent = [(span.lane, span.label) for span in trace.spans if span.kind == "copy"]
    assert set(sent) == {each for each in copies if not each[0].startswith(f"{HOME}.")}
    ends = {span.label: span.end_s for span in trace.spans}
    starts = {span.label: span.start_s for span in trace.spans if span.kind == "run"}
    waiting: dict[str, list[str]] = {}
    for step in plan.steps:
        if step.kind == "wait":
            waiting.setdefault(step.lane, []).append(step.target or "")
        elif step.kind == "run" and step.label in starts:
            assert on[step.names[0]] == step.lane
            for label in waiting.pop(step.lane, []):
                if label in ends:  # not of inputs, which come with the call
                    assert ends[label] <= starts[step.label], f"{step.label} waits for {label}"


def test_lanes_of_a_device_are_those_of_the_plan(workers: Any, given: list[Tensor]) -> None:
    workers.placer.planner = scattered(3)
    with torch.no_grad():
        workers.map(given)
    plan = workers.plan()
    script = write_script(plan, workers.job.script.drawing)
    parts, inputs = script.parts, script.inputs
    assert set(inputs) <= set(parts) <= {"one", "two", "three"}
    for device, part in parts.items():
        mine = [step for step in plan.steps if plan.lane[step.lane].device == device]
        assert list(part.lanes.steps) == mine
        waits = {step.target for step in mine if step.kind == "wait" and step.lane == device}
        needs = {f"copy {value} to {device}" for task in part.tasks for value in task.needs}
        assert needs == {label for label in waits if label.startswith("copy ")}


def test_a_plan_without_the_waits_of_a_lane_is_refused(workers: Any, given: list[Tensor]) -> None:
    workers.placer.planner = scattered(1)
    with torch.no_grad():
        workers.map(given)
    plan = workers.plan()
    for lane in {step.lane for step in plan.steps if step.kind == "wait"}:
        steps = tuple(s for s in plan.steps if s.kind != "wait" or s.lane != lane)
        with pytest.raises(PlanError, match="race"):
            verify(replace(plan, steps=steps))


class Bad(nn.Module):
    """Looks a row up that is not there, which nobody knows before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.table = Start(), nn.Embedding(2, WIDE)

    def forward(self, word: Tensor) -> Tensor:
        return self.start(self.table(word))


def test_a_failure_in_one_lane_is_raised_once_with_its_story() -> None:
    with torch.no_grad(), weft.dynamic(Bad(), workers=THREE[:2], watchdog_s=60.0) as dynamic:
        dynamic.placer.planner = scattered(0)
        with pytest.raises(RunError, match="failed") as caught:
            dynamic(torch.tensor([7]))
        assert "index" in str(caught.value.story) and caught.value.lane in ("one", "two")
        assert dynamic(torch.tensor([1])).shape == (1, WIDE), "nothing hangs, others go on"
