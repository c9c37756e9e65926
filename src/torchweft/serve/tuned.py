"""`Tuned`: choices of races, kept on disk for the next process.

    {"weft_tuned": 1, "about": "torch 2.13.0 ...", "choices": {KIND: {"way": WAY, "speeds": []}}}

One file for each model on each machine: its name is a digest of the captured graphs, of versions,
of the processor and of how many ranks talk at what rate. A file is data; what is not understood in
one (an unknown strategy, another version) is as if it were not there. A choice that turns out wrong
is given up by its guard, and kept as that.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Hashable, Iterable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from torchweft.errors import WeftError
from torchweft.files import read_text, write_json
from torchweft.plan.graph import Graph
from torchweft.plan.write.strategy import Strategy, get_strategy
from torchweft.serve.trials import Choice, Way

log = logging.getLogger("torchweft")
VERSION, MAX_FILES = 1, 256
KEPT_INNERS = (None, "eager", "onednn")  # no call of the next process waits for Inductor


def folder() -> Path:
    """Where choices are kept: `$XDG_CACHE_HOME/torchweft/tuned`."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user of a container who has no home: nothing can be kept
        base = Path(os.devnull)
    return base / "torchweft" / "tuned"


@cache
def processor() -> str:
    """The machine's processor, and how many threads torch has on it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else platform.processor()
    except OSError:
        name = platform.processor()
    return f"{name or platform.machine()}, {torch.get_num_threads()} threads"


class Tuned:
    """The choices of one model on one machine.

    facts: what else decides: how many ranks there are, how fast their link is.
    """

    def __init__(self, graphs: Iterable[Graph], facts: str) -> None:
        versions = f"torch {torch.__version__}, {processor()}, {facts}"
        text = "\n".join([versions, *map(_structure, graphs)])
        self.about = versions
        self.path = folder() / f"{blake2b(text.encode(), digest_size=10).hexdigest()}.json"

    def look_up(self, kind: Hashable) -> Choice | None:
        """What was chosen for calls of a kind, if it is known."""
        told = self._read().get(str(kind))
        try:
            speeds = {_way(way): float(speed) for way, speed in told["speeds"]} if told else {}
            return Choice.known(_way(told["way"]), speeds) if told else None
        except (KeyError, TypeError, ValueError, WeftError):
            return None

    def keep(self, kind: Hashable, choice: Choice) -> None:
        """Write a choice down, unless somebody's own function was chosen."""
        told = self._read()
        try:
            speeds = [[_data(way), speed] for way, speed in choice.speeds.items()]
            told[str(kind)] = {"way": _data(choice.way), "speeds": speeds}
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self.path, {"weft_tuned": VERSION, "about": self.about, "choices": told})
            self._evict()
        except (OSError, WeftError) as error:
            log.info("the choice for %s is not kept: %s", kind, error)

    def _read(self) -> dict[str, Any]:
        try:
            data = json.loads(read_text(self.path, WeftError, "tuned"))
            known = data["weft_tuned"] == VERSION and isinstance(data["choices"], dict)
            return data["choices"] if known else {}
        except (WeftError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _evict(self) -> None:
        files = sorted(self.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[:-MAX_FILES]:
            old.unlink(missing_ok=True)


def _structure(graph: Graph) -> str:
    """What a graph computes and talks, whatever its names are."""
    lines = []
    for op in graph.ops:
        shapes = [list(map(str, graph.value[name].shape)) for name in op.reads]
        kind = op.collective.kind if op.collective is not None else ""
        lines.append(f"{op.body} {op.uses} {op.rows} {kind} {shapes}")
    return "\n".join(lines)


def _data(way: Way) -> Any:
    """A way as data. Raises `WeftError` for one that cannot be found by its name."""
    if way is None or get_strategy(way.name).function is not way.function:
        if way is not None:
            raise WeftError(f"strategy {way.name!r} is not registered")
        return None
    json.dumps(dict(way.options), allow_nan=False)
    return {"name": way.name, "options": dict(way.options), "inner": way.inner}


def _way(data: Any) -> Way:
    if data is None:
        return None
    found = get_strategy(data["name"])(**data["options"])
    if data["inner"] not in KEPT_INNERS:
        raise WeftError(f"inner {data['inner']!r} is not kept")
    return Strategy(found.name, found.function, found.options, data["inner"])
