"""A bench by name: `torchweft bench NAME` finds its module, reads its options, shows its rows.

A bench is a module `torchweft_tools.bench.NAME` with

    def run(*, num_plans: int = 20_000, seed: int = 0, progress=None) -> (rows, summary)

Its keyword-only arguments are the options (`--plans`, `--seed`); it calls `progress(done, total)`.
Where rows are wide, its `COLUMNS` are those that people see; `--json` gives all.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from torchweft.cli.text import printable, read_literal, say, say_json
from torchweft.errors import WeftError, clip, unknown

BENCHES = (
    *("ablation", "boundary", "depth", "dispatch", "dynamic", "fuzz", "hosts", "memory"),
    *("ops", "overlap", "placement", "races", "stream", "verify", "zoo"),
)
MAX_ROWS = 40
MAX_CELL = 60
Row = Mapping[str, Any]


def run_bench(name: str, words: Sequence[str], *, as_json: bool) -> None:
    """Run a bench and print its rows. Raises `WeftError` for an unknown name or option."""
    if not name:
        raise WeftError(f"bench: which one? Known: {', '.join(BENCHES)}.", rule="bench")
    if name not in BENCHES:
        raise WeftError(f"bench: {unknown('bench', name, BENCHES)}", rule="bench")
    bench = importlib.import_module(f"torchweft_tools.bench.{name}")
    run = bench.run
    options = read_options(run, words)
    rows, summary = _with_bar(name, run, options)
    if as_json:
        say_json({"bench": name, "rows": list(rows), "summary": summary})
    else:
        columns = getattr(bench, "COLUMNS", None)
        shown = [{key: row[key] for key in columns} for row in rows] if columns else list(rows)
        _show(name, shown, summary)


def read_options(run: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """`--plans 200 --seed=1` as keyword arguments of `run`: num_plans=200, seed=1."""
    hints = get_type_hints(run)
    known = {
        "--" + item.name.removeprefix("num_").replace("_", "-"): item.name
        for item in inspect.signature(run).parameters.values()
        if item.kind is item.KEYWORD_ONLY and item.name != "progress"
    }
    found: dict[str, Any] = {}
    rest = [half for word in words for half in _halves(word)]
    while rest:
        word = rest.pop(0)
        if word not in known:
            raise WeftError(f"option: {unknown('option', word, known)}", rule="option")
        name = known[word]
        if hints[name] is bool:
            found[name] = True
        elif not rest:
            raise WeftError(f"option: {word} needs a value.", rule="option")
        else:
            found[name] = _value(word, rest.pop(0), hints[name])
    return found


def _halves(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") else [word]


def _value(word: str, text: str, hint: Any) -> Any:
    value = text if hint is str else read_literal(text)
    whole = type(value) is int and hint is float
    if isinstance(value, bool) or not (whole or isinstance(value, hint)):
        raise WeftError(f"option: {word} cannot be {clip(text)}.", rule="option")
    return value


def _with_bar(name: str, run: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Run it under a progress bar on stderr, if it reports progress."""
    if "progress" not in inspect.signature(run).parameters:
        return run(**options)
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"bench {name}", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        return run(**options, progress=progress)


def _show(name: str, rows: list[Row], summary: Row) -> None:
    """One table for all rows of the same columns, then the summary."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    for columns, alike in kinds.items():
        table = Table(*columns)
        for row in alike[:MAX_ROWS]:
            table.add_row(*(escape(_cell(value)) for value in row.values()))
        console.print(table)
        if len(alike) > MAX_ROWS:
            say(f"... and {len(alike) - MAX_ROWS} more rows; --json gives all")
    say(f"bench {name}: " + ", ".join(f"{key} {_cell(value)}" for key, value in summary.items()))


def _cell(value: object) -> str:
    """A value as short text; what is long stands in the JSON."""
    text = f"{value:.4g}" if isinstance(value, float) else printable(str(value))
    line = text.partition("\n")[0]
    return line if line == text and len(line) <= MAX_CELL else line[:MAX_CELL] + " ..."
