"""What listens to an eager model that runs: a `Recorder`, the `EagerPart` of a call, or `Eager`.

A recorder watches the first run, and keeps what a plan needs to know: the boundaries that the model
came to (`halts`), each with the stretch of calls before it, and what keeps it from being cut. A
part is a run by a plan, in a thread of its own:

    dispatching thread                thread of the part
    part.resume()   ----- go ----->   computes up to its next stop
                    <---- back ----   stop("all_reduce group_0"), and waits there

Of each pair of threads one waits, so a part and its dispatcher never run side by side; parts that
are resumed by several lanes do. What torch keeps by thread (gradients, autocast ...) is a part's
own by itself; context variables are those of the dispatching thread when the part starts. The
default dtype, which torch keeps by process, is put in force whenever a part goes on, and taken back
where it stops. What they are told of:

    dist.all_reduce(y)  --c10d::allreduce_-->  EagerCollective  --talk--> this thread's listener
    with weft.mark("attn"): ...  or a rule of a `MarkWatch`     --stop--> this thread's listener

Every form of a collective (`dist.all_reduce`, with `async_op=True`, the functional ones, those of
a DTensor) ends in one operator of c10d. `catch_collectives` puts a kernel of ours above c10d's own:
without a listener it only hands on. No function of torch or of the model is replaced.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torchweft.capture.marks import Mark, MarkRule, listener, listening
from torchweft.capture.ops.names import Stack
from torchweft.capture.rows.axes import bind, flops_of, written_by
from torchweft.errors import CaptureError, RunError, clip
from torchweft.private.core import (
    DispatchKey,
    OpOverload,
    TorchDispatchMode,
    _dispatch_keyset_full_after,
    is_traceable_wrapper_subclass,
    tree_leaves,
)
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
        self._go, self._back = SimpleQueue[None](), SimpleQueue[None]()

    # Called by the dispatching thread.

    def start(self, threads: Lanes) -> None:
        """Run up to the first stop. Raises what the model raises."""
        threads.start(self._job)
        self._wait()

    def resume(self) -> None:
        """Run up to the next stop, or to the end. Raises what the model raises."""
        self._go.put(None)
        self._wait()

    def _wait(self) -> None:
        self._back.get()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Let the model end where it stands, or where it stops next."""
        self.cancelled = True
        self._go.put(None)

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
        self._back.put(None)

    def stop(self, text: str, mark: Any) -> None:
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
                self._back.put(None)
                self._go.get()
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


FORMS = ("module", "path", "function")
SILENT = ("rows", "state")
"""Forms that make no op: nothing has to match them where no calls are captured."""


class MarkWatch:
    """What rules say of a model, where no graph is captured."""

    def __init__(self, model: Callable[..., Any], rules: Sequence[MarkRule]) -> None:
        self.hooks: list[Any] = []
        self.local = threading.local()
        self.codes: dict[int, MarkRule] = {}
        self.silent = [rule for rule in rules if rule.form in SILENT]
        for rule in rules:
            if rule.form not in FORMS + SILENT:
                raise CaptureError(
                    f"mark: boundary mode captures no calls, so {rule} has nothing to match. "
                    "Use mark, mark_module, mark_path or mark_function."
                )
            if rule.form == "function":
                self.codes.setdefault(id(getattr(rule.wanted, "__code__", rule.wanted)), rule)
        if isinstance(model, nn.Module):
            for path, module in model.named_modules():
                about = [rule for rule in rules if _is_about(rule, path, module)]
                for rule in about[:1]:  # of two rules the first wins
                    self._hook(module, rule)

    def _hook(self, module: nn.Module, rule: MarkRule) -> None:
        def hook(what: str, *_: Any) -> None:
            if getattr(self.local, "inside", False):  # modules may be shared with other models
                tell(what, rule)

        self.hooks.append(module.register_forward_pre_hook(partial(hook, "enter")))
        self.hooks.append(module.register_forward_hook(partial(hook, "leave")))

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def __enter__(self) -> None:
        self.local.inside = True
        if self.codes:
            self.local.before = sys.getprofile()
            sys.setprofile(self._profile)

    def __exit__(self, *error: object) -> None:
        self.local.inside = False
        if self.codes:
            sys.setprofile(self.local.before)

    def _profile(self, frame: Any, event: str, function: Any) -> None:
        what = function if event.startswith("c_") else frame.f_code
        rule = self.codes.get(id(what))
        if rule is not None:
            tell("enter" if event.endswith("call") else "leave", rule)


def tell(what: str, rule: MarkRule) -> None:
    """Tell who listens that the model enters or leaves the mark of a rule."""
    heard = listener()
    if heard is not None:
        heard.stop(f"{what} {rule.mark.name}", rule)


def _is_about(rule: MarkRule, path: str, module: nn.Module) -> bool:
    if rule.form == "path":
        return bool(rule.wanted.fullmatch(path))
    is_class = isinstance(rule.wanted, type)
    return rule.form == "module" and (
        isinstance(module, rule.wanted) if is_class else module is rule.wanted
    )


@dataclass
class Stretch:
    """The calls between two boundaries; `calls`: in which modules they stood, and if they count."""

    mark: Mark | None = None
    num_calls: int = 0
    flops: int = 0
    touches: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    calls: dict[tuple[Stack, bool], None] = field(default_factory=dict)

    def joined(self, later: Stretch) -> Stretch:
        """This stretch and the next as one: the mark is that of the one that computes."""
        return Stretch(
            self.mark if self.num_calls else later.mark,
            self.num_calls + later.num_calls,
            self.flops + later.flops,
            self.touches | later.touches,
            self.writes | later.writes,
            self.calls | later.calls,
        )


@dataclass(frozen=True)
class Halt:
    """A boundary that the model came to, and the stretch before it; `inside`: by which modules."""

    text: str
    stretch: Stretch
    inside: Stack = ()
    kind: str = ""
    communicator: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "opaque"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens to a model that runs as it is, and to every operator that it calls."""

    def __init__(self, eager: Eager, paths: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eager, self.paths = eager, paths
        self.halts: list[Halt] = []
        self.unsplit = ""
        self.rules: set[MarkRule] = set()
        self._marks: list[Mark] = []
        self._stretch = Stretch()
        self._fresh: set[int] = set()
        self._called: Any = None

    def __enter__(self) -> Recorder:
        self._random = torch.get_rng_state()
        self._listening = listening(self)
        self._listening.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._listening.__exit__(*error)
        if not torch.equal(self._random, torch.get_rng_state()):
            self.refuse("random: the model draws numbers, and parts would draw others")
        if error[0] is None:
            self._halt("the end")

    def refuse(self, why: str) -> None:
        """The model must not be cut; the first reason stays."""
        self.unsplit = self.unsplit or why

    def stop(self, text: str, mark: Any) -> None:
        self._halt(text)
        if isinstance(mark, MarkRule):
            self.rules.add(mark)
            mark = mark.mark
        if text.startswith("enter"):
            self._marks.append(mark)
            if mark.rows in ("mixing", "random", "additive"):
                self.refuse(f"rows: mark {mark.name!r} is declared {mark.rows}")
        else:
            self._marks.pop()
        self._stretch.mark = self._marks[-1] if self._marks else None

    def talk(self, caught: EagerCollective) -> Any:
        """The model calls a collective: what it changes counts to the stretch before it."""
        if caught.kind in BETWEEN_TWO:
            self.refuse(f"collective: {caught.kind} is for one part only")
            return caught.pass_on()
        # Inside of another operator (a functional form, a DTensor's) it works on what that made.
        if self._called.namespace == "c10d" and caught.kind != "barrier":
            self._stretch.writes |= storages_of(caught.args[0]) - self._fresh
        tensor, dtype = caught.tensor, str(caught.tensor.dtype).removeprefix("torch.")
        facts = (caught.kind, caught.communicator, tuple(tensor.shape), dtype)
        self._halt(caught.text, modules_here(self.paths), *facts)
        return self.eager.talk(caught)

    def _halt(self, text: str, *facts: Any) -> None:
        self.halts.append(Halt(text, self._stretch, *facts))
        self._stretch = Stretch(self._stretch.mark)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        stretch, self._called = self._stretch, func
        results = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            return results
        stretch.num_calls += 1
        if not isinstance(func, OpOverload):
            return results
        flops = int(flops_of(func, (args, kwargs), results))
        stretch.flops += flops
        stretch.calls[modules_here(self.paths), flops > 0] = None
        given, made = storages_of((args, kwargs)), storages_of(results)
        named = bind(func, args, kwargs)
        stretch.touches |= given - self._fresh
        stretch.writes |= storages_of(written_by(func, named)) - self._fresh
        self._fresh |= made if "lift_fresh" in str(func) else made - given
        if "batch_norm" in str(func) and named.get("training", named.get("train", True)):
            self.refuse(f"mixing: {func} looks at all rows while it trains")
        return results


def modules_here(paths: Mapping[int, str]) -> Stack:
    """The modules whose calls are under way in this thread; `paths`: by the ids of modules."""
    call: Any = nn.Module.__call__
    frame: FrameType | None = sys._getframe(1)
    found: list[tuple[str, type]] = []
    while frame is not None:
        module = frame.f_locals["self"] if frame.f_code is call.__code__ else None
        if id(module) in paths:
            found.insert(0, (paths[id(module)], type(module)))
        frame = frame.f_back
    return tuple(found)


def storages_of(nest: Any) -> set[int]:
    """A number for the bytes of every tensor in a nest; a tensor of tensors has several."""
    numbers: set[int] = set()
    for leaf in tree_leaves(nest):
        if is_traceable_wrapper_subclass(leaf):
            numbers |= storages_of([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            numbers.add(int(leaf.untyped_storage()._cdata))  # views share it
    return numbers
