"""The `State` of one dynamic model: how calls of its modules come to the recording under way.

A module called with tensors and plain constants is one op: its cell is traced at the first call
with these shapes. A module that gets anything else (a tree), has hooks, sets attributes, or cannot
be traced (it looks at numbers) is *inline*: its forward runs in Python and records what it calls.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.recording import REFUSED, Recording
from torchweft.dynamic.tracing import Callee, CellBook, CellEntry
from torchweft.errors import CaptureError
from torchweft.private.core import _reparametrize_module
from torchweft.source import Source

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MAX_ARGS = 8
_TEMPLATE = """
def call(module, {params}, *more, **options):
    try:
        home, used, ops, extend, first, second = table[{kinds}, module.training]
    except (KeyError, AttributeError):
        home = None
    if home is None or more or options:
        return unseen(*[each for each in ({names},) if each is not missing], *more, **options)
    if not ops:
        home.used.append(used)
    number = home.next
    extend((number, {ids}))
    one = new(Lazy)
    one.id = number
    one.kind = first
    if second is None:
        home.next = number + 1
        return one
    home.next = number + 2
    two = new(Lazy)
    two.id = number + 1
    two.kind = second
    return one, two
"""


class State:
    """The modules of one dynamic model, and what is known of them between calls.

    flush: runs what is pending in a recording.
    """

    def __init__(
        self,
        model: nn.Module,
        inline: tuple[type[nn.Module], ...],
        flush: Callable[[Recording], None],
    ) -> None:
        self.model, self.inline, self.flush = model, inline, flush
        self.book = CellBook(dict((*model.named_parameters(), *model.named_buffers())))
        weights = self.book.weights
        self.device = next(iter(weights.values())).device if weights else torch.device("cpu")
        self.inner: dict[nn.Module, tuple[nn.Module, ...]] = {}
        self.slow: dict[nn.Module, Callable[..., Any]] = {}
        self.stock: dict[nn.Module, Any] = {}  # the call that a module had before
        self.fast: dict[nn.Module, Fast] = {}
        self.recording: Recording | None = None
        self.online = False  # whether a call ever needed numbers before its end
        self.slots: list[tuple[Mapping[str, Tensor | None], str, str]] = [
            (kept, key, self.book.names[id(weight)])
            for module in model.modules()
            for kept in (module._parameters, module._buffers)
            for key, weight in kept.items()
            if weight is not None
        ]  # where weights are
        self.modules = {module: name for name, module in model.named_modules() if name}
        self.children = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if name.isidentifier() and type(parent).__getattr__ is nn.Module.__getattr__
        ]
        for module in self.modules:  # their calls come to us
            self.slow[module] = partial(self._call, module)
            self.stock[module] = module._compiled_call_impl
            module._compiled_call_impl = self.slow[module]

    def close(self) -> None:
        """Give the modules their own calls back, but for those that got others meanwhile."""
        for module, slow in self.slow.items():
            if module._compiled_call_impl is slow:
                module._compiled_call_impl = self.stock[module]

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """A new recording; module calls inside go into it."""
        if self.recording is not None:
            raise CaptureError("dynamic: this model is being recorded already, in another call.")
        for kept, key, name in self.slots:  # what was done to the model since: other weights, hooks
            new = kept.get(key)
            if new is not None and new is not self.book.weights[name]:
                self.book.replace(name, new)
        if self.fast and (not self.book.entries or _hooked(self.modules)):
            self.fast.clear()  # the fast way does not look for hooks
        recording = self.recording = Recording(self.book, self.device, self.flush)
        collecting = gc.isenabled()
        gc.disable()  # thousands of small objects would wake it again and again, for nothing
        for parent, name, child in self.children:  # nn.Module finds them slowly
            if parent._modules.get(name) is child:
                vars(parent)[name] = child
        worn = list(self.fast.values())
        for fast in worn:
            fast.wear(True)
        try:
            yield recording
        finally:
            self.recording = None
            self.online = self.online or recording.online
            for fast in worn:
                fast.wear(False)
            for parent, name, _ in self.children:
                vars(parent).pop(name, None)
            recording.close()
            if collecting:
                gc.enable()

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """A module's call: an op, or its own forward."""
        recording = self.recording
        if (
            recording is None
            or recording.paused
            or threading.get_ident() not in recording.threads
            or isinstance(module, self.inline)
        ):
            return _plain(module, args, kwargs)
        if module not in self.inner:
            self.inner[module] = tuple(module.modules())
        inner = self.inner[module]
        if _hooked(inner):
            return _plain(module, args, kwargs)

        def call(given: Mapping[str, Tensor], args: tuple[Any, ...], options: Any) -> Any:
            with _unchanged(inner), _reparametrize_module(module, dict(given), tie_weights=True):
                made = _plain(module, args, options)
                now = {*map(id, module.buffers()), *map(id, module.parameters())}
                if not now <= {*map(id, given.values())}:
                    raise CaptureError("it replaces its buffers or parameters.")
                return made

        key, name = (module, module.training), self.modules[module]
        lookup = int(
            isinstance(module, nn.Embedding)
            and type(module).forward is nn.Embedding.forward
            and not (module.max_norm or module.sparse or module.scale_grad_by_freq)
        )
        callee = Callee(key, name, call, module, lookup, partial(self._learn, module))
        made = recording.call(callee, args, kwargs)
        return _plain(module, args, kwargs) if made is REFUSED else made

    def _learn(self, module: nn.Module, entry: CellEntry, words: torch.dtype | None) -> None:
        """Let such calls of this module go the fast way, from the next recording on."""
        num_args = len(entry.cell.reads)
        if module not in self.fast:
            if type(module).__call__ is not nn.Module.__call__ or not 0 < num_args <= MAX_ARGS:
                return
            self.fast[module] = Fast(module, self.slow[module], num_args)
        self.fast[module].learn(entry, words)


def _hooked(modules: Iterable[nn.Module]) -> bool:
    return any(getattr(module, hook) for module in modules for hook in _HOOKS)


def _plain(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A module's own call, with its hooks."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@contextmanager
def _unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Raise if a module sets attributes inside; they get their old values back."""
    before = [dict(vars(module)) for module in modules]
    changed = False
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            now = vars(module)
            if now.keys() != old.keys() or any(now[key] is not old[key] for key in old):
                changed = True
                now.clear()
                now.update(old)
    if changed:
        raise CaptureError("it sets attributes of modules.")


class Fast:
    """The fast way to record a module: a call of fixed arity that knows its cells. Entries by the
    specs of their arguments, for good; and `table` by their kinds, for one recording.

    Recording is Python at every op, so it decides how small an op may be. For calls that were seen
    before, with lazy values as positional arguments and one or two results, the template does no
    more than look up the cell and write down numbers; everything else goes the slow way.
    """

    def __init__(self, module: nn.Module, slow: Callable[..., Any], num_args: int) -> None:
        self.module, self.slow, self.num_args = module, slow, num_args
        self.entries: dict[Any, Any] = {}
        self.table: dict[Any, Any] = {}
        self.lookups: dict[Any, Any] = {}  # entries of lookups, by the dtype of words
        self.own = type(module)
        self.worn = _class(self)

    def wear(self, recording: bool) -> None:
        """Give the module its class: the fast one while there is a recording, else its own."""
        self.table.clear()
        object.__setattr__(self.module, "__class__", self.worn if recording else self.own)

    def learn(self, entry: CellEntry, words: torch.dtype | None = None) -> None:
        """Let calls of an entry go the fast way, if they can; words: lookups of this dtype, too."""
        if words is not None:
            self.lookups[words, self.module.training] = entry
        makes = entry.cell.makes
        flat = entry.unflatten is None or (entry.unflatten is tuple and len(makes) == 2)
        if flat and len(makes) <= 2 and len(entry.cell.reads) == self.num_args:
            self.entries[(*entry.cell.reads, self.module.training)] = entry

    def unseen(self, *args: Any, **options: Any) -> Any:
        """A call that is not in the table: put it there, or go the slow way."""
        if options or len(args) != self.num_args or any(type(arg) is not Lazy for arg in args):
            return self.slow(*args, **options)
        home, training = args[0].home, self.module.training
        if not home.open or any(arg.home is not home for arg in args):
            return self.slow(*args)
        entry = self.entries.get((*[arg.spec for arg in args], training))
        if entry is not None:
            kinds = [home.kind(spec) for spec in entry.cell.makes]
            row = home, entry, entry.ops, entry.ops.extend, *kinds, None
            self.table[(*[arg.kind for arg in args], training)] = row[:6]
        elif self.lookups and len(args[0].spec.shape) == 1 and len(args[0]):
            entry = self.lookups.get((args[0].spec.dtype, training))
            if entry is not None:
                return home.each(entry, args[0])
        return self.slow(*args)


def _class(fast: Fast) -> type[nn.Module]:
    """The class of a module while it is recorded. It changes its class, as modules under FSDP do,
    because the call of `nn.Module` alone would take half of the time."""
    names = [f"a{number}" for number in range(fast.num_args)]
    source = _TEMPLATE.format(
        params=", ".join(f"{name}=missing" for name in names),
        names=", ".join(names),
        kinds=", ".join(f"{name}.kind" for name in names),
        ids=", ".join(f"{name}.id" for name in names),
    )
    space: dict[str, Any] = {
        "table": fast.table, "unseen": fast.unseen, "Lazy": Lazy, "missing": object(),
        "new": object.__new__,
    }  # fmt: skip
    (call,) = Source("fast call", space).build(source.splitlines(), "call")
    own = fast.own
    return type(own.__name__, (own,), {"__call__": call, "__module__": own.__module__})
