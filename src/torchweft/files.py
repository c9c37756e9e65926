"""A data file: text or bytes, read within limits and written in one piece.

    read_text, read_bytes, write_text, write_json, write_bytes

Loading never executes anything. Only regular files are read, and no more of them than `MAX_BYTES`.
A file that is missing, too large, truncated or no text raises the caller's own error class; a write
goes to a temporary file first, so a crash loses nothing.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

from torchweft.errors import WeftError

MAX_BYTES, MAX_TEXT = 32 * 1024 * 1024, 8 * 1024 * 1024


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


def write_json(path: str | Path, data: object) -> None:
    """Write data as an indented JSON file."""
    write_text(path, json.dumps(data, indent=1) + "\n")
