"""A few models of the zoo; `torchweft bench zoo` runs them all."""

from __future__ import annotations

import pytest

from torchweft.errors import WeftError
from torchweft_tools.bench import zoo


@pytest.mark.parametrize(("name", "library"), [("llama", "transformers"), ("unet", "diffusers")])
def test_a_model_is_captured_split_and_equal(name, library):
    pytest.importorskip(library)
    rows, summary = zoo.run(models=name)
    assert rows[0]["error"] == ""
    assert summary["captured"] == summary["sequential_equal"] == summary["split_equal"] == 1
    assert rows[0]["split_share"] is not None  # of time; how much of it depends on the machine
    most = max(1, 0.2 * rows[0]["num_ops"])  # a unet is two ops, of which its last one is whole
    assert len(rows[0]["whole_ops"]) <= most < rows[0]["num_ops"], rows[0]["whole_ops"]
    assert rows[0]["unsafe"] == []
    assert rows[0]["plans"] >= 20


def test_an_unknown_model_lists_the_choices():
    with pytest.raises(WeftError, match="llama"):
        zoo.run(models="lama")
