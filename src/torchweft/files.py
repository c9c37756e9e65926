"""A data file: text, JSON or bytes, read within limits and written in one piece.

    read_text, read_json, read_bytes, Reader (typed fields of an object), read_item (all of them)
    write_text, write_json, write_bytes

Loading never executes anything. Only regular files are read, and no more of them than `MAX_BYTES`.
A file that is missing, too large, truncated or no text raises the caller's own error class; a write
goes to a temporary file first, so a crash loses nothing.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from torchweft.errors import WeftError, clip

MAX_BYTES, MAX_TEXT = 32 * 1024 * 1024, 8 * 1024 * 1024
MAX_LISTS, MAX_ITEMS, MAX_DIGITS = 500_000, 4_000_000, 40
PLAIN: Mapping[Any, Any] = MappingProxyType({str: str, int: int, float: (int, float), bool: bool})


def read_bytes(path: str | Path, error: type[WeftError], what: str) -> bytes:
    """The bytes of a regular file. Raises `error` if there is none that can be read."""
    where = f"{what} file {path}"
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise error(f"file: cannot read {where}: it is not a regular file.")
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise error(f"file: there is no {where}.") from None
    except OSError as cause:
        raise error(f"file: cannot read {where}: {cause.strerror}.") from None
    except ValueError:
        raise error(f"file: cannot read {where}: a path cannot contain a zero byte.") from None
    if len(data) > MAX_BYTES:
        raise error(f"file: {where} is larger than {MAX_BYTES // 2**20} MiB.")
    return data


def check_length(text: str, error: type[WeftError], what: str) -> None:
    """Raise `error` for more text than a reader of lines gets through in a moment."""
    if len(text) > MAX_TEXT:
        raise error(f"file: {what} of more than {MAX_TEXT} characters.", rule="file")


def read_text(path: str | Path, error: type[WeftError], what: str) -> str:
    """The text of a file. Raises `error` if there is none that can be read."""
    try:
        text = read_bytes(path, error, what).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(f"file: {what} file {path} is not text.") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file; it is there whole or not at all. Raises `WeftError` if it cannot be."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file; it is there whole or not at all. Raises `WeftError` if it cannot be."""
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError as cause:
        raise WeftError(f"file: cannot write {path}: {cause.strerror}.", rule="file") from None
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise


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


def write_json(path: str | Path, data: object) -> None:
    """Write data as an indented JSON file."""
    write_text(path, json.dumps(data, indent=1) + "\n")


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
