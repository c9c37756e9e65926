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
from torchweft.machine import accelerator
from torchweft.runtimes.accelerator import Accelerator, Runtime, device_of, runtime_of
from torchweft.runtimes.graphs import Graphs

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

    def lift(inputs, *, graphs, fall_back):
        assert any(isinstance(item, torch.Tensor) for item in inputs)
        runtimes.append(Lifted(device, fall_back, graphs))
        return runtimes[-1]

    monkeypatch.setattr("torchweft.piece.runtime_of", lift)
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
        assert torch.equal(weft.compile(model, graphs=True)(x), wanted)
    ((reason, count),) = weft.report(model).fallbacks
    assert (reason, count) == ("graphs: the inputs live on no accelerator", 1)
    with pytest.raises(StrategyError, match="no accelerator"), torch.no_grad():
        weft.compile(nn.Linear(4, 4), graphs=True, fallback="error")(x)
    torch._dynamo.reset()


@pytest.mark.skipif(HARDWARE, reason="there is an accelerator here")
def test_without_an_accelerator_nothing_changes():
    assert device_of([torch.zeros(2)]) is None
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
