"""Kernels of a strategy: what they give back is held against the graph, and by `check` the ops."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import RunError
from torchweft.ranks.speakers import stable_name

WIDE = 6


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Marked(nn.Module):
    """Two marked ops; the second makes two values, one of which changes its dtype."""

    def forward(self, x):
        with weft.mark("first"):
            y = x * 2
        with weft.mark("second"):
            low, high = y - 1, (y + 1).double()
        return low, high


def strategy_of(parts=2, **kernels):
    """Kernels by the marks of their ops."""

    def replaced(s):
        if parts > 1:
            s.split(parts)
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part, replace=kernels.get(op.mark))
        s.merge()

    return replaced


def first(x):
    return (x * 2,)


def second(y):
    return y - 1, (y + 1).double()


def test_right_kernels_are_called_and_looked_at_once_a_shape(monkeypatch):
    model = weft.compile(Marked(), strategy_of(first=first, second=second), fallback="error")
    for rows in (8, 6, 8, 8):
        x = torch.randn(rows, WIDE)
        for a, b in zip(model(x), second(x * 2), strict=True):
            assert torch.equal(a, b)
    monkeypatch.setattr("torchweft.run.program._shown", None)
    assert weft.check(Marked(), torch.randn(8, WIDE), strategy=strategy_of(first=first))


WRONG = {
    "a bare tensor": ({"first": lambda x: x * 2}, "gave float32[", "a tuple of 1"),
    "nothing": ({"first": lambda x: None}, "gave NoneType", "a tuple of 1"),
    "too few": ({"second": lambda y: (y - 1,)}, "gave 1 values", "expected 2"),
    "too many": ({"first": lambda x: (x, x)}, "gave 2 values", "expected 1"),
    "a wrong shape": ({"first": lambda x: (x[:, :1] * 2,)}, "gave float32[", ", 6]"),
    "one row": ({"first": lambda x: ((x * 2)[0],)}, "gave float32[6]", "expected float32["),
    "a wrong dtype": ({"second": lambda y: (y - 1, y + 1)}, "gave float32[", "expected float64["),
    "no tensor": ({"first": lambda x: (2.0,)}, "gave float '2.0'", "expected float32["),
    "another device": (
        {"first": lambda x: ((x * 2).to("meta"),)}, "gave a tensor on meta", "one on cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_is_told_with_kernel_strategy_and_op(name, rows):
    kernels, came, expected = WRONG[name]
    model = weft.compile(Marked(), strategy_of(1 if rows == 1 else 2, **kernels))
    with pytest.raises(RunError) as told:
        model(torch.randn(rows, WIDE))
    text = str(told.value)
    assert told.value.rule == "kernel", text
    for word in ("kernel '", "of strategy replaced", next(iter(kernels)), came, expected):
        assert word in text, text


def test_check_compares_a_kernel_with_the_ops_it_replaces():
    """Also where nothing of it is seen in the outputs."""

    class Hidden(nn.Module):
        def forward(self, x):
            with weft.mark("first"):
                y = x * 2
            return torch.zeros_like(y) * y + x

    def near(x):
        return (x * 2 + 0.5,)

    x = torch.randn(8, WIDE)
    verdict = weft.check(Hidden(), x, strategy=strategy_of(first=near))
    assert not verdict and "kernel 'near' in place of first" in str(verdict), verdict
    assert weft.check(Hidden(), x, strategy=strategy_of(first=first))


def test_check_sees_what_a_kernel_changes_in_place():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(8, WIDE))

        def forward(self, x):
            with weft.mark("first"):
                self.kept.copy_(x)
                return x * 2

    def forgets(*reads):
        return (reads[-1] * 2,) if reads[-1].any() else (reads[0] * 2,)

    model, x = Cache(), torch.randn(8, WIDE)
    verdict = weft.check(model, x, strategy=strategy_of(1, first=forgets))
    assert not verdict, verdict


class Callable_:
    def __call__(self, x):
        return (x,)

    def method(self, x):
        return (x,)


def test_a_kernel_is_called_the_same_in_every_process_and_unlike_the_others():
    lambdas = [lambda x: (x,), lambda x: (x + 1,)]
    again = [lambda x: (x,)]
    things = [
        first, second, *lambdas, *again, Callable_(), Callable_().method, Callable_, torch.relu,
        torch.ops.aten.relu.default, torch.ops.aten.relu, nn.ReLU(),
    ]  # fmt: skip
    names = [stable_name(thing) for thing in things]
    assert len(set(names)) == len(names), names
    assert not any("0x" in name or " at " in name for name in names), names
    assert stable_name(functools.partial(first, rank=1)) == stable_name(first)
    assert stable_name(Callable_()) == stable_name(Callable_())
    assert stable_name(Callable_().method) == stable_name(Callable_().method)


def test_a_model_that_is_compiled_again_stays_the_same_to_other_ranks():
    model = weft.compile(Marked(), "sequential")
    speaker = session_of(model).speaker
    assert session_of(weft.compile(model, "overlap")).speaker is speaker
    assert session_of(weft.compile(model, "sequential", capture="boundary")).speaker is speaker
    assert session_of(weft.compile(Marked(), "sequential")).speaker is not speaker
