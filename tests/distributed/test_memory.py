"""The memory bench on two ranks: parts copy nothing and hold no more than eager."""

from __future__ import annotations

from torchweft_tools.bench import memory


def test_models_on_two_ranks_copy_nothing_in_parts() -> None:
    rows, summary = memory.run(models="dense,experts")
    assert [row["error"] for row in rows] == [""] * 4
    assert summary["models"] == 2 and summary["share_zero_copy"] == 1.0
    assert 0 < summary["worst_peak_ratio"] <= 1.05
