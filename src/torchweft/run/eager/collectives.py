"""The `EagerCollective`: one that an eager model has called, on its way to c10d.

    dist.all_reduce(y)  --c10d::allreduce_-->  EagerCollective  --talk--> this thread's listener
                                               .start()   c10d begins to work
                                               .land()    it has ended: the model may go on

Every form of a collective (`dist.all_reduce`, with `async_op=True`, the functional ones, those of
a DTensor) ends in one operator of c10d. `catch_collectives` puts a kernel of ours above c10d's own:
without a listener it only hands on. No function of torch or of the model is replaced.

`Eager` listens to a model that runs as it is, while there may be several ranks. Its collectives go
over the communicators that plans use, so ranks agree on the call too (the others must run theirs
eagerly as well), no wait is endless, and a rank that fails wakes its peers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from torchweft.capture.marks import listener, listening
from torchweft.private.core import DispatchKey, _dispatch_keyset_full_after, tree_leaves
from torchweft.ranks.ranks import group, wait
from torchweft.ranks.talk import Talk

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "allreduce_": "all_reduce",
        "allreduce_coalesced_": "all_reduce_coalesced",
        "broadcast_": "broadcast",
        "reduce_": "reduce",
        "allgather_": "all_gather",
        "_allgather_base_": "all_gather_into_tensor",
        "allgather_coalesced_": "all_gather_coalesced",
        "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
        "reduce_scatter_": "reduce_scatter",
        "_reduce_scatter_base_": "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
        "alltoall_": "all_to_all",
        "alltoall_base_": "all_to_all_single",
        "gather_": "gather",
        "scatter_": "scatter",
        "barrier": "barrier",
        "send": "send",
        "recv_": "recv",
        "recv_any_source_": "recv",
    }
)
"""Operators of c10d, and the kinds of collectives that they are in a graph."""
BETWEEN_TWO = ("send", "recv")
"""Kinds of which one rank alone does not know when they can end: they are never held up."""
BELOW = _dispatch_keyset_full_after(DispatchKey.BackendSelect)


class EagerCollective:
    """A collective that was called and is not started yet."""

    def __init__(self, kind: str, op: Any, keys: Any, args: tuple[Any, ...], at: int) -> None:
        self.kind, self.op, self.keys, self.args, self.at = kind, op, keys, args, at
        self.result: Any = None
        self.group: str = dist.ProcessGroup.unbox(args[at]).group_name
        self.communicator = re.sub(r"\W", "_", f"group_{self.group}")
        self.text = f"{kind} on {self.communicator}"

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that tells how much is talked: what is given, not what is made."""
        names = [argument.name for argument in self.op._schema.arguments]
        given = next((at for at, name in enumerate(names) if name.startswith("input")), 0)
        tensors = [leaf for leaf in tree_leaves(self.args) if isinstance(leaf, torch.Tensor)]
        return next(iter(tree_leaves(self.args[given])), tensors[0])

    def start(self) -> EagerCollective:
        """Let c10d begin, on the communicator that plans use. The ranks have agreed by then."""
        talked = group(self.group).boxed()
        args = (*self.args[: self.at], talked, *self.args[self.at + 1 :])
        self.result = self.op.redispatch(self.keys, *args)
        return self

    def land(self) -> EagerCollective:
        """Wait until it has ended (on an accelerator: the stream waits)."""
        boxed = self.result[-1] if isinstance(self.result, tuple) else self.result
        work = dist.Work.unbox(boxed)
        if self.tensor.device.type == "cpu":
            wait(work, self.group)
        else:
            work.wait()
        return self

    def pass_on(self) -> Any:
        """What c10d makes of it, as if it had not been caught."""
        return self.op.redispatch(self.keys, *self.args)


class Eager:
    """Listens to a model that runs without a plan; `ranks` is a talk without a plan."""

    def __init__(self, ranks: Talk) -> None:
        self.ranks = ranks

    def stop(self, text: str, mark: Any) -> None:
        """Nothing is planned, so nothing happens here."""

    def talk(self, caught: EagerCollective) -> Any:
        """Start a collective and wait for its end."""
        if caught.kind in BETWEEN_TWO:
            return caught.pass_on()
        with listening(None):
            self.ranks.join(caught.group)
            return caught.start().land().result


@functools.cache
def catch_collectives() -> torch.library.Library:
    """Catch the collectives of every thread with a listener; once in a process."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, kind in KINDS.items():
        op = getattr(torch.ops.c10d, name).default
        kernel = _kernel(kind, op)
        library.impl(name, kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _kernel(kind: str, op: Any) -> Any:
    at = [argument.name for argument in op._schema.arguments].index("process_group")

    def kernel(keys: Any, *args: Any) -> Any:
        heard = listener()
        if heard is None:
            return op.redispatch(keys & BELOW, *args)
        return heard.talk(EagerCollective(kind, op, keys & BELOW, args, at))

    return kernel
