"""A channel between two ranks of torch.distributed: how a worker on another box is reached.

    driver (rank 0)  <-- a process group of two, gloo, over a TCPStore -->  worker (rank 1)

Each worker has a group of its own with the driver, so one that dies takes no other with it. A
message is a length, its JSON, and its tensors; rows between two such workers go through the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from torchweft.dynamic.channel import ChannelError, Message, bytes_of, head_of, large, read_head

IDLE = timedelta(days=1)  # a channel may be silent; whoever is dead is found by its heart
DRIVER, WORKER = 0, 1


class RankChannel:
    """A channel over a process group of two ranks."""

    def __init__(self, address: str, name: str, rank: int, *, wait_s: float = 60.0) -> None:
        host, _, port = address.rpartition(":")
        wait = timedelta(seconds=wait_s)
        try:
            store = TCPStore(host, int(port), None, rank == DRIVER, wait, wait_for_workers=False)
            self.group: Any = ProcessGroupGloo(PrefixStore(name, store), rank, 2, IDLE)
        except (RuntimeError, ValueError) as cause:
            raise ChannelError(f"no channel over {address}: {cause}") from cause
        self.store, self.peer = store, 1 - rank

    def send(self, message: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send a message and its tensors."""
        rows = [tensor.detach().contiguous().cpu() for tensor in tensors]
        head = torch.frombuffer(bytearray(head_of(message, rows)), dtype=torch.uint8)
        self._each([torch.tensor([len(head)]), head, *large(rows)], self.group.send)

    def receive(self) -> tuple[Message, list[Tensor]]:
        """Wait for a message and its tensors."""
        size = torch.zeros(1, dtype=torch.int64)
        self._each([size], self.group.recv)
        head = torch.empty(int(size), dtype=torch.uint8)
        self._each([head], self.group.recv)
        message, rows = read_head(bytes(bytes_of(head)))
        self._each(large(rows), self.group.recv)
        return message, rows

    def _each(self, tensors: Sequence[Tensor], act: Any) -> None:
        try:
            for tensor in tensors:
                act([tensor], self.peer, 0).wait()
        except RuntimeError as cause:
            raise ChannelError(f"the other rank is gone: {cause}") from cause

    def close(self) -> None:
        """Leave the group."""
        self.group.shutdown()
