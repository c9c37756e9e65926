"""Inner compilers: other kernels inside ops, the same results within rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.capture import inner
from torchweft.errors import StrategyError


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=bias), nn.Linear(64, 32, bias=bias)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")  # Inductor's own imports
@pytest.mark.parametrize("name", ["onednn", "inductor"])
@pytest.mark.parametrize("level", ["torch", "aten"])
def test_results_are_those_of_eager(name, level):
    torch.manual_seed(0)
    model = Mlp(bias=False).eval()
    with torch.no_grad():
        for rows in (8, 9, 64):
            x = torch.randn(rows, 32)
            wanted = model.forward(x)
            weft.compile(model, weft.overlap(parts=2), inner=name, level=level)
            torch.testing.assert_close(model(x), wanted)
    assert weft.plans(model)[0].num_parts == 2
    assert weft.report(model).fallbacks == ()


def test_onednn_takes_the_place_of_linear():
    model, x = Mlp(bias=True).eval(), torch.randn(8, 32)
    with torch.no_grad():
        wanted = model(x)
        weft.compile(model, "sequential", inner="onednn")
        torch.testing.assert_close(model(x), wanted)
        with torch.profiler.profile() as profile:
            model(x)
    names = {event.name for event in profile.events()}
    assert "mkldnn::_linear_pointwise" in names
    assert "aten::addmm" not in names


def test_onednn_leaves_alone_what_it_cannot_do():
    x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    assert inner.linear(x, weight).requires_grad
    with torch.no_grad():
        double = inner.linear(x.double(), weight.double())
        assert torch.equal(double, torch.nn.functional.linear(x.double(), weight.double()))
        assert inner.linear(torch.empty(0, 8), weight).shape == (0, 3)


def test_an_unknown_inner_compiler_is_refused():
    with pytest.raises(StrategyError, match="Known: eager, inductor, onednn"):
        weft.compile(Mlp(bias=False), "sequential", inner="tvm")
