"""A `Recording`: what one call of a dynamic model (or one over many inputs) asked for.

    module called with lazy values  ->  one op of the module's cell
    torch function on lazy values   ->  one op of the function's cell
    stack of rows, row of a value   ->  pack and unpack: gathers, no cell is traced
    numbers are needed (item, bool) ->  all that is pending runs, then the code goes on

What cannot be a cell (random numbers, changes in place, shapes that depend on data) runs at once
on real tensors: always right, never batched, and counted with its reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchweft.dynamic.lazy import Kind, Lazy, lazies, real
from torchweft.dynamic.tracing import PLAIN, Callee, CellBook, CellEntry, Weight
from torchweft.errors import CaptureError
from torchweft.private.core import pytree
from torchweft.run.modes import Modes
from torchweft.run.workers.cell import Spec, spec_of
from torchweft.run.workers.grouping import Given, Ops, numbers_of, read_by_ops
from torchweft.run.workers.recorded import RecordedPart

REFUSED = object()
_NUMBERS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__repr__, Tensor.__str__, Tensor.data_ptr,
    Tensor.__format__, Tensor.__array__, Tensor.untyped_storage, torch.equal, torch.allclose,
    Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.__dlpack__, Tensor.is_nonzero,
}  # fmt: skip


class _OddArgumentError(Exception):
    """An argument that is neither a tensor nor a plain constant."""


class Recording:
    """Values by number, ops by cell, and the inputs that are real tensors.

    flush: runs what is pending and sets `store`, where computed rows are.
    """

    def __init__(
        self, book: CellBook, device: torch.device, flush: Callable[[Recording], None]
    ) -> None:
        self.book, self.device, self.flush = book, device, flush
        self.open, self.paused = True, False
        self.online = False  # whether numbers were needed before the end
        self.threads = {threading.get_ident()}  # that record
        self.next = 0  # the number of the next value
        self.used: list[CellEntry] = []  # entries with ops that are pending
        self.inputs: dict[int, tuple[Tensor, int]] = {}  # pending: tensor, its version
        # Inputs that were taken apart: the number of the first row (-1: placed), tensor, version.
        self.apart: dict[int, tuple[int, Tensor, int]] = {}
        self.known: dict[int, tuple[Lazy, int]] = {}  # inputs and versions, by identity
        self.given: dict[int, Tensor] = {}  # inputs by number; they are kept
        self.numbers: dict[int, Sequence[int]] = {}  # of the rows of values that were taken apart
        self.rows_of: dict[int, list[Lazy]] = {}  # these rows, where they were asked for
        self.packs: dict[int, tuple[Spec, list[int]]] = {}  # rows of one spec as one value
        self.packed: dict[Spec, set[int]] = {}  # all packs, also those that are not pending
        self.viewed: set[int] = set()
        self.kinds: dict[Spec, Kind] = {}
        self.store: Any = None

    # What user code asks for.

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A torch function with lazy values among its arguments."""
        if not self.open or self.paused or func in _NUMBERS:
            return self.at_once(func, args, kwargs)
        if func is torch.stack and not kwargs and len(args) == 1:
            packed = self._pack(args[0])
            if packed is not None:
                return packed
        callee = self.book.function(func)
        made = self.call(callee, args, kwargs)
        if made is REFUSED:
            made = self.at_once(func, args, kwargs)
        if callee.name in _VIEWS:  # none of them may be changed in place now
            items = (*args, *made) if isinstance(made, (list, tuple)) else (*args, made)
            self.viewed.update(item.id for item in items if type(item) is Lazy)
        return made

    def at_once(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function on real tensors now; what is pending and needed runs before."""
        given, options = pytree.tree_map(real, (args, kwargs))
        with self._pause():
            return func(*given, **options)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Nothing is recorded inside."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def real(self, lazy: Lazy) -> Tensor:
        """The tensor behind a lazy value; what is pending runs first."""
        if (given := self.given.get(lazy.id)) is not None:
            return given
        if self.store is None or lazy.id >= self.store.num_values:
            self.online = self.online or self.open
            self._run_pending()
        made: Tensor = self.store.value(lazy.id, lazy.spec)
        return made

    def _run_pending(self) -> None:
        turn = threading.current_thread()
        if self.open and isinstance(turn, Turn):
            turn.pause()  # until all others need numbers too
        else:
            self.flush(self)

    def select(self, lazy: Lazy, index: int) -> Any:
        """One row of a value: all its rows are taken apart together, once."""
        shape = lazy.spec.shape
        if not shape:
            raise IndexError("invalid index of a 0-dim tensor")
        if not self.open or shape[0] == 0:
            return self.at_once(Tensor.__getitem__, (lazy, index), {})
        if lazy.id not in self.rows_of:
            self.rows_of[lazy.id] = lazies(self._apart(lazy), self._row(lazy))
        return self.rows_of[lazy.id][index]

    def _row(self, lazy: Lazy) -> Kind:
        return self.kind(spec_of(lazy.spec.shape[1:], lazy.spec.dtype))

    def _apart(self, lazy: Lazy) -> Sequence[int]:
        """The numbers of the rows of a value. An input's go to the store as they are."""
        if (known := self.numbers.get(lazy.id)) is not None:
            return known
        given = self.inputs.pop(lazy.id, None)
        if given is None:
            self.add(self.book.unpack(lazy.spec), [lazy])
            numbers = range(self.next - len(lazy), self.next)
        else:
            numbers = range(self.next, self.next + len(lazy))
            self.apart[lazy.id] = self.next, *given
            self.next = numbers.stop
        self.numbers[lazy.id] = numbers
        return numbers

    def change(self, lazy: Lazy, name: str, args: Any, kwargs: Any) -> Lazy:
        """A change in place: the handle stands for the new value from here on."""
        apart = lazy.id in self.numbers or any(lazy.id in rows for rows in self.numbers.values())
        if apart or lazy.id in self.viewed:
            self.refuse_change(lazy, f"{name}()")
        if (tensor := self.given.get(lazy.id)) is not None:  # the caller's own: it is changed
            if self.used or self.packs:
                self._run_pending()  # who read it before sees it as it was
            self.inputs.pop(lazy.id, None)
            made = self.at_once(getattr(Tensor, name), (tensor, *args), kwargs)
        elif hasattr(Tensor, name[:-1]):
            made = self.function(getattr(Tensor, name[:-1]), (lazy, *args), kwargs)
        else:
            made = self.at_once(getattr(Tensor, name), (self.real(lazy).clone(), *args), kwargs)
        made = made if type(made) is Lazy else self.input(made)
        if made.spec is not lazy.spec:
            self.refuse_change(lazy, f"{name}(), which would change its shape or dtype,")
        lazy.id = made.id
        return lazy

    def refuse_change(self, lazy: Lazy, what: str) -> NoReturn:
        """Raise: views of the value would have to change with it."""
        raise CaptureError(
            f"change: {what} on {lazy.spec}, which has views or is one, would change them too. "
            "Make a new value instead (y = x + 1, torch.where), or clone() it before."
        )

    def close(self) -> None:
        """Nothing will be recorded any more. What points back here is let go, so that memory is
        free at once and not when Python looks for circles, which can take longer than the call."""
        self.open = False
        for entry in self.used:  # pending only if the call failed
            entry.ops.clear()
        for kept in (self.kinds, self.rows_of, self.known):
            kept.clear()

    # What goes into the recording.

    def call(self, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one op, or give `REFUSED` if it has no cell; of a lookup one op for each word,
        so that one cell serves any number of them."""
        if callee.lookup and len(args) == callee.lookup and not kwargs:
            words = args[0]
            if type(words) is Lazy and words.home is self and words.ndim == 1 and len(words):
                word = Lazy(self._apart(words)[0], self._row(words))
                entry, _ = self._entry(callee, (word, *args[1:]), kwargs)
                if entry is not None:
                    if callee.learn is not None:
                        callee.learn(entry, words.dtype)
                    return self.each(entry, words)
        entry, values = self._entry(callee, args, kwargs)
        if entry is None:
            return REFUSED
        if callee.learn is not None and not kwargs and all(type(arg) is Lazy for arg in args):
            callee.learn(entry, None)
        made = self.add(entry, values)
        return entry.unflatten(made) if entry.unflatten is not None else made[0]

    def _entry(
        self, callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CellEntry | None, list[Lazy]]:
        """The entry of a call (None: it cannot be an op), and the values among its arguments."""
        values: list[Lazy] = []
        try:
            pattern = self._pattern((args, kwargs), values)
        except _OddArgumentError:
            return None, values
        return self.book.entry(callee, pattern, values, self._pause), values

    def _pattern(self, item: Any, values: list[Lazy]) -> Any:
        """What stays of the arguments when tensors are taken out, as a key."""
        kind = type(item)
        if kind is Lazy:
            if item.kind.home is not self:
                item = self._value(item)
            values.append(item)
            return item.kind.spec
        if isinstance(item, Tensor):
            if (name := self.book.names.get(id(item))) is not None:
                return Weight, name
            values.append(self.input(item))
            return values[-1].spec
        if kind in (list, tuple):
            return kind, tuple([self._pattern(each, values) for each in item])
        if kind is dict:
            return kind, tuple([(key, self._pattern(each, values)) for key, each in item.items()])
        if kind is slice:
            return kind, item.start, item.stop, item.step
        if isinstance(item, PLAIN):
            return kind, item
        raise _OddArgumentError

    def add(self, entry: CellEntry, values: list[Lazy]) -> list[Lazy]:
        """One op of a cell on these values."""
        if not entry.ops:
            self.used.append(entry)
        number = self.next
        entry.ops += [number, *[value.id for value in values]]
        makes = entry.cell.makes
        self.next = number + len(makes)
        return [Lazy(number + at, self.kind(spec)) for at, spec in enumerate(makes)]

    def each(self, entry: CellEntry, lazy: Lazy) -> Lazy:
        """One op of a cell for each row of a value; all that they make is one value."""
        if not entry.ops:
            self.used.append(entry)
        (spec,) = entry.cell.makes
        words = self._apart(lazy)
        numbers = range(self.next, self.next + len(words))
        self.next = numbers.stop
        entry.ops += chain.from_iterable(zip(numbers, words, strict=True))
        made = self._packed(spec, [*numbers])
        self.numbers[made.id] = numbers
        return made

    def kind(self, spec: Spec) -> Kind:
        """The kind of values of a spec."""
        kind = self.kinds.get(spec)
        return kind if kind is not None else self.kinds.setdefault(spec, Kind(spec, self))

    def _new(self, spec: Spec) -> Lazy:
        self.next += 1
        return Lazy(self.next - 1, self.kind(spec))

    def _packed(self, spec: Spec, numbers: list[int]) -> Lazy:
        """Values of one spec as one value."""
        made = spec_of((len(numbers), *spec.shape), spec.dtype)
        self.packs[self.next] = spec, numbers
        self.packed.setdefault(made, set()).add(self.next)
        return self._new(made)

    def input(self, tensor: Tensor) -> Lazy:
        """A real tensor as a value; the same tensor, unchanged, is the same value."""
        version = 0 if tensor.is_inference() else tensor._version
        lazy, old = self.known.get(id(tensor), (None, version))
        if lazy is None or old != version:
            lazy = self._new(spec_of(tensor.shape, tensor.dtype))
            self.known[id(tensor)] = lazy, version
            self.inputs[lazy.id] = tensor, version
            self.given[lazy.id] = tensor
        return lazy

    def inputs_of(self, arguments: Any) -> Any:
        """The arguments of a call with lazy values in the place of tensors."""
        if isinstance(arguments, Tensor):
            return self.input(arguments)
        if type(arguments) is tuple:
            return tuple([self.inputs_of(each) for each in arguments])
        if isinstance(arguments, (list, dict, tuple)):
            return pytree.tree_map(
                lambda item: self.input(item) if isinstance(item, Tensor) else item, arguments
            )
        return arguments

    def _pack(self, items: Any) -> Lazy | None:
        """Rows of one spec as one value, if that is what they are."""
        if not isinstance(items, (list, tuple)) or not items:
            return None
        kind = items[0].kind if type(items[0]) is Lazy else None
        numbers = [item.id for item in items if type(item) is Lazy and item.kind is kind]
        if kind is None or kind.home is not self or len(numbers) < len(items):
            values = [self._value(item) for item in items]
            kind = values[0].kind
            numbers = [value.id for value in values if value.kind is kind]
            if len(numbers) < len(items):
                return None
        packs = self.packed.get(kind.spec)
        if packs is not None and not packs.isdisjoint(numbers):
            return None  # of packs: an op, so that packs consist of rows that somebody makes
        return self._packed(kind.spec, numbers)

    def _value(self, item: Any) -> Lazy:
        return item if type(item) is Lazy and item.home is self else self.input(real(item))

    # What comes out of it.

    def take(self, wanted: Iterable[Lazy] = ()) -> RecordedPart:
        """Everything that is pending, as data, with these values wanted; it is pending no more.

        Raises `CaptureError` if an input was changed in place behind the call that uses it.
        """
        ops = []
        for entry in self.used:
            ops.append(Ops(entry.cell, numbers_of(entry.ops)))
            entry.ops.clear()
        self.used.clear()
        packs, self.packs = self.packs, {}
        values: dict[Spec, list[int]] = {}
        for number, spec in {lazy.id: lazy.spec for lazy in wanted}.items():
            if number not in self.given:
                spec = packs[number][0] if number in packs else spec
                values.setdefault(spec, []).append(number)
        return RecordedPart(self.next, ops, packs, self._pending_inputs(ops, packs), values)

    def _pending_inputs(self, ops: Sequence[Ops], packs: Mapping[int, Any]) -> list[Given]:
        """The pending inputs, with rows of those that were taken apart."""
        whole, apart = dict(self.inputs), self.apart
        specs = {
            number: spec_of(given.shape, given.dtype) for number, (_, given, _) in apart.items()
        }
        read, kinds = set(read_by_ops(specs, self.next, ops)), set(specs.values())
        for spec, numbers in packs.values():
            if spec in kinds:
                read |= specs.keys() & numbers
        for number in read:  # as a whole, too
            whole[number] = apart[number][1:]
        rows = [each for each in apart.values() if each[0] >= 0]
        for tensor, version in (*whole.values(), *(each[1:] for each in rows)):
            if not tensor.is_inference() and tensor._version != version:
                raise CaptureError(
                    f"change: an input of shape {tuple(tensor.shape)} was changed in place after a "
                    "call that has not run yet used it. Change a clone() of it."
                )
        self.inputs.clear()
        self.apart = {
            number: (-1, tensor, version)
            for number, (_, tensor, version) in apart.items()
            if number not in whole
        }
        return [
            *((range(first, first + len(tensor)), tensor) for first, tensor, _ in rows),
            *((range(number, number + 1), tensor[None]) for number, (tensor, _) in whole.items()),
        ]


_VIEWS = frozenset(
    (
        "view", "reshape", "squeeze", "unsqueeze", "transpose", "t", "permute", "expand",
        "expand_as", "narrow", "select", "chunk", "split", "unbind", "flatten", "movedim",
        "swapaxes", "swapdims", "detach", "view_as", "diagonal", "unfold", "__getitem__",
        "__get__", "contiguous", "to", "float", "double", "real",
    )
)  # fmt: skip


class Turn(threading.Thread):
    """A function in a thread of its own, which runs while it has the baton: until it needs numbers.

    Of all turns exactly one runs at a time. When all wait, what they asked for runs once, together,
    and each goes on in turn. A thread takes over the caller's modes.
    """

    def __init__(
        self, function: Callable[[], Any], modes: Modes, back: threading.Semaphore
    ) -> None:
        super().__init__(name="weft turn", daemon=True)
        self.function, self.modes, self.back = function, modes, back
        self.go, self.stopped = threading.Semaphore(0), False
        self.outcome: Future[Any] = Future()

    def run(self) -> None:
        self.go.acquire()
        try:
            with self.modes:
                made = self.function()
        except BaseException as error:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(made)
        self.back.release()

    def step(self) -> None:
        """Give it the baton, and wait until it comes back."""
        self.go.release()
        self.back.acquire()

    def pause(self) -> None:
        """Hand the baton back, and wait until it comes again."""
        self.back.release()
        self.go.acquire()
        if self.stopped:
            raise _StopError


def run_in_turns(
    functions: Sequence[Callable[[], Any]], threads: set[int], flush: Callable[[], None]
) -> list[Any]:
    """The results of all functions; raises the first error, after all others have stopped.

    threads: is given the idents of their threads. flush: runs what all of them wait for.
    """
    modes, back = Modes(), threading.Semaphore(0)
    waiting = turns = [Turn(function, modes, back) for function in functions]
    for turn in turns:
        turn.start()
        threads.add(turn.ident or 0)
    try:
        while waiting:
            for turn in waiting:
                turn.step()
            over = [turn.outcome for turn in waiting if turn.outcome.done()]
            waiting = [turn for turn in waiting if not turn.outcome.done()]
            for outcome in over:
                outcome.result()  # or its error
            if waiting:
                flush()
    finally:
        for turn in waiting:
            turn.stopped = True
            turn.step()
    return [turn.outcome.result() for turn in turns]


class _StopError(BaseException):
    """Thrown into functions that wait when another has failed."""
