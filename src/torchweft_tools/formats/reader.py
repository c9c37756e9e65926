"""A `Reader`: typed fields of one object of a JSON file; `read_item` reads a whole dataclass so.

`read_json` reads the file, within limits, as `torchweft.files` reads text. What is missing, unknown
or of another kind raises the caller's own error class, naming the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from torchweft.errors import WeftError, clip
from torchweft.files import read_text

MAX_LISTS, MAX_ITEMS, MAX_DIGITS = 500_000, 4_000_000, 40
PLAIN: Mapping[Any, Any] = MappingProxyType({str: str, int: int, float: (int, float), bool: bool})


def read_json(path: str | Path, error: type[WeftError], what: str) -> object:
    """The data of a JSON file. Raises `error`, with the line, if it is not JSON."""
    text = read_text(path, error, what)
    if text.count("[") + text.count("{") > MAX_LISTS or text.count(",") > MAX_ITEMS:
        limit = f"{MAX_LISTS} lists and objects, or {MAX_ITEMS} items"
        raise error(f"file: {what} file {path} has more than {limit}.")
    try:
        data: object = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as cause:
        raise error(
            f"file: {what} file {path} is not JSON (line {cause.lineno}: {cause.msg}): cut off?"
        ) from None
    except RecursionError:
        raise error(f"file: {what} file {path} is nested too deeply.") from None
    except ValueError as cause:
        raise error(f"file: {what} file {path}: {clip(cause)}.") from None
    return data


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:  # a float holds the rest, so that no arithmetic can overflow
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


class Reader:
    """Takes typed fields out of one object of a file, and says which one is wrong."""

    def __init__(self, data: object, error: type[WeftError], where: str) -> None:
        self.error, self.where = error, where
        if not isinstance(data, dict):
            raise self.fail(f"this is {clip(data)}, not an object.")
        self.data, self.taken = data, set[str]()
        self.where = f"{where} {clip(data['name'])}" if "name" in data else where

    def fail(self, why: str) -> WeftError:
        """The error to raise."""
        return self.error(f"file: {self.where}: {why}", rule="file")

    def take(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The field `name`; it must be there unless there is a default."""
        self.taken.add(name)
        value = self.data.get(name, default)
        if value is ...:
            raise self.fail(f"the field {name!r} is missing.")
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if value is default or fits:
            return value
        raise self.fail(f"the field {name!r} cannot be {clip(value)}.")

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names; empty if it is missing."""
        values = self.take(name, list, [])
        if wrong := [value for value in values if not isinstance(value, str)]:
            raise self.fail(f"{name!r} holds {clip(wrong[0])}, not a name.")
        return tuple(values)

    def done(self) -> None:
        """All fields have been taken; another one is an error."""
        if extra := set(self.data) - self.taken:
            raise self.fail(f"unknown field {clip(min(extra, key=str))}.")


_hints = cache(get_type_hints)


def read_item(
    kind: Any, data: object, error: type[WeftError], **takes: Callable[[Any], Any]
) -> Any:
    """A dataclass from an object that has its fields. Raises `error`, which names what is wrong.

    A field is plain, a class with `of` (from text or a number), another dataclass, or a list of
    one of these; takes: how those are made that are none of it, by their names.
    """
    read, hints = Reader(data, error, kind.__name__.lower()), _hints(kind)
    items: dict[str, Any] = {}
    for spec in fields(kind):
        name, default = spec.name, ... if spec.default is MISSING else spec.default
        inside = get_args(hints[name]) or (hints[name],)
        if name in takes:
            items[name] = takes[name](read.take(name, dict, {}))
        elif hints[name] == tuple[str, ...]:
            items[name] = read.names(name) or (() if default is ... else default)
        elif get_origin(hints[name]) is tuple:
            items[name] = tuple(_made(read, inside[0], i) for i in read.take(name, list, default))
        elif inside[0] in PLAIN:
            items[name] = read.take(name, PLAIN[inside[0]], default)
        else:
            value = read.take(name, (str, int) if hasattr(inside[0], "of") else dict, default)
            items[name] = value if value is default else _made(read, inside[0], value)
    read.done()
    return kind(**items)


def _made(read: Reader, kind: Any, value: object) -> Any:
    if not hasattr(kind, "of"):
        return read_item(kind, value, read.error)
    try:
        if isinstance(value, str | int):
            return kind.of(value)
    except WeftError as error:
        raise read.fail(str(error)) from None
    raise read.fail(f"{clip(value)} is not a {kind.__name__.lower()}.")
