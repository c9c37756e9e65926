"""`Journal`: what the cases of a bench have shown, kept in a file, so that a stopped bench goes on.

    journal = Journal("auto.jsonl")
    for case in cases:
        for result in journal.results(case, lambda: measure(case)): ...

Each line is a case with its results: `[{"model": "dense", ...}, [...]]`. A case is found again by
all that it says, so results of other options are never taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torchweft.errors import WeftError


class Journal:
    """A file of cases and their results. Without a path nothing is kept."""

    def __init__(self, path: str = "") -> None:
        self.path = Path(path) if path else None
        self._known: dict[str, list[Any]] = {}
        if self.path is not None and self.path.exists():
            self._known = dict(_read(self.path))

    def knows(self, case: object) -> bool:
        """Whether a case is in it."""
        return json.dumps(case, sort_keys=True) in self._known

    def results(self, case: object, make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """The results of a case: those that are known, or else they are made, and kept when all of
        them have come."""
        key = json.dumps(case, sort_keys=True)
        if key in self._known:
            yield from self._known[key]
            return
        made = []
        for result in make():
            made.append(result)
            yield result
        self._known[key] = made
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([case, made]) + "\n")


def _read(path: Path) -> Iterator[tuple[str, list[Any]]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            case, results = json.loads(line)
        except ValueError:
            raise WeftError(
                f"journal: line {number} of {path} is no case with its results; name the journal "
                "of this bench, or a file that does not exist yet.",
                rule="journal",
            ) from None
        yield json.dumps(case, sort_keys=True), list(results)
