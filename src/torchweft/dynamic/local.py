"""Running a recording here: on the caller's device, group by group.

flush:   inputs into the store  ->  groups of what is pending  ->  run one after another
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.recording import Recording
from torchweft.errors import CaptureError
from torchweft.run.workers.cell import Cell, Spec, spec_of
from torchweft.run.workers.grouping import (
    Given,
    Group,
    Layout,
    Ops,
    PendingOps,
    group,
    numbers_of,
    packs_needed,
    place_inputs,
    read_of,
)
from torchweft.run.workers.recorded import RecordedPart
from torchweft.run.workers.store import RowStore

if TYPE_CHECKING:
    from torchweft.dynamic.state import State


class LocalRows:
    """What a recording holds of its results: the layout, and the store here."""

    def __init__(self, device: torch.device, *, grad: bool) -> None:
        self.layout = Layout()
        self.store = RowStore(device, grad=grad)
        self.first_away, self.brought = 1 << 62, frozenset[int]()
        self.owner: dict[tuple[Spec, int], int] = {}  # of rows that were given out: the value

    def stay(self, first: int, brought: Iterable[int]) -> None:
        """Values from this number on stay on the workers, except those that were brought."""
        self.first_away, self.brought = first, frozenset(brought)

    @property
    def num_values(self) -> int:
        """Values below this number are computed."""
        return self.layout.num_values

    def value(self, number: int, spec: Spec) -> Tensor:
        """The tensor of a value."""
        if number >= self.first_away and number not in self.brought:
            raise away(spec)
        found, rows = self.place(number, spec)
        if found is spec:
            made = self.store.rows[spec][int(rows)]
            owner = self.owner.setdefault((spec, int(rows)), number)
            return made if owner == number else made.clone()  # equal values share a row
        return self.store.rows[found].index_select(0, rows)

    def values(self, wanted: Sequence[Lazy]) -> list[Tensor]:
        """The tensors of many values: packs of one spec in one gather."""
        packs: dict[Spec, list[int]] = {}
        for lazy in wanted:
            if lazy.id in self.layout.packs:
                packs.setdefault(self.layout.packs[lazy.id][0], []).append(lazy.id)
        found: dict[int, Tensor] = {}
        for spec, numbers in packs.items():
            lists = [self.layout.packs[number][1] for number in numbers]
            rows = self.layout.row_of[numbers_of([value for each in lists for value in each])]
            made = self.store.rows[spec].index_select(0, rows)
            found.update(
                zip(numbers, torch.split(made, [len(each) for each in lists]), strict=True)
            )
        return [
            found[lazy.id] if lazy.id in found else self.value(lazy.id, lazy.spec)
            for lazy in wanted
        ]

    def place(self, number: int, spec: Spec) -> tuple[Spec, Tensor]:
        """The rows of a value, and their spec: its own row, or those a pack consists of."""
        rows = self.layout.rows_of(number)
        if isinstance(rows, int):
            return spec, torch.tensor(rows)
        return spec_of(spec.shape[1:], spec.dtype), rows


class RemoteRows:
    """What a recording holds of results of a job that ran elsewhere: the values it wanted."""

    def __init__(self, job: Any, num_values: int) -> None:
        self.job, self.num_values = job, num_values

    def value(self, number: int, spec: Spec) -> Tensor:
        """The tensor of a value, when the job is over."""
        self.job.wait()
        if number not in self.job.values:
            raise away(spec)
        found: Tensor = self.job.values[number]
        return found


def away(spec: Spec) -> CaptureError:
    """The error for a value that stayed where it was computed."""
    return CaptureError(
        f"kept: a value of {spec} was kept by your code and not among the outputs of its call, so "
        "it stayed on a worker. Return it, or run the model without workers."
    )


class Weights:
    """What cells make of weights alone, computed once while the weights stay the same."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.known: dict[Cell, tuple[Any, Sequence[Any]]] = {}

    def __call__(self, cell: Cell) -> Sequence[Any]:
        weights = [self.state.weights[name] for name in cell.weights]
        prepare = cell.functions[0]
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return prepare(self.state.device, *weights)  # type: ignore[no-any-return]
        now = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        found = self.known.get(cell)
        if found is None or found[0] != now:
            with torch.no_grad():
                found = now, prepare(self.state.device, *weights)
            self.known[cell] = found
        return found[1]


def take(recording: Recording, layout: Layout) -> list[PendingOps]:
    """The pending ops of a recording, ready to be grouped; they are pending no more."""
    layout.grow(recording.next)
    return [ops.pending for ops in taken(recording, layout)]


def taken(recording: Recording, layout: Layout) -> list[Ops]:
    """The pending ops of a recording, and its packs in the layout; they are pending no more."""
    found = []
    for entry in recording.used:
        found.append(Ops(entry.cell, numbers_of(entry.ops)))
        entry.ops.clear()
    recording.used.clear()
    layout.packs.update(recording.packs)
    recording.packs.clear()
    return found


def inputs_in(
    recording: Recording, layout: Layout, pending: Sequence[Ops | PendingOps]
) -> list[Given]:
    """The pending inputs, with rows of those that were taken apart; they are pending no more.

    Raises `CaptureError` if one was changed in place behind the call that uses it.
    """
    whole, apart = dict(recording.inputs), recording.apart
    specs = {number: spec_of(given.shape, given.dtype) for number, (_, given, _) in apart.items()}
    for number in read_of(specs, layout, pending):  # as a whole, too
        whole[number] = apart[number][1:]
    rows = [each for each in apart.values() if each[0] >= 0]
    for tensor, version in (*whole.values(), *(each[1:] for each in rows)):
        if not tensor.is_inference() and tensor._version != version:
            raise CaptureError(
                f"change: an input of shape {tuple(tensor.shape)} was changed in place after a "
                "call that has not run yet used it. Change a clone() of it."
            )
    recording.inputs.clear()
    recording.apart = {
        number: (-1, tensor, version)
        for number, (_, tensor, version) in apart.items()
        if number not in whole
    }
    return [
        *((range(first, first + len(tensor)), tensor) for first, tensor, _ in rows),
        *((range(number, number + 1), tensor[None]) for number, (tensor, _) in whole.items()),
    ]


def take_all(recording: Recording, wanted: Sequence[Lazy]) -> RecordedPart:
    """Everything that a recording asks for; it must not have run anything before."""
    assert recording.store is None, "what ran before is not in it"
    layout = Layout()
    layout.num_values = recording.next
    ops = taken(recording, layout)
    inputs = inputs_in(recording, layout, ops)
    packs = {number: layout.packs[number] for number in packs_needed(layout, ops)}
    values: dict[Spec, list[int]] = {}
    for number, spec in {lazy.id: lazy.spec for lazy in wanted}.items():
        if number in recording.given:
            continue
        if number in layout.packs:
            spec, _ = packs[number] = layout.packs[number]
        values.setdefault(spec, []).append(number)
    return RecordedPart(recording.next, ops, packs, inputs, values)


def flush_here(recording: Recording, prepared: Weights) -> list[Group]:
    """Run what is pending, in this process."""
    state = recording.state
    if recording.store is None:
        grad = torch.is_grad_enabled() and any(w.requires_grad for w in state.weights.values())
        recording.store = LocalRows(state.device, grad=grad)
    held: LocalRows = recording.store
    pending = take(recording, held.layout)
    inputs = place_inputs(held.layout, inputs_in(recording, held.layout, pending))
    groups = group(held.layout, pending)
    held.store.reserve(held.layout.num_rows)
    with torch.autocast(state.device.type, enabled=False):
        for spec, start, rows in inputs:
            held.store.write(spec, start, rows)
        ready = {cell: prepared(cell) for cell in dict.fromkeys(each.cell for each in groups)}
        for each in groups:
            held.store.run(each, ready.__getitem__)
    return groups
