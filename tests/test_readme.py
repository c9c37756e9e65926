"""The code of the README and of the guide, as written: it runs, and prints what the page says."""

from __future__ import annotations

import linecache
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path = README) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "num_blocks"), [("README.md", 3), ("docs/write-a-strategy.md", 4)]
)
def test_code_runs_and_prints_what_the_page_shows(
    page: str,
    num_blocks: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A page's own strategy stays out of the registry that other tests list.
    registry = import_module("torchweft.plan.write.strategy")
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    names: dict[str, Any] = {"__name__": "readme"}
    found = blocks(README.parent / page)
    ran = 0
    for number, (language, text) in enumerate(found):
        if language != "python":
            continue
        source = f"{page} block {number}"
        linecache.cache[source] = (len(text), None, text.splitlines(keepends=True), source)
        exec(compile(text, source, "exec"), names)
        printed = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
        after = found[number + 1] if number + 1 < len(found) else ("", "")
        assert after[0] == "text", "each python block is followed by what it prints"
        shown = after[1].rstrip().splitlines()
        for faster in re.findall(r"^measured: ([\d.]+) times", "\n".join(printed), re.MULTILINE):
            lost = page == "README.md" and float(faster) < 1.0
            assert not lost, "what is measured varies, but nothing is lost"
        assert without_times(printed) == without_times(shown)
        ran += 1
    assert ran == num_blocks


def without_times(lines: list[str]) -> list[str]:
    """Measured numbers differ from run to run."""
    return [re.sub(r"^measured: [\d.]+ times", "measured: N times", line) for line in lines]


def test_picture_is_what_the_simulator_draws() -> None:
    readme = README.read_text(encoding="utf-8")
    demo = import_module("torchweft_tools.demo.demo")
    for strategy in (demo.sequential, demo.overlap(parts=2)):
        plan = demo.lower(demo.write(strategy, demo.transformer(2), demo.CONTEXT, demo.MACHINE))
        drawn = demo.simulate(plan, demo.CONTEXT, demo.MACHINE).to_text(96).splitlines()
        assert "\n".join(line.rstrip() for line in drawn[:4]) in readme


def test_number_of_the_readme_is_in_the_table_of_its_bench() -> None:
    """The headline, its interval and its rival stand in one row of the measurements."""
    readme = " ".join(README.read_text(encoding="utf-8").split())
    page = README.parent / "docs" / "measurements" / "overlap.md"
    [row] = re.findall(r"^\| dense prefill \| 1gbit \|.*$", page.read_text(), re.MULTILINE)
    for text in ("1.83 times as fast [1.81, 1.85]", "1.06 times [1.04, 1.09]"):
        assert text in readme
        assert re.sub(r"times (as fast )?", "", text) in row


SERVE = """
import torch
import torch.distributed as dist
from torch import nn
import torchweft as weft

class Half(nn.Module):
    def forward(self, x):
        dist.all_reduce(x)
        return x + 1

dist.init_process_group("gloo")
with torch.no_grad():
    assert weft.compile(Half(), "overlap")(torch.ones(8, 4)).sum() == 96
dist.destroy_process_group()
"""


def test_commands_of_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchweft_tools.cli import app as cli

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(
        "import torch\n\n\ndef build():\n    return torch.nn.Linear(4, 4), torch.randn(8, 4)\n"
    )
    (tmp_path / "serve.py").write_text(SERVE)
    (tmp_path / "trees.txt").write_text("(2 (1 so) (3 good))\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    lines = [line.partition("#")[0] for _, text in blocks() for line in text.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("torchweft ")]
    assert len(commands) >= 6
    for words in commands:
        if words[0] not in ("bench", "selftest"):  # run in tests of their own, shorter
            assert cli.run(words) == 0, words
    capsys.readouterr()


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / link).exists(), link


def test_targets_of_the_readme_are_in_the_makefile() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE):
        assert f"\n{target}:" in makefile
