"""A `WorkerChannel`: messages between two of our processes, plain data and tensors, nothing else.

    channel.send({"kind": "rows", "call": 3}, [tensor])        one writer
    message, tensors = channel.receive()                       one reader, from another thread

A channel is one end of a pair of sockets that a process was given by the one that started it
(`pool.py`); it has no name, so nobody else can reach it. A message is JSON; tensors follow as the
bytes they have in memory, small ones in one piece with it. Nothing is pickled, and what is
announced is checked before room is made for it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from math import prod
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import CaptureError, WeftError
from torchweft.run.workers.cell import ROOM, reading, spec_named

Message = dict[str, Any]
SMALL_BYTES, WORD = 1 << 14, 16
MAX_HEAD, MAX_TEXT = 1 << 30, 1 << 26


class ChannelError(WeftError):
    """The other side is gone, or sends something that is not a message."""


class WorkerChannel:
    """One end of a pair of sockets."""

    def __init__(self, end: int) -> None:
        self.connection: Connection[Any, Any] = Connection(end)

    def send(self, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message and its tensors. Raises `ChannelError` if the other side is gone."""
        rows = [tensor.detach().contiguous().cpu() for tensor in tensors]
        try:
            self.connection.send_bytes(head_of(message, rows))
            for row in large(rows):
                self.connection.send_bytes(bytes_of(row))
        except (OSError, ValueError, TypeError) as cause:  # TypeError: closed meanwhile
            raise ChannelError(f"the other side is gone: {cause}") from cause

    def receive(self) -> tuple[Message, list[Tensor]]:
        """Wait for a message and its tensors. Raises `ChannelError` if the other side is gone, or
        sends anything else."""
        try:
            message, rows = read_head(self.connection.recv_bytes(MAX_HEAD))
            for row in large(rows):
                if (size := self.connection.recv_bytes_into(bytes_of(row))) != row.nbytes:
                    raise EOFError(f"{size} of {row.nbytes} bytes of a tensor")
        except (OSError, EOFError, TypeError, BufferTooShort) as cause:
            raise ChannelError(f"the other side is gone: {cause!r}") from cause
        return message, rows

    def close(self) -> None:
        self.connection.close()


def head_of(message: Mapping[str, Any], rows: Sequence[Tensor]) -> bytes:
    """A message, with the shapes and dtypes of its tensors, and the bytes of those that are small.

    length of the text | text, filled up to whole words | small tensors, each filled up
    """
    shapes = [[list(row.shape), str(row.dtype)] for row in rows]
    text = json.dumps({"message": message, "tensors": shapes}).encode()
    parts = [len(text).to_bytes(WORD, "little"), text, bytes(-len(text) % WORD)]
    for row in rows:
        if 0 < row.nbytes <= SMALL_BYTES:
            parts += ctypes.string_at(row.data_ptr(), row.nbytes), bytes(-row.nbytes % WORD)
    return b"".join(parts)


def read_head(head: bytes) -> tuple[Message, list[Tensor]]:
    """The message of a head and its tensors; those that follow are empty still.

    Raises `ChannelError` for bytes that are none, before room is made for what they announce.
    """
    try:
        with reading("message"):
            return _read_head(head)
    except CaptureError as error:
        raise ChannelError(str(error)) from None


def _read_head(head: bytes) -> tuple[Message, list[Tensor]]:
    if (length := int.from_bytes(head[:WORD], "little")) > MAX_TEXT:
        raise ValueError(f"its text has more than {MAX_TEXT} bytes")
    data = json.loads(head[WORD : WORD + length])
    message, specs = data["message"], [spec_named(*each) for each in data["tensors"]]
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError("it has no kind")
    if sum(spec.num_bytes for spec in specs) > ROOM:
        raise ValueError(f"it announces more than the {ROOM} bytes of this box")
    small, at, rows = bytearray(memoryview(head)[WORD + length + -length % WORD :]), 0, []
    for spec in specs:
        size = spec.num_bytes
        if 0 < size <= SMALL_BYTES:
            flat = torch.frombuffer(small, dtype=spec.dtype, count=prod(spec.shape), offset=at)
            rows.append(flat.view(spec.shape))
            at += size + -size % WORD
        else:
            rows.append(torch.empty(spec.shape, dtype=spec.dtype))
    return message, rows


def large(rows: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that follow a head."""
    return [row for row in rows if row.nbytes > SMALL_BYTES]


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, where they are."""
    size = tensor.numel() * tensor.element_size()
    array: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    array.tensor = tensor  # whoever holds the bytes holds the tensor
    return memoryview(array).cast("B")
