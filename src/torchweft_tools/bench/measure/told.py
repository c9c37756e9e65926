"""What ranks of a bench tell: lines of JSON on rank 0's output come in, results go out.

    rank:   say("progress", [3, 40]); say("result", {...})
    bench:  for result in listen(command, "overlap", on_progress): ...

Other lines (libraries talk much) are passed over.
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
    """Tell the bench; only one rank may."""
    sys.stdout.write(MARK + json.dumps({kind: value}) + "\n")
    sys.stdout.flush()


@contextmanager
def leaving() -> Iterator[None]:
    """End the process with the block: engines that still run would hold it up, also if it fails."""
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
    """The results of a running command. Raises `WeftError` if it fails before it has told all."""
    for line in command.stdout:
        if not line.startswith(MARK):
            continue
        told = json.loads(line.removeprefix(MARK))
        if "progress" in told:
            on_progress(*told["progress"])
        if "result" in told:
            yield told["result"]
    if code := command.wait():
        raise WeftError(f"bench {bench}: the ranks ended with code {code}, not all was told.")


def part_of(progress: Progress | None, number: int, count: int) -> Progress:
    """Progress within one case of several."""

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress(number * total + done, count * total)

    return told
