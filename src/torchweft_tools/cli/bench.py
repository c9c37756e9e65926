"""`torchweft bench NAME`: a command for each bench, made from its module when it is called.

A bench is a module `torchweft_tools.bench.NAME` with

    def run(*, num_plans: int = 20_000, seed: int = 0, progress=None) -> (rows, summary)

Its keyword-only arguments are the options (`--plans`, `--seed`); lines `num_plans: ...` of its
docstring are their help. The docstring of the module is the help of the command, and its first line
stands in the list of all benches. `run` calls `progress(done, total)`. Where rows are wide, its
`COLUMNS` are those that people see; `--json` gives all.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from torchweft.errors import WeftError, clip, unknown
from torchweft_tools.cli.text import Json, UsageError, bar, printable, say, say_json

BENCHES = (
    *("ablation", "auto", "boundary", "depth", "dispatch", "dynamic", "fuzz", "hosts", "memory"),
    *(
        "ops",
        "overlap",
        "placement",
        "predictions",
        "races",
        "resources",
        "simulator",
        "strategies",
        "stream",
        "traffic",
        "verify",
        "zoo",
    ),
)
MAX_ROWS = 40
MAX_CELL = 60
Row = Mapping[str, Any]


class BenchGroup(TyperGroup):
    """The benches. They are listed by what their files say; only the one that runs is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all benches."""
        return list(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A bench as an entry of the list."""
        return TyperCommand(cmd_name, help=first_line(cmd_name))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The bench to run, and its arguments. Raises `WeftError` for an unknown name."""
        name, *words = args
        if name not in BENCHES:
            raise WeftError(f"bench: {unknown('bench', name, BENCHES)}", rule="bench")
        return name, bench_command(name), [*words, "--json"] if ctx.params["as_json"] else words


class BenchCommand(TyperCommand):
    """One bench. A mistake in its arguments raises our own error, which lists the choices."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments into the context. Raises `WeftError`."""
        words = sorted(args, key=lambda word: word != "--json")  # never the value of another option
        try:
            rest: list[str] = super().parse_args(ctx, list(words))
        except typer.BadParameter as error:
            given = [half for word in words for half in word.split("=", 1)]
            name = error.param.opts[0] if error.param else given[0]
            value = given[-given[::-1].index(name)]  # the word after its last mention
            text = f"option: {name} cannot be {clip(value)}: {error.message}"
            raise WeftError(text, rule="option") from None
        except UsageError as error:
            text = error.message.replace("requires an argument", "needs a value")
            raise WeftError(f"option: {text}", rule="option") from None
        if rest:
            known = [name for item in self.params for name in item.opts]
            raise WeftError(f"option: {unknown('option', rest[0], known)}", rule="option")
        return rest


app = typer.Typer(cls=BenchGroup, rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def _bench(context: typer.Context, as_json: Json = False) -> None:
    """Measure one of Weft's own parts; `torchweft bench NAME --help` lists its options."""
    if context.invoked_subcommand is None:
        raise WeftError(f"bench: name a bench. Known: {', '.join(BENCHES)}.", rule="bench")


def first_line(name: str) -> str:
    """What a bench measures, from the docstring of its file, which is not imported."""
    spec = find_spec(f"torchweft_tools.bench.{name}")
    assert spec is not None and spec.origin is not None, f"bench {name} has a file"
    text = Path(spec.origin).read_text(encoding="utf-8")
    line = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].partition(": ")[2]
    return line[:1].upper() + line[1:]


def bench_command(name: str) -> TyperCommand:
    """The command of a bench, with the options of its `run`."""
    bench = import_module(f"torchweft_tools.bench.{name}")
    hints, helps = get_type_hints(bench.run), option_helps(bench.run)
    options = [
        item.replace(
            annotation=Annotated[
                hints[item.name],
                typer.Option(_spelling(item.name), help=helps.get(item.name, "")),
            ]
        )
        for item in inspect.signature(bench.run).parameters.values()
        if item.name != "progress"
    ]

    def call(as_json: Json = False, **options: Any) -> None:
        rows, summary = _with_bar(name, bench.run, options)
        _tell(name, bench, list(rows), summary, as_json=as_json)

    own = inspect.signature(call, eval_str=True).parameters["as_json"]
    keyword = own.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    call.__signature__ = inspect.Signature([*options, keyword])  # type: ignore[attr-defined]
    paragraphs = (inspect.getdoc(bench) or "").split("\n\n")
    kept = "\n\n".join(f"\b\n{paragraph}" for paragraph in paragraphs)  # \b: do not fill lines
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # for `parse_args` above
    alone.command(name, cls=BenchCommand, help=kept, context_settings=settings)(call)
    command = typer.main.get_command(alone)
    assert isinstance(command, TyperCommand), "an app with one command is not a group"
    return command


def option_helps(run: Callable[..., Any]) -> dict[str, str]:
    """What the docstring of `run` says of its arguments, in lines `name: text`."""
    names = "|".join(inspect.signature(run).parameters)
    doc = inspect.getdoc(run) or ""
    matches = re.findall(rf"^({names}): (.*(?:\n(?!(?:{names}): ).+)*)", doc, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in matches}


def _spelling(name: str) -> str:
    return "--" + name.removeprefix("num_").replace("_", "-")


def _with_bar(name: str, run: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Run it under a progress bar on stderr, if it reports progress."""
    if "progress" not in inspect.signature(run).parameters:
        return run(**options)
    with bar(f"bench {name}") as progress:
        return run(**options, progress=progress)


def _tell(name: str, bench: ModuleType, rows: list[Row], summary: Row, *, as_json: bool) -> None:
    """One table for all rows of the same columns, then the summary; or all as JSON."""
    if as_json:
        say_json({"bench": name, "rows": rows, "summary": summary})
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(getattr(bench, "COLUMNS", None) or tuple(row), []).append(row)
    for columns, alike in kinds.items():
        table = Table(*columns)
        for row in alike[:MAX_ROWS]:
            table.add_row(*(escape(_cell(row[column])) for column in columns))
        console.print(table)
        if len(alike) > MAX_ROWS:
            say(f"... and {len(alike) - MAX_ROWS} more rows; --json gives all")
    say(f"bench {name}: " + ", ".join(f"{key} {_cell(value)}" for key, value in summary.items()))


def _cell(value: object) -> str:
    """A value as short text; the JSON has long ones in full."""
    text = f"{value:.4g}" if isinstance(value, float) else printable(str(value))
    line = text.partition("\n")[0]
    return line if line == text and len(line) <= MAX_CELL else line[:MAX_CELL] + " ..."
