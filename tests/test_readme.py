"""The README's code, as written: it runs, and prints what the README says it prints."""

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


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return BLOCK.findall(README.read_text(encoding="utf-8"))


def test_code_runs_and_prints_what_the_readme_shows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The README's own strategy stays out of the registry that other tests list.
    registry = import_module("torchweft.plan.write.strategy")
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    names: dict[str, Any] = {"__name__": "readme"}
    found = blocks()
    ran = 0
    for number, (language, text) in enumerate(found):
        if language != "python":
            continue
        source = f"README.md block {number}"
        linecache.cache[source] = (len(text), None, text.splitlines(keepends=True), source)
        exec(compile(text, source, "exec"), names)
        printed = [line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines()]
        after = found[number + 1] if number + 1 < len(found) else ("", "")
        assert after[0] == "text", "each python block is followed by what it prints"
        # Dynamo's names make the digest of a captured graph; it is not what the README is about.
        printed = [re.sub(r"^(graph piece0) \w{16}$", r"\1 DIGEST", line) for line in printed]
        assert printed == after[1].rstrip().splitlines()
        ran += 1
    assert ran == 3


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
    from torchweft.cli import app as cli

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
        if words[0] != "bench":  # runs in a test of its own, with fewer plans
            assert cli.run(words) == 0, words
    capsys.readouterr()


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / link).exists(), link


def test_targets_of_the_readme_are_in_the_makefile() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE):
        assert f"\n{target}:" in makefile
