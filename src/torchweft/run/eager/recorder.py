"""The `Recorder`: watches the first run of an eager model, and keeps what a plan needs to know.

    with Recorder(eager) as recorder: outputs = model(x)
    recorder.halts      the boundaries it came to, each with the stretch of calls before it

A stretch tells how many operators it called, their flops, and which bytes it touched and changed
that were there before the call. What keeps a model from being cut is noted in `unsplit`.

The `MarkWatch` tells the listener of a thread when its model enters or leaves a mark that a rule is
about; marks in model code tell by themselves. Its hooks stay on the model until `close` and do
nothing outside of `with watch`. Functions are seen by the interpreter's profile of the thread,
which costs about a tenth of a microsecond for every Python call of the model, and only where there
is such a rule.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from torchweft.capture.marks import Mark, MarkRule, listener, listening
from torchweft.errors import CaptureError
from torchweft.private.core import (
    OpOverload,
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    tree_leaves,
)
from torchweft.run.eager.parts import BETWEEN_TWO, Eager, EagerCollective

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
    """The calls between two boundaries."""

    mark: Mark | None = None
    num_calls: int = 0
    flops: int = 0
    touches: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def joined(self, later: Stretch) -> Stretch:
        """This stretch and the next as one: the mark is that of the one that computes."""
        return Stretch(
            self.mark if self.num_calls else later.mark,
            self.num_calls + later.num_calls,
            self.flops + later.flops,
            self.touches | later.touches,
            self.writes | later.writes,
        )


@dataclass(frozen=True)
class Halt:
    """A boundary that the model came to, and the stretch before it."""

    text: str
    stretch: Stretch
    kind: str = ""
    communicator: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = "opaque"


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens to a model that runs as it is, and to every operator that it calls."""

    def __init__(self, eager: Eager) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eager = eager
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
        """The model enters or leaves a mark."""
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
        self._halt(caught.text, *facts)
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
        stretch.flops += _flops(func, args, kwargs, results)
        given, made = storages_of((args, kwargs)), storages_of(results)
        stretch.touches |= given - self._fresh
        stretch.writes |= _written(func, args, kwargs) - self._fresh
        self._fresh |= made if "lift_fresh" in str(func) else made - given
        if "batch_norm" in str(func) and _trains(func, args, kwargs):
            self.refuse(f"mixing: {func} looks at all rows while it trains")
        return results


def storages_of(nest: Any) -> set[int]:
    """A number for the bytes of every tensor in a nest; a tensor of tensors has several."""
    numbers: set[int] = set()
    for leaf in tree_leaves(nest):
        if is_traceable_wrapper_subclass(leaf):
            numbers |= storages_of([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, torch.Tensor):
            numbers.add(int(leaf.untyped_storage()._cdata))  # views share it
    return numbers


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
    written = [
        args[number] if number < len(args) else kwargs.get(argument.name)
        for number, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return storages_of(written) if written else set()


def _trains(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    name = next((name for name in ("training", "train") if name in names), "")
    at = names.index(name) if name else len(args)
    return bool(args[at] if at < len(args) else kwargs.get(name, not name))


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any) -> int:
    count = flop_registry.get(func.overloadpacket)
    try:
        return int(count(*args, **kwargs, out_val=results)) if count is not None else 0
    except Exception:  # a count is a help, never a reason to fail
        return 0
