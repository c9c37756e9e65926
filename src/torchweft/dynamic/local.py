"""What a recording asks for: taken out of it as data, and run here, group by group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.recording import Recording
from torchweft.errors import CaptureError
from torchweft.run.driver.executor import Job
from torchweft.run.workers.cell import Cell, Spec, spec_of
from torchweft.run.workers.grouping import Block, Given, Group, Ops, numbers_of, read_by_ops
from torchweft.run.workers.program import Load
from torchweft.run.workers.recorded import RecordedPart, RecordedRows, away


class Weights:
    """What cells make of weights alone, computed once while the weights stay the same."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.known: dict[Cell, tuple[Any, Sequence[Any]]] = {}

    @property
    def grad(self) -> bool:
        """Whether gradients of them are wanted now."""
        return torch.is_grad_enabled() and any(w.requires_grad for w in self.weights.values())

    def __call__(self, cell: Cell) -> Sequence[Any]:
        weights = [self.weights[name] for name in cell.weights]
        prepare = cell.functions[0]
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            return prepare(self.device, *weights)  # type: ignore[no-any-return]
        now = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        if cell not in self.known or self.known[cell][0] != now:
            with torch.no_grad():
                self.known[cell] = now, prepare(self.device, *weights)
        return self.known[cell][1]


class RemoteRows:
    """The values of a recording that ran elsewhere, as one job: those that were wanted."""

    def __init__(self, job: Job, num_values: int) -> None:
        self.job, self.num_values = job, num_values

    def value(self, number: int, spec: Spec) -> Tensor:
        """The tensor of a value, when the job is over."""
        self.job.over.result()
        if number not in self.job.values:
            raise away(spec)
        return self.job.values[number]


def take(recording: Recording, wanted: Iterable[Lazy] = ()) -> RecordedPart:
    """Everything that is pending in a recording, with these values wanted; it is pending no more.

    Raises `CaptureError` if an input was changed in place behind the call that uses it.
    """
    ops = []
    for entry in recording.used:
        ops.append(Ops(entry.cell, numbers_of(entry.ops)))
        entry.ops.clear()
    recording.used.clear()
    packs, recording.packs = recording.packs, {}
    values: dict[Spec, list[int]] = {}
    for number, spec in {lazy.id: lazy.spec for lazy in wanted}.items():
        if number not in recording.given:
            spec = packs[number][0] if number in packs else spec
            values.setdefault(spec, []).append(number)
    return RecordedPart(recording.next, ops, packs, _inputs(recording, ops, packs), values)


def _inputs(recording: Recording, ops: Sequence[Ops], packs: Mapping[int, Any]) -> list[Given]:
    """The pending inputs, with rows of those that were taken apart."""
    whole, apart = dict(recording.inputs), recording.apart
    specs = {number: spec_of(given.shape, given.dtype) for number, (_, given, _) in apart.items()}
    read, kinds = set(read_by_ops(specs, recording.next, ops)), set(specs.values())
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


def rows_of(recording: Recording, *, grad: bool) -> RecordedRows:
    """Where the rows of a recording are, here."""
    if recording.store is None:
        recording.store = RecordedRows(recording.device, grad=grad)
    rows: RecordedRows = recording.store
    return rows


def flush_here(recording: Recording, weights: Weights) -> list[Group]:
    """Run what is pending, in this process."""
    rows = rows_of(recording, grad=weights.grad)
    with torch.autocast(weights.device.type, enabled=False):
        groups = rows.add(take(recording))
        ready = {cell: weights(cell) for cell in dict.fromkeys(each.cell for each in groups)}
        for each in groups:
            rows.store.run(each, ready.__getitem__)
    return groups


def load(recording: Recording, wanted: Sequence[Lazy] | None, bundles: Sequence[int] = ()) -> Load:
    """Take what is pending, to be placed; `wanted` None: the caller may ask for anything later."""
    rows = rows_of(recording, grad=False)
    first = rows.num_values
    groups = rows.add(take(recording), bundles)
    made: dict[Spec, list[Tensor]] = {}
    for each in groups:
        for spec, start, count in each.results:
            made.setdefault(spec, []).append(torch.arange(start, start + count))
    outputs, num_rows = {spec: torch.cat(each) for spec, each in made.items()}, rows.layout.num_rows
    inputs: dict[str, Block] = {}  # of specs that are read: given now, or made by earlier flushes
    for spec in dict.fromkeys(spec for each in groups for spec in each.cell.reads):
        if count := num_rows[spec] - len(outputs.get(spec, ())):
            inputs[f"in{len(inputs)}"] = spec, 0, count
    if wanted is not None:
        rows.stay(first, {lazy.id for lazy in wanted})
        asked: dict[Spec, list[Tensor]] = {}
        for lazy in wanted:
            spec = rows.layout.packs.get(lazy.id, (lazy.spec,))[0]
            asked.setdefault(spec, []).append(rows.layout.rows_of(lazy.id).reshape(-1))
        unique = {spec: torch.unique(torch.cat(each)) for spec, each in asked.items()}
        outputs = {
            spec: each[torch.isin(each, outputs[spec])]
            for spec, each in unique.items()
            if spec in outputs
        }
    return Load(groups, inputs, outputs, dict(num_rows), rows.store)
