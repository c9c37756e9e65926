"""`weft.compile(model, plan)`: a plan, or a file of one, is looked at, edited, verified and run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.errors import PlanError, StrategyError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        y = self.up(x)
        with weft.mark("act"):
            y = torch.relu(y)
        return self.down(y) + x


@pytest.fixture
def made():
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(12, 8)
    with torch.no_grad():
        yield model, x, model(x).clone()


def written(model, x, strategy) -> weft.Plan:
    weft.compile(model, strategy, fallback="error")
    model(x)
    (plan,) = weft.plans(model)
    return plan


def runs(model, x, wanted, plan, **options) -> weft.Plan:
    """The plan that a model compiled by a given plan runs by, if it is equal to eager."""
    weft.compile(model, plan, fallback="error", **options)
    for _ in range(3):
        torch.testing.assert_close(model(x), wanted)
    (used,) = weft.plans(model)
    return used


def test_a_plan_and_its_file_run_as_they_stand(made, tmp_path):
    plan = written(*made[:2], weft.overlap(parts=3))
    assert plan.is_lowered
    path = tmp_path / "three.plan"
    plan.save(path)
    for given in (plan, path, str(path), [plan], weft.replay(plan=str(plan))):
        used = runs(*made, given)
        assert (used.steps, used.cut, used.places) == (plan.steps, plan.cut, plan.places)


def test_an_edited_plan_runs_and_an_edit_that_is_unsafe_is_refused(made):
    plan = written(*made[:2], weft.overlap(parts=2))
    frees = [at for at, step in enumerate(plan.steps) if step.kind == "free"]
    kept = replace(plan, steps=tuple(s for at, s in enumerate(plan.steps) if at != frees[0]))
    assert runs(*made, kept).steps == kept.steps
    uneven = weft.Plan.parse(str(plan).replace("parts 1/2 1/2", "parts 1/3 2/3"))
    assert str(runs(*made, uneven).cut) == "1/3 2/3"
    early = replace(plan, steps=(plan.steps[frees[0]], *kept.steps))
    weft.compile(made[0], early, fallback="error")
    with pytest.raises(PlanError, match="free"):
        made[0](made[1])
    weft.compile(made[0], early)
    torch.testing.assert_close(made[0](made[1]), made[2])
    assert weft.report(made[0]).fallbacks, "counted, with the reason"


def test_a_plan_of_another_model_or_a_broken_file_is_refused(made, tmp_path):
    plan = written(*made[:2], "sequential")
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    weft.compile(other, plan, fallback="error")
    with pytest.raises(StrategyError, match="none of these plans was made for graph"):
        other(made[1])
    path = tmp_path / "cut.plan"
    path.write_text(str(plan)[:-5])
    with pytest.raises(PlanError, match="no line 'end'"):
        weft.compile(made[0], path)
    with pytest.raises(PlanError, match=r"nowhere\.plan"):
        weft.compile(made[0], "nowhere.plan")


def test_a_plan_brings_its_kernels(made):
    def act(y):
        return (torch.relu(y),)

    def author(s):
        for op in s.ops:
            s.run(op, replace=weft.kernel(act, name="own") if op.mark == "act" else None)

    plan = written(*made[:2], author)
    assert [each.name for each in plan.declared] == ["own"]
    assert runs(*made, plan).steps == plan.steps
    text = weft.Plan.parse(str(plan))
    weft.compile(made[0], text, fallback="error")
    with pytest.raises(StrategyError, match="Give the function"):
        made[0](made[1])
    runs(*made, text, kernels={"own": weft.kernel(act, name="own")})
