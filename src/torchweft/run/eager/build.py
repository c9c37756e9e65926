"""The boundary level: what a recorder saw of an eager model becomes a `Capture`.

    stretch, collective, stretch, ..., stretch        program order, as the first run had it

    op --at0, talk0--> all_reduce --landed0--> op.1 --at1--> ... --> the outputs

Each stretch between two boundaries is an op. What stands between them is not the model's tensors
but the part itself (`at0`: it has come to stop 0), for only the model knows those. A body resumes
the part at hand up to its next stop; a collective is a two-phase op of what the part called there.
Outputs are values with rows, so a plan merges them as it does everywhere.

`Arguments` tell where the rows are among what a call was given, as a `Nest` of leaves. Torch's
pytrees know tuples, lists, dicts and what hosts register; dataclasses are taken apart here.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchweft.capture.bodies.bodies import Body, Function
from torchweft.capture.dynamo import Capture, Slot
from torchweft.capture.guards import SymbolSlot
from torchweft.capture.ops.names import OpNames, Origins
from torchweft.capture.splitters import STATE
from torchweft.errors import RunError, StrategyError
from torchweft.plan.graph import ITEM_BYTES, Batch, Collective, Graph, Op, Value
from torchweft.plan.plan import Plan
from torchweft.plan.sizes import Size
from torchweft.private.core import tree_flatten, tree_unflatten
from torchweft.run.eager.listeners import Halt, Recorder, Stop, Stretch, storages_of

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type, slice, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.nn.Module,
)  # fmt: skip
"""Leaves that hold no rows."""


class Nest:
    """Leaves in a form. `key` is equal for nests of one form."""

    def __init__(self, nest: Any) -> None:
        self.leaves: list[Any] = []
        self._records: list[tuple[Any, tuple[str, ...]]] = []
        self.key = self._take(nest)

    def _take(self, nest: Any) -> tuple[Any, ...]:
        leaves, spec = tree_flatten(nest)
        return (spec, *(self._leaf(leaf) for leaf in leaves))

    def _leaf(self, leaf: Any) -> Any:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = tuple(item.name for item in dataclasses.fields(leaf))
            self._records.append((leaf, names))
            return type(leaf), self._take([getattr(leaf, name) for name in names])
        self.leaves.append(leaf)
        return None

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def with_tensors(self, tensors: Iterable[Any]) -> Any:
        """The same form and leaves, with other tensors in place of its own."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._build(self.key, iter(leaves), iter(self._records))

    def _build(self, key: Any, leaves: Iterator[Any], records: Iterator[Any]) -> Any:
        spec, *inside = key
        items = []
        for form in inside:
            if form is None:
                items.append(next(leaves))
                continue
            record, names = next(records)
            items.append(copy.copy(record))
            for name, value in zip(names, self._build(form[1], leaves, records), strict=True):
                object.__setattr__(items[-1], name, value)
        return tree_unflatten(items, spec)


def is_plain(leaf: Any) -> bool:
    """Whether a leaf other than a tensor surely holds no rows."""
    return isinstance(leaf, PLAIN) or (callable(leaf) and hasattr(leaf, "__code__"))


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, how many rows they have, and which of their tensors have them."""

    nest: Nest
    tensors: tuple[Tensor, ...]
    batched: tuple[bool, ...]
    rows: int

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> Arguments:
        """The commonest size of dim `dim` of the tensors is the batch."""
        nest = Nest((args, kwargs))
        tensors = tuple(nest.tensors)
        sizes = [each.shape[dim] if each.dim() > dim else None for each in tensors]
        counts = Counter(size for size in sizes if size is not None)
        rows = counts.most_common(1)[0][0] if counts else 0
        return Arguments(nest, tensors, tuple(rows > 0 and size == rows for size in sizes), rows)

    def holds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments are still the same: nothing was put into a list or taken out."""
        now = Nest((args, kwargs))
        same = zip(self.nest.leaves, now.leaves, strict=False)
        return now.key == self.nest.key and all(before is after for before, after in same)


class RowSpan:
    """The rows of a part, in a form that a plan can split."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.shape = (stop - start,)

    def narrow(self, dim: int, start: int, length: int) -> RowSpan:
        return RowSpan(self.start + start, self.start + start + length)


def rows_at(shape: Sequence[int], rows: int, dim: int) -> int | None:
    """The dim of a shape where the rows are: `dim` itself, the only such one, or a multiple."""
    if len(shape) > dim and shape[dim] == rows:
        return dim
    equal = [at for at, size in enumerate(shape) if size == rows]
    if equal:
        return equal[0] if len(equal) == 1 else None
    return next((at for at, size in enumerate(shape) if size and size % rows == 0), None)


BATCH = "s0"
CALL, ROWS = "weft.call", "weft.rows"
"""Inputs of every graph of this level: the call at hand, and which rows a part has."""


@dataclass(frozen=True)
class ChangedBytes:
    """Bytes that a model changes and that outlive the call: an argument, a buffer, or unknown."""

    name: str
    slot: int | None = None
    path: str = ""

    @property
    def known(self) -> bool:
        """Whether it can be looked at, and put back."""
        return self.slot is not None or bool(self.path)

    def tensor(self, model: Any, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.slot is not None:
            return tensors[self.slot]
        owner, _, name = self.path.rpartition(".")
        return getattr(model.get_submodule(owner), name)  # type: ignore[no-any-return]


@dataclass
class EagerForm:
    """Calls of one form: what was built of the first, and what has become of the others.

    unsplit: why they must run whole; empty if they need not. piece: what runs them by plans.
    tried: whether a split was compared with the whole call.
    fallen: why they run as they are from now on; empty while plans run them.
    """

    captured: Capture
    stops: tuple[Stop, ...]
    changed: tuple[ChangedBytes, ...]
    unsplit: str
    piece: Any = None
    tried: bool = False
    fallen: str = ""


def build(
    recorder: Recorder,
    given: Arguments,
    outputs: Any,
    *,
    model: Any,
    name: str,
    dim: int,
    states: Sequence[str] = (),
) -> EagerForm:
    """The graph of a recorded call with its bodies and stops, and why it cannot be cut if so.

    states: the names of the side state that is to be in force wherever a part goes on.
    """
    nest = Nest(outputs)
    unsplit = recorder.unsplit or _unsplit_arguments(given)
    unsplit = unsplit or _unsplit_outputs(nest, given.rows, dim)
    builder = _Builder(recorder.halts, given, None if unsplit else Batch(0), dim)
    builder.add_changed(given, model)
    builder.add_states(states)
    makes = builder.add_ops(nest.tensors)
    names = makes if nest.tensors else ()
    graph = Graph(
        name, tuple(builder.values.values()), tuple(builder.ops), tuple(builder.inputs), names,
        batch=None if unsplit else BATCH, level="boundary",
    )  # fmt: skip
    changed = tuple(dict.fromkeys(builder.changed.values()))
    unknown = [each.name for each in changed if not each.known]
    num_tensors = len(given.tensors)
    captured = Capture(
        graph=graph,
        bodies=builder.bodies,
        reasons={},
        num_calls={op.name: 1 for op in graph.ops},
        slots={each: slot for slot, each in enumerate(builder.inputs[: num_tensors + 2])},
        constants={},
        symbols=(SymbolSlot(BATCH, num_tensors + 1, 0, 1),) if graph.batch else (),
        num_inputs=num_tensors + 2,
        outputs=tuple(Slot(value=each) for each in names),
        matched=frozenset(recorder.rules),
        assumed=(f"{name}, which changes {', '.join(unknown)}",) if unknown else (),
    )
    return EagerForm(captured, tuple(builder.stops), changed, unsplit)


def check_steps(plan: Plan) -> None:
    """Raise `StrategyError` for a step over some of several parts, or by a kernel.

    Every part is a run of the model of its own, so no step is about two of them.
    """
    for step in plan.steps:
        if step.by is not None:
            raise StrategyError(
                f"boundary: {step.label} is by kernel {step.by!r}; in boundary mode the model runs "
                "itself, and nothing takes the place of its calls."
            )
        several = step.parts is not None and step.parts[1] - step.parts[0] > 1
        if step.kind in ("run", "issue") and several:
            raise StrategyError(
                f"boundary: {step.label} is a merged run; in boundary mode every part runs by "
                "itself."
            )


def _unsplit_arguments(given: Arguments) -> str:
    if not given.rows:
        return "batch: no argument is a tensor with rows"
    for leaf in given.nest.leaves:
        if not isinstance(leaf, torch.Tensor) and not is_plain(leaf):
            return (
                f"argument: nothing tells how a {type(leaf).__name__} falls into parts; give its "
                "tensors as arguments, or a splitter for it"
            )
    return ""


def _unsplit_outputs(nest: Nest, rows: int, dim: int) -> str:
    for number, leaf in enumerate(nest.leaves):
        if isinstance(leaf, torch.Tensor):
            if rows_at(leaf.shape, rows, dim) is None:
                return f"output: output {number} of shape {list(leaf.shape)} has no {rows} rows"
        elif not is_plain(leaf):
            return f"output: output {number} is a {type(leaf).__name__}, which cannot be merged"
    return ""


class _Builder:
    """Makes values and ops, stretch by stretch."""

    def __init__(
        self, halts: Sequence[Halt], given: Arguments, batch: Batch | None, dim: int
    ) -> None:
        self.halts, self.rows, self.batch, self.dim = halts, given.rows, batch, dim
        self.kind = "row-wise" if batch is not None else "batch-free"
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.bodies: dict[str, Body] = {}
        self.stops: list[Stop] = []
        self.changed: dict[int, ChangedBytes] = {}  # by the number of the bytes
        self.inputs = [f"arg{number}" for number in range(len(given.tensors))]
        for name, tensor, has_rows in zip(self.inputs, given.tensors, given.batched, strict=True):
            self._value(name, tensor.shape, _dtype(tensor), has_rows=has_rows)
        self.inputs += [self._value(CALL, has_rows=False), self._value(ROWS, (self.rows,))]
        calls = [call for halt in halts for call in (*halt.stretch.calls, (halt.inside, False))]
        self.origins = Origins(stack for stack, _ in calls)
        self.names = OpNames(self.origins.paths)

    def _value(
        self, name: str, shape: Sequence[int] = (), dtype: str = "opaque", has_rows: bool = True
    ) -> str:
        """One more value; those of the parts have rows, if the graph has any."""
        sizes, batch = tuple(map(Size.of, shape)), self.batch if has_rows else None
        at = rows_at(shape, self.rows, self.dim) if batch is not None and shape else None
        if at is not None:
            inner = shape[at] // self.rows
            sizes = (*sizes[:at], Size.of(BATCH) * inner, *sizes[at + 1 :])
            batch = Batch(at, inner=Size.of(inner))
        self.values[name] = Value(name, sizes, dtype, batch)
        return name

    def add_changed(self, given: Arguments, model: Any) -> None:
        """Name the bytes that the model changes and that outlive the call."""
        written = {number for halt in self.halts for number in halt.stretch.writes}
        known = [(t, ChangedBytes(f"arg{slot}", slot)) for slot, t in enumerate(given.tensors)]
        if isinstance(model, nn.Module):
            kept = [*model.named_buffers(), *model.named_parameters()]
            known += [(tensor, ChangedBytes(f"held.{path}", path=path)) for path, tensor in kept]
        for tensor, name in known:
            for number in storages_of(tensor) & written:
                self.changed.setdefault(number, name)
        for number in sorted(written - self.changed.keys()):
            self.changed[number] = ChangedBytes(f"held.{len(self.changed)}")
        for changed in dict.fromkeys(self.changed.values()):
            if changed.slot is None:
                self.inputs.append(self._value(changed.name, has_rows=False))

    def add_states(self, names: Sequence[str]) -> None:
        """Side state of the host: every stretch touches it, so its parts go in part order."""
        self.states = tuple(self._value(STATE + name, has_rows=False) for name in names)
        self.inputs += self.states

    def add_ops(self, outputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Make all ops; what the last of them makes."""
        before: tuple[str, ...] = (*self.inputs[: self.inputs.index(CALL)], CALL, ROWS)
        makes: tuple[str, ...] = ()
        for halt, stretch, passes in _stretches(self.halts):
            self.stops.append(Stop(halt.text, passes))
            if not passes:
                continue
            number = len(self.ops)
            if halt is self.halts[-1] and outputs:
                makes = tuple(
                    self._value(f"out{n}", each.shape, _dtype(each))
                    for n, each in enumerate(outputs)
                )
            else:
                makes = (self._value(f"at{number}"),)
            if halt.kind:
                makes += (self._value(f"talk{number}", halt.shape, halt.dtype),)
            self._stretch(stretch, before, makes)
            before = makes[:1]
            if halt.kind:
                before += (self._talk(halt, makes[1]),)
        self.stops.pop()  # the end is no stop
        return makes

    def _stretch(self, stretch: Stretch, reads: tuple[str, ...], makes: tuple[str, ...]) -> None:
        mark = stretch.mark
        touched = {self.changed[n].name for n in stretch.touches if n in self.changed}
        changed = dict.fromkeys(self.changed[number].name for number in stretch.writes)
        origin = self.origins.of(list(stretch.calls))
        base = mark.name if mark is not None else origin.name("" if origin.path else "op")
        name = self.names.make(base)
        resume: Function = _begin if CALL in reads else _resume
        self._op(
            Op(
                name,
                tuple(dict.fromkeys((*reads, *sorted(touched)))),
                makes,
                (*changed, *self.states),
                uses=(mark.uses if mark is not None else None) or "compute",
                rows=self.kind,
                mark=mark.name if mark is not None else None,
                body=name,
                flops=Size.of(BATCH) * (stretch.flops // self.rows) if self.batch else Size.of(0),
                path=origin.path,
                layer=origin.layer,
                block=origin.block,
            ),
            functools.partial(resume, len(reads), len(makes)),
            lambda made: made,
        )

    def _talk(self, halt: Halt, reads: str) -> str:
        number = len(self.ops)
        landed = self._value(f"landed{number}", halt.shape, halt.dtype)
        origin = self.origins.of([(halt.inside, False)])
        op = Op(
            self.names.make(origin.name(halt.kind)),
            (reads,),
            (landed,),
            uses="network",
            rows=self.kind,
            two_phase=True,
            collective=Collective(halt.kind, halt.communicator),
            body=halt.text,
            path=origin.path,
            layer=origin.layer,
            block=origin.block,
        )
        self._op(op, lambda caught: caught.start(), lambda caught: (caught.land(),))
        return landed

    def _op(self, op: Op, issue: Function, complete: Function) -> None:
        self.ops.append(op)
        self.bodies[op.name] = Body(op.body, EMPTY, issue=issue, complete=complete)


def _stretches(halts: Sequence[Halt]) -> Iterator[tuple[Halt, Stretch, bool]]:
    """Each halt with the stretch that ends there, and whether control passes to other parts.

    It passes where something was computed since it last did, at collectives, and at the end; not
    where nothing but the end is still to come.
    """
    busy = [number for number, halt in enumerate(halts) if halt.stretch.num_calls or halt.kind]
    stretch = Stretch()
    for number, halt in enumerate(halts):
        stretch = stretch.joined(halt.stretch)
        has_more = bool(busy) and number < busy[-1]
        passes = bool(halt.kind or halt is halts[-1] or (stretch.num_calls and has_more))
        yield halt, stretch, passes
        if passes:
            stretch = Stretch()


def _begin(num_reads: int, num_makes: int, *reads: Any) -> tuple[Any, ...]:
    *tensors, call, rows = reads[:num_reads]
    return _made(call.begin(rows, tensors), num_makes)


def _resume(num_reads: int, num_makes: int, *reads: Any) -> tuple[Any, ...]:
    part = reads[0]
    part.resume()
    return _made(part, num_makes)


def _made(part: Any, num_makes: int) -> tuple[Any, ...]:
    """What a stretch makes: the part, with what it called, or the tensors that it gave."""
    if not part.over.is_set():
        return (part,) if part.caught is None else (part, part.caught)
    tensors = Nest(part.outputs).tensors
    if len(tensors) != num_makes and tensors:
        raise RunError(f"output: a part gave {len(tensors)} tensors; its first run {num_makes}.")
    return tuple(tensors) or (part,)


def _dtype(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype if dtype in ITEM_BYTES else "opaque"


EMPTY = fx.GraphModule(nn.Module(), fx.Graph())
"""A body of this level has no graph of its own."""
