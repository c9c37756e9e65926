"""`weft.compile` on an accelerator: the piece takes the runtime of the device of its inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device import DeviceTensor, TestDevice
from double import torch_like
from torch import nn

import torchweft as weft
from torchweft.errors import StrategyError
from torchweft.plan.machine import accelerator
from torchweft.run.accelerator.accelerator import Accelerator, Runtime, devices_of, runtime_of
from torchweft.run.accelerator.graphs import Graphs

HARDWARE = torch.accelerator.is_available()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        x = self.first(x)
        with weft.mark("left"):
            left = self.left(x).relu()
        with weft.mark("right", graph=False):
            right = self.right(x).sin()
        return left * right


class Lifted(Runtime):
    """The runtime on the test device for a model whose tensors live on the CPU here."""

    def __init__(self, device, fall_back, graphs):
        found = Accelerator(device.device, torch_like(device))
        super().__init__(found, Graphs(found, fall_back) if graphs else None)
        self.owner, self.calls, self.weights = device, 0, {}

    def lifted(self, item):
        if isinstance(item, nn.Parameter):
            return self.weights.setdefault(id(item), self.owner.put(item.detach()))
        return self.owner.put(item) if isinstance(item, torch.Tensor) else item

    def compile(self, plan, bodies, **options):
        lifted = {name: self.lifted_body(body) for name, body in bodies.items()}
        return super().compile(plan, lifted, **options)

    def lifted_body(self, body):
        """The same body with its rooms on the device, where capture would have seen them."""
        if body.into is None:
            return body
        rooms = tuple(replace(room, device=self.owner.device) for room in body.into.rooms)
        return replace(body, into=replace(body.into, rooms=rooms))

    def run(self, program, inputs, bounds, *, numbers=()):
        self.calls += 1
        with self.owner:
            given = [self.lifted(item) for item in inputs]
            found = super().run(program, given, bounds, numbers=numbers)
            return tuple(t.cpu() if isinstance(t, DeviceTensor) else t for t in found)

    def run_traced(self, program, inputs, bounds, *, numbers=()):
        with self.owner:
            given = [self.lifted(item) for item in inputs]
            found, trace = super().run_traced(program, given, bounds, numbers=numbers)
            return tuple(t.cpu() if isinstance(t, DeviceTensor) else t for t in found), trace


@pytest.fixture
def made(monkeypatch):
    """The runtimes that pieces have asked for; they get those of the test device."""
    torch._dynamo.reset()
    device, runtimes = TestDevice(), []

    def lift(inputs, *, graphs, fall_back, constants, saved):
        assert any(isinstance(item, torch.Tensor) for item in inputs)
        runtimes.append(Lifted(device, fall_back, graphs))
        return runtimes[-1]

    monkeypatch.setattr("torchweft.serve.piece.runtime_of", lift)
    yield runtimes
    device.close()
    torch._dynamo.reset()


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("strategy", ["branches", "overlap", "sequential"])
def test_a_compiled_model_runs_on_streams(strategy, graphs, made):
    torch.manual_seed(0)
    model = Branches().eval()
    inputs = [torch.randn(16, 8) for _ in range(6)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        model = weft.compile(model, strategy, machine=accelerator(2), graphs=graphs)
        found = [model(x) for x in inputs]
    torch.testing.assert_close(found, wanted)
    (runtime,) = made
    assert runtime.calls > 2
    if graphs:
        shapes = list(runtime.graphs.shapes.values())
        assert any(len(shape.parts) > 1 for shape in shapes), "'right' is in no graph"
        assert runtime.graphs.num_replays
    assert not weft.report(model).fallbacks


def test_graphs_without_an_accelerator_are_a_counted_fallback():
    torch._dynamo.reset()
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    with torch.no_grad():
        wanted = model(x)
        assert torch.equal(weft.compile(model, "sequential", graphs=True)(x), wanted)
    ((reason, count),) = weft.report(model).fallbacks
    assert (reason, count) == ("graphs: the inputs live on no accelerator", 1)
    with pytest.raises(StrategyError, match="no accelerator"), torch.no_grad():
        weft.compile(nn.Linear(4, 4), "sequential", graphs=True, fallback="error")(x)
    torch._dynamo.reset()


class Mean(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Cached(nn.Module):
    def forward(self, x, cache):
        cache.add_(x.sum())
        return x + cache


class Columns(nn.Module):
    """Rows stand in dim 1 and come out in the middle of dim 0, inside an outer dim of 3."""

    def forward(self, x):
        return (x * 2).reshape(3 * x.shape[1], 8), x.shape[1]


@pytest.mark.parametrize("strategy", ["overlap", "sequential"])
def test_calls_of_many_sizes_are_filled_up_to_the_few_that_are_captured(strategy, made):
    torch.manual_seed(0)
    model = Branches().eval()
    inputs = [torch.randn(rows, 8) for rows in [3, 5, 16, 7, 9, 40, 33, 64, 6, 1, 50, 90, 0] * 3]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        model = weft.compile(model, strategy, machine=accelerator(2), graphs=[64, 8, 16])
        found = [model(x) for x in inputs]
    torch.testing.assert_close(found, wanted)
    assert [y.stride() for y in found] == [y.stride() for y in wanted]
    captured = [shape for runtime in made for shape in runtime.graphs.shapes.values()]
    assert sum(runtime.graphs.num_replays for runtime in made) > len(inputs) // 2
    assert len(captured) < 10, "8, 16, 64 and, uncovered, 90, 1 and 0"
    assert not [reason for reason, _ in weft.report(model).fallbacks if "padded" in reason]


def test_rows_in_another_dim_are_filled_up_and_sizes_are_the_callers_own(made):
    model = Columns()
    with torch.no_grad():
        compiled = weft.compile(Columns(), "sequential", graphs=[8], batch=1)
        for rows in (4, 5, 6, 7, 8, 9, 5):
            x = torch.randn(3, rows, 8)
            found, wanted = compiled(x), model(x)
            assert torch.equal(found[0], wanted[0])
            assert found[1] == wanted[1] == rows
    assert not weft.report(compiled).fallbacks


def test_what_must_not_be_padded_is_not_and_says_why(made):
    x, cache = torch.randn(5, 8), torch.zeros(1)
    with torch.no_grad():
        mean = weft.compile(Mean(), "sequential", graphs=[8])
        torch.testing.assert_close(mean(x), Mean()(x))
        cached = weft.compile(Cached(), "sequential", graphs=[8])
        before = cache.clone()
        torch.testing.assert_close(cached(x, cache), Cached()(x, before))
        told = weft.compile(Branches(), "sequential", graphs=[8])
        with weft.context(tokens_per_request=[2, 3]):
            told(x)
    (reason, _), *_ = weft.report(mean).fallbacks
    assert "not padded" in reason and "mixing" in reason
    (reason, _), *_ = weft.report(cached).fallbacks
    assert "not padded" in reason
    (reason, _), *_ = weft.report(told).fallbacks
    assert "tokens of each request" in reason


@pytest.mark.parametrize("sizes", [[], [0], [4, -1], ["4"], "48", [True], 4, None, [1] * 65])
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(weft.WeftError, match=r"graphs must be True, False or 1 to 64 sizes"):
        weft.compile(nn.Linear(4, 4), "sequential", graphs=sizes)


@pytest.mark.skipif(HARDWARE, reason="there is an accelerator here")
def test_without_an_accelerator_nothing_changes():
    assert not devices_of([torch.zeros(2)])
    assert runtime_of([torch.zeros(2), 3], graphs=True, fall_back=print) is None


@pytest.mark.skipif(not HARDWARE, reason="needs an accelerator")
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("strategy", ["branches", "overlap", "sequential"])
def test_on_real_hardware(strategy, graphs):
    torch._dynamo.reset()
    torch.manual_seed(0)
    where = torch.accelerator.current_accelerator()
    model = Branches().eval().to(where)
    inputs = [torch.randn(64, 8, device=where) for _ in range(6)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        model = weft.compile(model, strategy, machine=accelerator(2), graphs=graphs)
        found = [model(x) for x in inputs]
    torch.testing.assert_close(found, wanted)
