"""Systems other than Linux: what cannot run there says so with our own error; the rest goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchweft.errors import MachineError
from torchweft_tools import lab, need_linux
from torchweft_tools.bench import fuzz
from torchweft_tools.cli import app as cli
from torchweft_tools.dryrun.build import NUM_KEPT, build, cache_folder
from torchweft_tools.dryrun.run import run


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_dry_run_and_fuzz_bench_need_linux(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(MachineError, match=f"dryrun needs Linux .*; this is {system}"):
        run(["python"])
    with pytest.raises(MachineError, match="bench fuzz needs Linux"):
        fuzz.run(quick=True)
    with pytest.raises(MachineError) as error:
        need_linux("this", "that")
    assert error.value.rule == "system"


def test_lab_says_that_windows_cannot_run_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "need Linux" in lab.check()
    assert cli.run(["lab", "run", "--link", "none", "--", "true"]) == 1
    assert "which Windows does not have" in capsys.readouterr().err
    with pytest.raises(MachineError, match="Windows"):
        lab.spawn_ranks(["true"], link="1gbit")


def test_lab_of_macos_runs_over_loopback_or_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cli.run(["lab", "run", "--link", "1gbit", "--require", "--", "true"]) == 1
    assert "network namespaces need Linux, and this is darwin" in capsys.readouterr().err
    with lab.start(["true"], link="1gbit") as command:
        assert (command.wait(), command.label) == (0, "loopback (unlimited)")


def test_command_line_starts_without_the_signals_of_unix(tmp_path: Path) -> None:
    """Windows has neither of these names; nothing that the command line imports may need one."""
    code = (
        "import signal, sys\n"
        "for name in ('SIGHUP', 'SIGKILL', 'SIGCHLD', 'SIGSTOP', 'SIGALRM', 'pthread_sigmask'):\n"
        "    delattr(signal, name)\n"
        "sys.modules['resource'] = None\n"
        "from torchweft_tools.cli import app; sys.exit(app.run(['bench', 'fuzz', '--help']))"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "--files" in shown.stdout and hasattr(signal, "SIGHUP")


def test_cache_of_stand_ins_is_private_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = "torchweft_tools.dryrun.build._compile"
    library = "libweft_dryrun.so"
    monkeypatch.setattr(compiled, lambda folders, scratch: (scratch / library).touch())
    for number in range(NUM_KEPT + 3):
        old = cache_folder() / f"old{number}"
        old.mkdir(parents=True)
        os.utime(old, (number, number))
    place = build([]).parent
    assert place.parent == tmp_path / "torchweft" / "dryrun"
    assert place.stat().st_mode & 0o077 == 0
    left = {path.name for path in cache_folder().iterdir()}
    assert left == {place.name, *(f"old{number}" for number in range(4, NUM_KEPT + 3))}
