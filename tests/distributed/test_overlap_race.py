"""The overlap bench on two ranks, tiny and over plain loopback: all run, and all are equal."""

from __future__ import annotations

import pytest

from torchweft_tools.bench import overlap
from torchweft_tools.bench.players.overlap_rows import MAX_DIFF, row

NAMES = (
    *(
        "sequential",
        "sequential_again",
        "compute",
        "comm",
        "by_hand_2",
        "by_hand_8",
        "domino",
        "by_hand_onednn_2",
    ),
    *("weft_1", "weft_2", "weft_onednn_2", "control"),
)


@pytest.mark.parametrize(("model", "phase"), [("dense", "prefill"), ("experts", "decode")])
def test_every_candidate_runs_and_gives_the_same(model, phase):
    case = {"model": model, "phase": phase}
    counts = {"num_pairs": 2, "num_rounds": 1, "links": ["none"]}
    spec = {**case, **counts, "seed": 0, "size": "tiny", "names": NAMES}
    [(label, result)] = overlap.compete(spec)
    assert label == "loopback (unlimited)"
    compared = {"by_hand_2", "by_hand_8", "weft_1", "weft_2", "control"}
    assert compared <= set(result["diffs"])
    assert max(result["diffs"].values()) <= MAX_DIFF * result["scale"]
    assert set(result["absent"]) <= {"domino"}
    assert result["fallbacks"] == {}
    assert result["late_compiles"] == 0, "a program compiled in the race"
    assert result["parts"]["control"] == 4
    found = row({**case, "link": label}, result)
    assert found["num_pairs"] == 2
    assert found["weft"] in ("weft_1", "weft_2", "weft_onednn_2")
    assert found["copied_bytes"] >= 0
