"""What ranks of a bench report: lines of JSON on rank 0's output come in, results go out.

    rank:   say("progress", [3, 40]); say("result", {...})
    bench:  for result in listen(command, "overlap", on_progress): ...

Other lines, which libraries print, are skipped.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchweft.errors import WeftError
from torchweft_tools.lab import Command

MARK = "@weft "
Progress = Callable[[int, int], None]


def say(kind: str, value: Any) -> None:
    """Report a value to the bench; only one rank may."""
    sys.stdout.write(MARK + json.dumps({kind: value}) + "\n")
    sys.stdout.flush()


def brief(error: Exception) -> str:
    """The class of an error and the first line of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


@contextmanager
def leaving() -> Iterator[None]:
    """End the process with the block, even if it fails.

    Running engines would keep it alive, and threads of gloo now and then abort a process while the
    interpreter shuts down.
    """
    code = 1
    try:
        yield
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def listen(command: Command, bench: str, on_progress: Progress) -> Iterator[dict[str, Any]]:
    """The results of a running command. Raises `WeftError` if the command fails."""
    for line in command.stdout:
        if not line.startswith(MARK):
            continue
        message = json.loads(line.removeprefix(MARK))
        if "progress" in message:
            on_progress(*message["progress"])
        if "result" in message:
            yield message["result"]
    if code := command.wait():
        raise WeftError(f"bench {bench}: the ranks ended with code {code}; results are missing.")


def part_of(progress: Progress | None, number: int, count: int) -> Progress:
    """Progress within one case of several."""

    def part(done: int, total: int) -> None:
        if progress is not None:
            progress(number * total + done, count * total)

    return part
