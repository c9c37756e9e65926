"""A `Channel`: messages between two of our processes, plain data and tensors, nothing else.

    channel.send({"kind": "rows", "call": 3}, [tensor])        one writer
    message, tensors = channel.receive()                       one reader, from another thread

On one box a channel is a Unix socket in a folder of ours (`Connection` of the standard library,
bytes only); between boxes it is a pair of ranks of torch.distributed (`rank_channel.py`). A
message is JSON; tensors follow as the bytes they have in memory, small ones in one piece with it.
Nothing is pickled.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping, Sequence
from math import prod
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from torch import Tensor

from torchweft.dynamic.cell import spec_named

Message = dict[str, Any]
SMALL_BYTES, WORD = 1 << 14, 16


class ChannelError(Exception):
    """The other side is gone, or cannot be reached."""


class Channel(Protocol):
    """What goes between two processes."""

    def send(self, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message. Raises `ChannelError` if the other side is gone."""

    def receive(self) -> tuple[Message, list[Tensor]]:
        """Wait for a message. Raises `ChannelError` if the other side is gone."""

    def close(self) -> None:
        """No more messages."""


class SocketChannel:
    """A channel over a connection of the standard library."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection

    def send(self, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message and its tensors."""
        rows = [tensor.detach().contiguous().cpu() for tensor in tensors]
        try:
            self.connection.send_bytes(head_of(message, rows))
            for row in large(rows):
                self.connection.send_bytes(bytes_of(row))
        except (OSError, ValueError, TypeError) as cause:  # TypeError: closed meanwhile
            raise ChannelError(f"the other side is gone: {cause}") from cause

    def receive(self) -> tuple[Message, list[Tensor]]:
        """Wait for a message and its tensors."""
        try:
            message, rows = read_head(self.connection.recv_bytes())
            for row in large(rows):
                self.connection.recv_bytes_into(bytes_of(row))
        except (OSError, ValueError, EOFError, TypeError) as cause:
            raise ChannelError(f"the other side is gone: {cause!r}") from cause
        return message, rows

    def close(self) -> None:
        """Close the connection."""
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
    """The message of a head and its tensors; those that follow are empty still."""
    length = int.from_bytes(head[:WORD], "little")
    found = json.loads(head[WORD : WORD + length])
    at = WORD + length + -length % WORD
    small, rows = bytearray(memoryview(head)[at:]), []
    at = 0
    for shape, dtype in found["tensors"]:
        spec = spec_named(shape, dtype)
        size = spec.num_bytes
        if 0 < size <= SMALL_BYTES:
            flat = torch.frombuffer(small, dtype=spec.dtype, count=prod(shape), offset=at)
            rows.append(flat.view(spec.shape))
            at += size + -size % WORD
        else:
            rows.append(torch.empty(spec.shape, dtype=spec.dtype))
    return found["message"], rows


def large(rows: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that follow a head."""
    return [row for row in rows if row.nbytes > SMALL_BYTES]


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, where they are."""
    size = tensor.numel() * tensor.element_size()
    found: Any = (ctypes.c_char * size).from_address(tensor.data_ptr())
    found.tensor = tensor  # whoever holds the bytes holds the tensor
    return memoryview(found).cast("B")
