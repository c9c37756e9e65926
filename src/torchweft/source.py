"""The `Source` of functions that are written at run time: lines come in, functions go out.

    source = Source("program")
    source.constant(torch.relu)                               ->  "k0"
    source.build(["def lane0(x):", "    return k0(x)"], "lane0")

The lines hold identifiers of our own only. Whatever comes from graphs, plans, files or messages
enters as a constant, never as text. A traceback shows the generated line, for as long as the
functions live. They have Python's own builtins: whatever C code imports while one of them runs is
imported by the `__import__` of its globals.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_numbers = itertools.count()


class Source:
    """Functions to be: the names that their lines may use, and the file that tracebacks show."""

    def __init__(self, what: str, names: Mapping[str, Any] | None = None) -> None:
        self.filename = f"<weft {what} {next(_numbers)}>"
        self.names: dict[str, Any] = dict(names or {})
        self.text = ""
        self._constants: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        """The name of a constant; one that has a name already keeps it."""
        name = self._constants.setdefault(id(value), f"k{len(self._constants)}")
        self.names[name] = value  # which keeps it alive, so that its id stays its own
        return name

    def build(self, lines: Iterable[str], *functions: str) -> tuple[Callable[..., Any], ...]:
        """These functions, of all that the lines define."""
        self.text = "\n".join(lines) + "\n"
        kept = (len(self.text), None, self.text.splitlines(keepends=True), self.filename)
        linecache.cache[self.filename] = kept
        exec(compile(self.text, self.filename, "exec"), self.names)
        built = tuple(self.names[name] for name in functions)
        weakref.finalize(built[0], linecache.cache.pop, self.filename, None).atexit = False
        return built
