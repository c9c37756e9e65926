"""A border with slack in a compiled model: calls that waver around it keep the plan in use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchweft as weft
from torchweft.api import session_of


def large_calls_in_parts(s):
    if s.has_tokens(100, slack=0.2):
        return weft.overlap(s)
    return s.sequential()


@pytest.fixture
def model():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    rules = [weft.mark_module(nn.ReLU, "middle")]
    return weft.compile(plain, large_calls_in_parts, rules=rules, fallback="error")


def parts_of(model, rows: int) -> int:
    """In how many parts a call ran."""
    x = torch.randn(rows, 8)
    entries = {id(e): e for p in session_of(model).pieces for e in p.plans.entries}
    before = {key: entry.num_calls for key, entry in entries.items()}
    with torch.no_grad():
        torch.testing.assert_close(model(x), nn.Sequential.forward(model, x))
    entries = {id(e): e for p in session_of(model).pieces for e in p.plans.entries}
    (used,) = [e for key, e in entries.items() if e.num_calls > before.get(key, 0)]
    return used.plan.num_parts


CALLS = [(120, 2), (90, 2), (70, 1), (90, 1), (99, 1), (100, 2), (99, 2), (81, 2), (79, 1), (85, 1)]


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_plan_in_use_serves_on_within_the_slack(model, rounds):
    for number in range(rounds):
        for rows, parts in CALLS:
            for again in range(2):  # the second call of these sizes takes the short way
                assert parts_of(model, rows) == parts, (number, rows, again)
    assert len(weft.plans(model)) == 2, "wavering makes no plans"


def test_a_first_call_within_the_slack_is_below_the_border(model):
    assert [parts_of(model, rows) for rows in (90, 90, 110, 90)] == [1, 1, 2, 2]
