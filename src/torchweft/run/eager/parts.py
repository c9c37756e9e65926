"""What listens to an eager model that runs: the `EagerPart` of a call by a plan, or `Eager`.

    dispatching thread                thread of the part
    part.resume()   ----- go ----->   computes up to its next stop
                    <---- back ----   stop("all_reduce group_0"), and waits there

Of each pair of threads one waits, so a part and its dispatcher never run side by side; parts that
are resumed by several lanes do. What torch keeps by thread (gradients, autocast ...) is a part's
own by itself; context variables are those of the dispatching thread when the part starts. The
default dtype, which torch keeps by process, is put in force whenever a part goes on, and taken back
where it stops.

    dist.all_reduce(y)  --c10d::allreduce_-->  EagerCollective  --talk--> this thread's listener
                                               .start()   c10d begins to work
                                               .land()    it has ended: the model may go on

Every form of a collective (`dist.all_reduce`, with `async_op=True`, the functional ones, those of
a DTensor) ends in one operator of c10d. `catch_collectives` puts a kernel of ours above c10d's own:
without a listener it only hands on. No function of torch or of the model is replaced.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchweft.capture.marks import listener, listening
from torchweft.errors import RunError, clip
from torchweft.private.core import DispatchKey, _dispatch_keyset_full_after, tree_leaves
from torchweft.ranks.ranks import group, wait
from torchweft.ranks.talk import SEQUENCE, Talk
from torchweft.run.cpu import Cancelled, Lanes
from torchweft.run.modes import Modes

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


class Stop(NamedTuple):
    """A boundary of the model: what it tells there, and whether control passes to other parts."""

    text: str
    passes: bool = True


class EagerPart:
    """One part of one call: started once, resumed at each of its stops, and cancelled or over.

    first: its first row. stops: what the model is to come to; its end is none of them.
    """

    def __init__(
        self, run: Callable[[], Any], stops: Sequence[Stop], first: int, modes: Modes
    ) -> None:
        self.run, self.stops, self.first, self.modes = run, stops, first, modes
        self.at = 0
        self.caught: EagerCollective | None = None
        self.outputs: Any = None
        self.error: BaseException | None = None
        self.cancelled = False
        self.over = threading.Event()
        self._dtype = self._home = torch.get_default_dtype()
        self._context = copy_context()
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()

    # Called by the dispatching thread.

    def start(self, threads: Lanes) -> None:
        """Run up to the first stop. Raises what the model raises."""
        threads.start(self._job)
        self._wait()

    def resume(self) -> None:
        """Run up to the next stop, or to the end. Raises what the model raises."""
        self._go.release()
        self._wait()

    def _wait(self) -> None:
        self._back.acquire()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Let the model end where it stands, or where it stops next."""
        self.cancelled = True
        _free(self._go)

    # Called by the thread of the part.

    def _job(self) -> Callable[[], None]:
        try:
            with self.modes, listening(self):
                self._enter()
                try:
                    self.outputs = self._context.run(self.run)
                finally:
                    self._leave()
            if self.at < len(self.stops):
                raise unfit(self.stops[self.at].text, "its end")
        except Cancelled:
            pass
        except BaseException as error:
            self.error = error
        return self._end

    def _end(self) -> None:
        self.over.set()
        _free(self._back)

    def stop(self, text: str, mark: Any) -> None:
        """The model enters or leaves a mark."""
        self._come_to(text, None)

    def talk(self, caught: EagerCollective) -> Any:
        """The model calls a collective: it goes on when that has landed."""
        if caught.kind in BETWEEN_TWO:
            return caught.pass_on()
        self._come_to(caught.text, caught)
        return caught.result

    def _come_to(self, text: str, caught: EagerCollective | None) -> None:
        planned = self.stops[self.at] if self.at < len(self.stops) else Stop("its end")
        if planned.text != text:  # noted here, for the model may catch what is raised
            self.error = unfit(planned.text, text)
            raise Cancelled
        self.at += 1
        if planned.passes:
            self.caught = caught
            self._leave()
            if not self.cancelled:
                self._back.release()
                self._go.acquire()
            if self.cancelled:
                raise Cancelled
            self._enter()

    def _enter(self) -> None:
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)

    def _leave(self) -> None:
        self._dtype = torch.get_default_dtype()
        if self._dtype is not self._home:
            torch.set_default_dtype(self._home)


def _free(lock: threading.Lock) -> None:
    """Release a lock that another thread may have released already."""
    with contextlib.suppress(RuntimeError):
        lock.release()


def cancel(parts: Sequence[EagerPart], patience_s: float) -> bool:
    """Cancel all parts that are not over; whether their threads ended in time."""
    for part in parts:
        if not part.over.is_set():
            part.cancel()
    return all(part.over.wait(patience_s) for part in parts)


def unfit(planned: str, came: str) -> RunError:
    """The error of a model that comes to another boundary than the plan says."""
    return RunError(
        f"sequence: the model came to {clip(came)} where its first run had {clip(planned)}; "
        "its plan does not fit any more.",
        rule=SEQUENCE,
    )
