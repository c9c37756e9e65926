"""Kernels of a strategy: what they give back is held against the graph, and by `check` the ops."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of
from torchweft.errors import RunError, WeftError
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
    monkeypatch.setattr("torchweft.run.kernels._shown", None)
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


# What a kernel reads and writes.


def counted(bad, good, *, late=0):
    """A kernel that does a bad thing in one of its calls, and what it is to do in the others."""
    calls = []

    def kernel(*reads):
        calls.append(1)
        return (bad if len(calls) > late else good)(*reads)

    return kernel


def writes(x):
    y = x * 2
    x.add_(1)
    return (y,)


def by_pointer(x):
    y = x * 2
    x.numpy()[:] = 0
    return (y,)


@pytest.mark.parametrize("late", [0, 5])
def test_a_write_that_is_not_declared_is_refused_in_every_call(late):
    model = weft.compile(Marked(), strategy_of(first=counted(writes, first, late=late)))
    x = torch.randn(8, WIDE)
    for _ in range(late // 2):
        model(x)
    with pytest.raises(RunError, match=r"wrote 'l_x_', which it only reads.*writes=\['l_x_'\]"):
        model(x.clone())
        model(x.clone())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bad", [writes, by_pointer])
def test_what_no_counter_shows_is_seen_in_the_first_call(mode, bad):
    model = weft.compile(Marked(), strategy_of(first=bad))
    with mode(), pytest.raises(RunError, match="wrote 'l_x_'"):
        model(torch.randn(8, WIDE))


def test_numbers_that_are_not_numbers_stay_what_they_are():
    x = torch.full((8, WIDE), float("nan"))
    model = weft.compile(Marked(), strategy_of(first=first), fallback="error")
    assert model(x)[0].isnan().all()


def test_what_is_declared_may_be_used_up():
    def low_high(y):
        high = (y + 1).double()
        return y.sub_(1), high

    spent = weft.kernel(low_high, writes=["y"])
    x = torch.randn(8, WIDE)
    for parts in (1, 2):
        model = weft.compile(Marked(), strategy_of(parts, second=spent), fallback="error")
        for _ in range(3):
            for got, wanted in zip(model(x), second(x * 2), strict=True):
                assert torch.equal(got, wanted)
        with pytest.raises(RunError, match="wrote 'y'"):
            weft.compile(Marked(), strategy_of(parts, second=low_high))(x)


def test_a_result_does_not_share_bytes_with_what_is_read():
    model = weft.compile(Marked(), strategy_of(second=lambda y: (y.sub(0).view_as(y), y.double())))
    model(torch.randn(8, WIDE))
    model = weft.compile(Marked(), strategy_of(first=lambda x: (x.view_as(x),)))
    with pytest.raises(RunError, match="gave for 'y' the bytes of 'l_x_', which it reads"):
        model(torch.randn(8, WIDE))


class Scaled(nn.Module):
    """Two weights, of which the first op reads one."""

    def __init__(self):
        super().__init__()
        self.near = nn.Parameter(torch.randn(WIDE))
        self.far = nn.Parameter(torch.randn(WIDE))

    def forward(self, x):
        with weft.mark("first"):
            y = x * self.near
        return y * self.far


def test_a_kernel_is_given_what_it_asks_for_in_its_order():
    seen = []

    def scaled(far, x, near):
        seen.append((far, near))
        return (x * near,)

    model = Scaled()
    kernel = weft.kernel(scaled, reads=["*far*", "l_x_", "*near*"])
    x = torch.randn(8, WIDE)
    wanted = model(x)
    assert torch.equal(weft.compile(model, strategy_of(first=kernel), fallback="error")(x), wanted)
    assert all(far is model.far and near is model.near for far, near in seen) and seen
    assert weft.check(Scaled(), x, strategy=strategy_of(first=kernel))


# Kernels that raise, and kernels by name.


def test_a_kernel_that_raises_is_an_error_of_ours_with_the_lanes_story():
    def broken(x):
        raise ValueError("no such tile")

    model = weft.compile(Marked(), strategy_of(first=broken))
    with pytest.raises(RunError) as told:
        model(torch.randn(8, WIDE))
    text = str(told.value)
    assert (told.value.rule, told.value.lane) == ("kernel", "compute")
    assert told.value.step is not None
    assert "kernel 'broken' of strategy replaced" in text and "lane 'compute' stood at" in text
    assert "in place of first[0] raised ValueError: no such tile" in text


def test_a_strategy_names_a_kernel_that_is_given_to_compile():
    def named(s):
        while ready := s.ready():
            for op, part in ready:
                s.run(op, part, replace="fast" if op.mark == "first" else None)

    x = torch.randn(8, WIDE)
    model = weft.compile(Marked(), named, kernels={"fast": first}, fallback="error")
    assert torch.equal(model(x)[0], x * 2 - 1)
    plan = weft.plans(model)[0]
    assert plan.kernels["fast"].function is first
    bare = weft.compile(Marked(), named, fallback="error")
    with pytest.raises(WeftError, match=r"'by fast'. Give it by its name: kernels={'fast'"):
        bare(x)
    with pytest.raises(WeftError, match="kernels must be functions by name"):
        weft.compile(Marked(), named, kernels=[first])


def test_boundary_mode_takes_no_kernels():
    model = weft.compile(
        Marked(), strategy_of(1, first=first), capture="boundary", fallback="error"
    )
    x = torch.randn(8, WIDE)
    with pytest.raises(WeftError, match=r"boundary: first is by kernel 'first'"):
        for _ in range(3):
            model(x)


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
