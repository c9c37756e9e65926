"""What the command line reads and says: `name=value` words come in, safe text and JSON go out.

Names of a graph or a plan are harmless, but history lines, paths and excerpts of broken files may
hold anything; `printable` keeps control characters from the terminal.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from torchweft.errors import WeftError, clip
from torchweft.plan.context import Context
from torchweft.plan.machine import Machine, cpu
from torchweft_tools.formats.weft_files import load_machine

Json = Annotated[bool, typer.Option("--json", help="one JSON object for tools")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="write it to this file")]
Sizes = Annotated[list[str] | None, typer.Option("--size", metavar="S=N", help="another symbol")]
MachineFile = Annotated[Path | None, typer.Option("--machine", help="machine file (JSON)")]
Width = Annotated[int, typer.Option(min=40, max=400, help="columns of the timeline")]
UsageError: type[Any] = typer.BadParameter.__bases__[0]  # what typer raises for bad words


def say(text: str, *, to: TextIO | None = None) -> None:
    """Print text on stdout, or on another stream."""
    print(printable(text), file=to or sys.stdout, flush=True)


def say_json(data: object) -> None:
    """Print one JSON object on one line of stdout."""
    print(json.dumps(data), flush=True)


def answer(text: str, data: object, *, as_json: bool) -> None:
    """Print what a command has to say: as text, or as one JSON object for tools."""
    if as_json:
        say_json(data)
    else:
        say(text)


def printable(text: str) -> str:
    """The text with every control character written out as its escape."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else ascii(c)[1:-1] for c in text)


def error_data(error: WeftError) -> dict[str, object]:
    """An error as data for tools."""
    head = str(error).partition(":")[0]
    rule = error.rule or (head if head.replace(" ", "").replace("-", "").isalpha() else "")
    facts = {"kind": type(error).__name__, "rule": rule, "message": str(error)}
    return {"error": {**facts, "step": error.step, "lane": error.lane, "source": error.source}}


def read_pairs(words: Iterable[str], what: str) -> dict[str, Any]:
    """`["parts=4", "at=requests"]` as {"parts": 4, "at": "requests"}."""
    pairs: dict[str, Any] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name.isidentifier():
            raise WeftError(f"{what}: {clip(word)} is not NAME=VALUE.", rule=what)
        if name in pairs:
            raise WeftError(f"{what}: {name!r} is given twice.", rule=what)
        pairs[name] = read_literal(text)
    return pairs


def read_literal(text: str) -> Any:
    """A number, True, False, None or a tuple where the text is one, else the text itself."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    plain = isinstance(value, tuple) and all(isinstance(item, int | float | str) for item in value)
    return value if value is None or plain or isinstance(value, int | float | str) else text


def read_context(batch: int, size: Iterable[str], tokens: str, phase: str | None) -> Context:
    """The context that the options of a command describe."""
    sizes = read_pairs(size, "size")
    if wrong := [name for name, value in sizes.items() if type(value) is not int or value < 0]:
        raise WeftError(f"size: {wrong[0]!r} is not a whole number of 0 or more.", rule="size")
    requests = [read_literal(word) for word in tokens.split(",")] if tokens else []
    if any(type(number) is not int or number < 0 for number in requests):
        what = "must be the tokens of each request, such as 512,17,1"
        raise WeftError(f"tokens: {what}; got {clip(tokens)}.")
    return Context(batch, tokens_per_request=tuple(requests), phase=phase, sizes=sizes)


def read_machine(path: Path | None, num_lanes: int) -> Machine:
    """The machine of a file, or a CPU with so many compute lanes."""
    if path is not None and num_lanes != 1:
        raise WeftError("machine: --machine and --lanes do not go together.", rule="machine")
    return cpu(num_lanes) if path is None else load_machine(path)


@contextmanager
def bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, where that is a terminal, for the time of a block; call it with
    what is done and what there is to do."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
