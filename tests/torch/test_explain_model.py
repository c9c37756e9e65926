"""`weft.explain` on one rank: io beside compute, branches, a strategy that never engages."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchweft as weft
from torchweft.errors import WeftError


@torch.library.custom_op("explain_test::read_rows", mutates_args=())
def read_rows(ids: Tensor) -> Tensor:
    time.sleep(0.02)
    return torch.ones(len(ids), 64)


read_rows.register_fake(lambda ids: torch.empty(len(ids), 64))


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.head(self.tower(x) + read_rows(ids))


READS = weft.mark_op("read_rows", "read_rows", uses="io")


@torch.no_grad()
def test_a_read_that_is_longer_than_the_compute_beside_it_owns_the_time() -> None:
    model, x, ids = Ranker().eval(), torch.randn(8, 64), torch.arange(8)
    weft.compile(model, "branches", rules=[READS])
    found = weft.explain(model, x, ids)
    assert next(iter(found.owners)) == "io"
    assert found.all.network_s == 0 and found.all.idle_s > 0.01
    assert not found.never
    text = str(found)
    assert "io       planned ╟" in text and "         actual  ╟" in text
    assert found.simulated_s == pytest.approx(found.all.step_s, rel=0.5)
    weft.restore(model)


@torch.no_grad()
def test_parts_that_were_asked_for_and_never_made_are_said_first() -> None:
    """One row cannot be cut, so the call falls back."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(1, 8)
    weft.compile(model, weft.overlap(parts=2))
    found = weft.explain(model, x)
    assert str(found).startswith("NEVER ENGAGED: calls in parts, which strategy overlap(parts=2")
    assert any(note.startswith("fallback") for note in found.notes)
    weft.restore(model)


@torch.no_grad()
def test_the_context_of_the_call_is_that_of_its_plan() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()
    weft.compile(model, weft.overlap(parts=2))
    for rows in (16, 20, 16):
        found = weft.explain(model, torch.randn(rows, 8))
        assert [item.change for item in found.what_if] == [
            "twice the compute",
            "overlap in 4 parts",
            "overlap in 8 parts",
        ]
        assert not found.never
    weft.restore(model)


def test_a_model_that_was_not_compiled_cannot_be_explained() -> None:
    with pytest.raises(WeftError, match="was not compiled"):
        weft.explain(nn.Linear(2, 2), torch.randn(1, 2))
