"""The examples: each runs as it says, in fewer than 80 lines, and shows what it claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
SAYS = {
    "io_overlap.py": "times as fast as eager (median of 11 pairs), bit-equal",
    "own_strategy.py": "by_rows(rows=8, most=4) (simulated)",
    "two_ranks.py": "times as fast as torch.compile (median of 11 pairs)",
}


def test_every_example_is_tested_and_short() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == set(SAYS)
    for name in SAYS:
        assert len((FOLDER / name).read_text().splitlines()) < 80, name


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / name)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
    assert not list(tmp_path.iterdir()), "nothing is left in the folder"
    if name == "own_strategy.py":  # it is the better one of the others at every size
        rows = [line.split() for line in done.stdout.splitlines()[1:5]]
        for _, sequential, _, overlap, _, own, _ in rows:
            assert float(own) == min(float(sequential), float(overlap))
