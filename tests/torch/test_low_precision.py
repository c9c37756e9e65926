"""The contract for low precision: a split differs from stock no more than stock from itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.run.compare import compare


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6)))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def model_of(dtype):
    torch.manual_seed(0)
    return Deep().eval().to(dtype), torch.randn(24, 96).to(dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_split_is_held_to_what_stock_differs_from_itself(dtype):
    model, x = model_of(dtype)
    verdict = weft.check(model, x, strategy=weft.overlap(parts=3))
    assert verdict and verdict.own_diff is not None
    halves = torch.cat([model(x[:12]), model(x[12:])])
    assert verdict.own_diff >= float((halves - model(x)).abs().max())
    assert "differs from itself" in str(verdict)


@torch.no_grad()
def test_an_error_within_the_tolerance_for_the_type_is_seen():
    model, x = model_of(torch.bfloat16)
    whole = model(x)
    wrong = whole + 0.01 * whole.abs().max()
    own_diff = weft.check(model, x, strategy=weft.overlap(parts=2)).own_diff
    assert compare(whole, wrong), "one per cent of the largest number is within two"
    assert not compare(whole, wrong, own={0: own_diff})


@torch.no_grad()
def test_float32_and_models_that_draw_numbers_have_no_such_measure():
    model, x = model_of(torch.float32)
    assert weft.check(model, x, strategy=weft.overlap(parts=2)).own_diff is None
    drawing = nn.Sequential(nn.Linear(96, 96), nn.Dropout(0.5)).train().bfloat16()
    assert weft.check(drawing, x.bfloat16(), strategy="sequential").own_diff is None
