"""Roll-out and roll-back at run time: a share of the calls runs by plans, the others as written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.errors import WeftError
from torchweft.ranks.ranks import EVERY, is_among

X = torch.ones(4, 8)


class Model(nn.Module):
    """Notes the calls in which its own Python runs: not those by plans, but for the capture."""

    def __init__(self):
        super().__init__()
        self.linear, self.num_eager = nn.Linear(8, 8), 0

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.num_eager += 1
        return self.linear(x).relu()


def by_plans(model):
    return sum(piece.num_calls for piece in weft.report(model).pieces)


@pytest.mark.parametrize("capture", ["graph", "boundary"])
def test_a_disabled_model_runs_as_it_was_written_until_it_is_enabled(capture):
    model = weft.compile(Model().eval(), "sequential", capture=capture, fallback="error")
    with torch.no_grad():
        wanted = model(X)
        model(X)
        known = by_plans(model)
        weft.disable(model)
        assert all(torch.equal(model(X), wanted) for _ in range(3))
        assert by_plans(model) == known
        assert "3 call(s) ran as they are" in str(weft.report(model))
        weft.enable(model)
        assert torch.equal(model(X), wanted)
        assert by_plans(model) == known + 1


def test_a_share_of_the_calls_is_spread_evenly():
    model = weft.compile(Model().eval(), "sequential")
    with torch.no_grad():
        model(X)
        known = by_plans(model)
        weft.enable(model, share=0.25)
        seen = []
        for _ in range(12):
            model(X)
            seen.append(by_plans(model) - known)
    assert seen == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_a_functions_share():
    function = weft.compile(lambda x: x.sin() + 1, "sequential")
    weft.disable(function)
    assert torch.equal(function(X), X.sin() + 1)
    assert weft.report(function).pieces == ()


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", float("nan")])
def test_a_share_that_cannot_be_is_an_error(share):
    model = weft.compile(Model().eval(), "sequential")
    with pytest.raises(WeftError, match="share must be a number from 0 to 1"):
        weft.enable(model, share=share)
    with pytest.raises(WeftError, match="was not compiled"):
        weft.disable(nn.Linear(2, 2))


@pytest.mark.parametrize("share", [0, 1, 3, 250, 999, EVERY])
def test_of_a_thousand_calls_as_many_are_planned_as_the_share_says(share):
    assert sum(is_among(number, share) for number in range(1, EVERY + 1)) == share
