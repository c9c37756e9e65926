"""The `State` of one dynamic model: its cells, and how calls of its modules become ops.

A module called with tensors and plain constants is one op: its cell is traced at the first call
with these shapes. A module that gets anything else (a tree), has hooks, sets attributes, or cannot
be traced (it looks at numbers) is *inline*: its forward runs in Python and records what it calls.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.dynamic.fast import MAX_ARGS, Fast
from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.pattern import Weight, fill, weights_in
from torchweft.dynamic.recording import Recording
from torchweft.dynamic.tracing import trace
from torchweft.errors import CaptureError
from torchweft.private.core import _reparametrize_module, pytree
from torchweft.run.workers.cell import Cell, Spec, unpack_cell

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (int, float, bool, str, type(None), complex, torch.dtype, torch.device, type(Ellipsis))


class CellEntry:
    """A cell with its pending ops: of each the first value it makes, and the values it reads."""

    __slots__ = ("cell", "ops", "unflatten")

    def __init__(self, cell: Cell, unflatten: Callable[[list[Lazy]], Any] | None = None) -> None:
        self.cell = cell
        self.unflatten = unflatten
        self.ops: list[int] = []


class _OddArgumentError(Exception):
    """An argument that is neither a tensor nor a plain constant."""


class State:
    """Everything that is known of one dynamic model between its calls."""

    def __init__(self, model: nn.Module, inline: tuple[type[nn.Module], ...] = ()) -> None:
        self.model, self.inline = model, inline
        self.weights: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.entries: dict[Any, CellEntry | str] = {}
        self.inner: dict[nn.Module, tuple[nn.Module, ...]] = {}
        self.slow: dict[nn.Module, Callable[..., Any]] = {}
        self.stock: dict[nn.Module, Any] = {}  # the call that a module had before
        self.fast: dict[nn.Module, Fast] = {}
        self.recording: Recording | None = None
        self.paused = False
        self.online = False  # whether a call ever needed numbers before its end
        self.reasons: Counter[str] = Counter()
        self.flush: Callable[[Recording], None] = lambda recording: None
        self.threads: set[int] = set()  # that record
        self.slots: list[tuple[Mapping[str, Tensor | None], str, str]] = []  # where weights are
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            self.weights[name] = weight
            self.names[id(weight)] = name
        for module in model.modules():
            for kept in (module._parameters, module._buffers):
                for key, found in kept.items():
                    if found is not None:
                        self.slots.append((kept, key, self.names[id(found)]))
        self.device = (
            next(iter(self.weights.values())).device if self.weights else torch.device("cpu")
        )
        self.modules = {module: name for name, module in model.named_modules() if name}
        self.children = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if name.isidentifier() and type(parent).__getattr__ is nn.Module.__getattr__
        ]
        for module in self.modules:
            self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Let a module's calls come to us while there is a recording."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            return self.call_module(module, args, kwargs)

        self.slow[module], self.stock[module] = slow, module._compiled_call_impl
        module._compiled_call_impl = slow

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
        self._refresh()
        recording = self.recording = Recording(self)
        self.threads = {threading.get_ident()}
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
            for fast in worn:
                fast.wear(False)
            for parent, name, _ in self.children:
                vars(parent).pop(name, None)
            for entry in recording.used:  # pending only if the call failed
                entry.ops.clear()
            recording.close()
            if collecting:
                gc.enable()

    def _refresh(self) -> None:
        """See what was done to the model since: other weights, hooks."""
        for kept, key, name in self.slots:
            old, new = self.weights[name], kept.get(key)
            if new is None or new is old:
                continue
            if new.shape != old.shape or new.dtype != old.dtype:
                self.entries.clear()
                self.fast.clear()
            del self.names[id(old)]
            self.weights[name], self.names[id(new)] = new, name
        if self.fast and any(getattr(m, hook) for m in self.modules for hook in _HOOKS):
            self.fast.clear()  # the fast way does not look for hooks

    # Real tensors.

    def real(self, item: Any) -> Any:
        """`item` itself, or the tensor behind it if it is lazy."""
        return item.home.real(item) if type(item) is Lazy else item

    def fetch(self, recording: Recording, lazy: Lazy) -> Tensor:
        """The tensor of a value; what is pending runs first."""
        if (given := recording.given.get(lazy.id)) is not None:
            return given
        if recording.store is None or lazy.id >= recording.store.num_values:
            self.online = self.online or self.recording is recording
            self.flush(recording)
        found: Tensor = recording.store.value(lazy.id, lazy.spec)
        return found

    # Calls become ops.

    def unpack(self, spec: Spec) -> CellEntry:
        """The entry of taking values of a spec apart."""
        found = self.entries.get(spec)
        if found is None:
            found = self.entries[spec] = CellEntry(unpack_cell(spec))
        assert isinstance(found, CellEntry), "it is never refused"
        return found

    def call_function(
        self, recording: Recording, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A torch function as an op; at once on real tensors where it cannot be one."""

        def call(weights: Mapping[str, Tensor], given: tuple[Any, ...], options: Any) -> Any:
            return func(*given, **options)

        name = getattr(func, "__name__", "function")
        made = self._op(recording, func, name, call, args, kwargs)
        return recording.at_once(func, args, kwargs) if made is _REFUSED else made

    def call_module(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call: an op, or its own forward."""
        recording = self.recording
        ours = threading.get_ident() in self.threads
        if recording is None or self.paused or not ours or isinstance(module, self.inline):
            return _plain(module, args, kwargs)
        if module not in self.inner:
            self.inner[module] = tuple(module.modules())
        inner = self.inner[module]
        if any(getattr(each, hook) for each in inner for hook in _HOOKS):
            return _plain(module, args, kwargs)

        def call(given: Mapping[str, Tensor], args: tuple[Any, ...], options: Any) -> Any:
            with _unchanged(inner), _reparametrize_module(module, dict(given), tie_weights=True):
                made = _plain(module, args, options)
                now = {*map(id, module.buffers()), *map(id, module.parameters())}
                if not now <= {*map(id, given.values())}:
                    raise CaptureError("it replaces its buffers or parameters.")
                return made

        key = module, module.training
        made = self._op(recording, key, self.modules[module], call, args, kwargs)
        if made is _REFUSED:
            return _plain(module, args, kwargs)
        return made

    def _op(
        self,
        recording: Recording,
        target: Any,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """One op; of a lookup one for each word, so that one cell serves any number of them."""
        words = _looked_up(target, args, kwargs)
        if words is not None and words.home is recording:
            word = recording.rows(words, 1)[0], *args[1:]
            entry, _ = self._entry(recording, target, name, call, word, kwargs)
            if entry is not None:
                module = target[0] if isinstance(target, tuple) else None
                if module in self.fast:
                    self.fast[module].lookups[words.dtype, target[1]] = entry
                return recording.each(entry, words)
        entry, values = self._entry(recording, target, name, call, args, kwargs)
        if entry is None:
            return _REFUSED
        made = recording.add(entry, values)
        return entry.unflatten(made) if entry.unflatten is not None else made[0]

    def _entry(
        self,
        recording: Recording,
        target: Any,
        name: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[CellEntry | None, list[Lazy]]:
        """The entry of a call (None: it cannot be an op), and the values among its arguments."""
        values: list[Lazy] = []
        try:
            pattern = self._pattern(recording, (args, kwargs), values)
        except _OddArgumentError:
            return None, values
        key = target, pattern, torch.is_autocast_enabled("cpu")
        entry = self.entries.get(key)
        if entry is None:
            module = target[0] if isinstance(target, tuple) else None
            weights = (
                dict((*module.named_parameters(), *module.named_buffers())) if module else None
            )
            entry = self._trace(name, call, weights, pattern, [value.spec for value in values])
            self.entries[key] = entry
            plain = not kwargs and len(values) == len(args) and isinstance(entry, CellEntry)
            if module and plain and all(type(arg) is Lazy for arg in args):
                self._speed_up(module, entry)  # type: ignore[arg-type]
        if isinstance(entry, str):
            self.reasons[entry] += 1
            return None, values
        return entry, values

    def _trace(
        self,
        name: str,
        call: Callable[..., Any],
        weights: Mapping[str, Tensor] | None,
        pattern: Any,
        specs: list[Spec],
    ) -> CellEntry | str:
        """The entry of a new cell, or the reason why there is none."""
        shared = weights
        if shared is None:
            shared = {each: self.weights[each] for each in sorted(set(weights_in(pattern)))}
        outer: list[Any] = []

        def function(given: Mapping[str, Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
            args, options = fill(pattern, iter(rows), given)
            leaves, tree = pytree.tree_flatten(call(given, args, options))
            outer[:] = [tree]
            if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise CaptureError("it gives something that is no tensor.")
            return leaves

        was, self.paused = self.paused, True
        try:
            number = sum(isinstance(each, CellEntry) for each in self.entries.values())
            cell = trace(f"{_word(name)}.{number}", function, specs, shared)
        except CaptureError as error:
            return f"{name}: {str(error).partition(': ')[2]}"
        finally:
            self.paused = was
        names = tuple(self.names[id(shared[each])] for each in cell.weights)
        cell = Cell(
            cell.name, cell.reads, cell.makes, names, cell.calls, cell.outputs,
            flops=cell.flops, num_prepared=cell.num_prepared,
        )  # fmt: skip
        tree = outer[0]
        if tree.is_leaf():
            return CellEntry(cell)
        if tree.type is tuple and all(child.is_leaf() for child in tree.children()):
            return CellEntry(cell, tuple)
        return CellEntry(cell, lambda made: pytree.tree_unflatten(made, tree))

    def _pattern(self, recording: Recording, item: Any, values: list[Lazy]) -> Any:
        """What stays of the arguments when tensors are taken out, as a key."""
        kind = type(item)
        if kind is Lazy:
            if item.home is not recording:
                item = recording.input(item.home.real(item))
            values.append(item)
            return item.spec
        if isinstance(item, Tensor):
            if (name := self.names.get(id(item))) is not None:
                return Weight, name
            values.append(recording.input(item))
            return values[-1].spec
        if kind in (list, tuple):
            return kind, tuple([self._pattern(recording, each, values) for each in item])
        if kind is dict:
            found = [(key, self._pattern(recording, each, values)) for key, each in item.items()]
            return kind, tuple(found)
        if kind is slice:
            return kind, item.start, item.stop, item.step
        if isinstance(item, _PLAIN):
            return kind, item
        raise _OddArgumentError

    def _speed_up(self, module: nn.Module, entry: CellEntry) -> None:
        """Let calls of this module with these shapes go the fast way, from the next call on."""
        num_args = len(entry.cell.reads)
        known = module in self.fast or type(module).__call__ is not nn.Module.__call__
        if not known and 0 < num_args <= MAX_ARGS:
            self.fast[module] = Fast(module, self.slow[module], num_args)
        if module in self.fast:
            self.fast[module].learn(entry)


def _plain(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A module's own call, with its hooks."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


_REFUSED = object()


def _looked_up(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lazy | None:
    """The words that a call looks up one by one, if that is all it does."""
    if kwargs or not args or type(args[0]) is not Lazy or len(args[0].spec.shape) != 1:
        return None
    module = target[0] if isinstance(target, tuple) else None
    plain = (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and not (module.max_norm or module.sparse or module.scale_grad_by_freq)
    )
    lookup = target is functional.embedding and len(args) == 2
    return args[0] if (plain or lookup) and len(args[0]) else None


def _word(name: str) -> str:
    """A name as it may stand in a graph."""
    kept = "".join(
        each if (each.isascii() and each.isalnum()) or each in "_." else "_" for each in name
    )
    return kept if kept[:1].isalpha() or kept[:1] == "_" else f"_{kept}"


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
