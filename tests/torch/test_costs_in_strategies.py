"""Strategies that ask what ops cost, in one process: formulas, then traces; or a file."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import MachineError
from torchweft.plan.machine import Costs, cpu
from torchweft_tools.profile import Profile, save_profile

SLEEPS = {"s": 0.0}


@torch.library.custom_op("own_costs::work", mutates_args=())
def work(x: Tensor) -> Tensor:
    time.sleep(SLEEPS["s"])
    return x * 2


work.register_fake(torch.empty_like)
RULES = [weft.mark_op("work", "work", uses="compute", rows="row-wise")]


class Works(nn.Module):
    def forward(self, x):
        return torch.ops.own_costs.work(x) + 1


def by_cost(s):
    if s.cost("work") < 0.05:
        s.sequential("it is quick")
    else:
        weft.overlap(s, parts=2)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def test_what_calls_show_decides_and_then_calls_are_steady():
    model, x = weft.compile(Works(), by_cost, rules=RULES, fallback="error"), torch.ones(8, 4)
    SLEEPS["s"], numbers = 0.1, []
    for _ in range(12):
        torch.testing.assert_close(model(x), x * 3)
        numbers.append(weft.plans(model)[-1].num_parts)
    (piece,) = session_of(model).pieces
    assert numbers == [1, 1, *[2] * 10]
    assert piece._ready and piece.plans.strategy_runs <= 3
    assert "costs: measured, after " in "\n".join(weft.plans(model)[0].history)


def test_a_strategy_that_does_not_ask_is_run_once():
    model, x = weft.compile(Works(), "sequential", rules=RULES), torch.ones(8, 4)
    for _ in range(12):
        model(x)
    (piece,) = session_of(model).pieces
    assert piece.plans.strategy_runs == 1
    assert not any("costs" in note for note in weft.plans(model)[0].history)


def test_a_file_gives_its_machine_too_and_a_broken_one_is_refused_at_once(tmp_path):
    path = tmp_path / "costs.json"
    machine = cpu(2, flops_per_s=1.0)
    save_profile(Profile(Costs(machine), "a test"), path)
    model = weft.compile(Works(), by_cost, rules=RULES, costs=path, fallback="error")
    assert session_of(model).options.resolved_machine == machine
    model(torch.ones(8, 4))
    path.write_text("{}")
    with pytest.raises(MachineError, match="not what `torchweft profile` writes"):
        weft.compile(Works(), by_cost, rules=RULES, costs=path)
    with pytest.raises(MachineError, match="there is no cost file"):
        weft.compile(Works(), by_cost, rules=RULES, costs=tmp_path / "other.json")
