"""Calls that Dynamo does not compile, past its limits or at all, are counted one by one."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.capture import tracing

LIMIT = 3


@pytest.fixture(autouse=True)
def small(monkeypatch):
    torch._dynamo.reset()  # models of one class share a limit
    monkeypatch.setattr(tracing, "RECOMPILE_LIMIT", LIMIT)


class Modes(nn.Module):
    """Each mode is a string that Dynamo guards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, mode):
        return self.linear(x) if mode != "none" else x


class Broken(Modes):
    """The frame behind the break is the one that is compiled again and again."""

    def forward(self, x, mode):
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y * 2 if mode != "none" else y


@pytest.mark.parametrize("kind", [Modes, Broken])
def test_calls_past_the_recompile_limit_are_counted_one_by_one(kind):
    model, plain, x = kind().eval(), kind().eval(), torch.randn(6, 8)
    plain.load_state_dict(model.state_dict())
    weft.compile(model, weft.overlap(parts=2))
    with torch.no_grad():
        for number in range(LIMIT + 4):
            torch.testing.assert_close(model(x, f"{number}"), plain(x, f"{number}"))
        told = weft.report(model).fallbacks
        for _ in range(2):
            model(x, "0")  # compiled before
    ((reason, count),) = weft.report(model).fallbacks
    assert told == ((reason, count),) and count == 4
    assert reason.startswith("recompile limit: Dynamo has compiled") and "test_limits.py:" in reason
    assert f"{LIMIT} times" in reason and "TORCH_LOGS=recompiles" in reason


@pytest.mark.parametrize("kind", [Modes, Broken])
def test_past_the_limit_fallback_error_raises(kind):
    model, x = kind().eval(), torch.randn(6, 8)
    weft.compile(model, weft.overlap(parts=2), fallback="error")
    with torch.no_grad():
        for number in range(LIMIT):
            model(x, f"{number}")
        for number in range(2):
            with pytest.raises(weft.StrategyError, match="recompile limit"):
                model(x, f"other{number}")
        model(x, "0")


def test_the_limit_of_all_models_of_a_class_is_counted_too():
    with torch._dynamo.config.patch(accumulated_recompile_limit=2), torch.no_grad():
        models = [weft.compile(Modes().eval(), weft.overlap(parts=2)) for _ in range(4)]
        for model in models:
            model(torch.randn(6, 8), "")
    counts = [sum(count for _, count in weft.report(model).fallbacks) for model in models]
    assert counts == [0, 0, 1, 1]


def test_past_the_limit_in_training_and_in_functions():
    weight = torch.randn(8, 8, requires_grad=True)

    def run(x, mode):
        return (x @ weight).sin() if mode != "none" else x

    compiled, x = weft.compile(run, weft.overlap(parts=2)), torch.randn(6, 8)
    for number in range(LIMIT + 2):
        compiled(x, f"{number}").sum().backward()
        mine, weight.grad = weight.grad, None
        run(x, f"{number}").sum().backward()
        torch.testing.assert_close(mine, weight.grad)
        weight.grad = None
    ((reason, count),) = weft.report(compiled).fallbacks
    assert "recompile limit" in reason and count == 2


def test_threads_past_the_limit_are_each_counted():
    model, x = Modes().eval(), torch.randn(6, 8)
    weft.compile(model, weft.overlap(parts=2))
    with torch.no_grad():
        for number in range(LIMIT + 1):
            model(x, f"{number}")

    def work(name):
        with torch.no_grad():
            for number in range(5):
                model(x, f"{name}{number}")

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(count for _, count in weft.report(model).fallbacks) == 11


def test_every_call_in_which_no_graph_ran_is_counted():
    model, x = Modes().eval(), torch.randn(6, 8)
    weft.compile(model, weft.overlap(parts=2))
    with torch.no_grad():
        model(x, "")
        with torch.compiler.set_stance("force_eager"):
            for _ in range(3):
                model(x, "")
        model(x, "")
    assert weft.report(model).fallbacks == (("capture: Dynamo captured no graph of this call", 3),)


def test_under_fallback_error_a_call_in_which_no_graph_ran_raises():
    model, x = Modes().eval(), torch.randn(6, 8)
    weft.compile(model, weft.overlap(parts=2), fallback="error")
    with torch.no_grad():
        model(x, "")
        stance = torch.compiler.set_stance("force_eager")
        with stance, pytest.raises(weft.StrategyError, match="captured no graph"):
            model(x, "")
