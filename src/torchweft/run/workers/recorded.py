"""`RecordedPart`: what was recorded, as plain data; `RecordedRows`: its groups, and their rows in a
`RowStore`, where groups run.

    Recording --take--> RecordedPart --RecordedRows.add--> groups to run, rows for all values

In a stream this is done by a worker, so that the driver does no more than record and choose a
device: the part is sent there as few tensors (numbers of the ops of each cell, inputs by spec),
and the wanted values come back by spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import CaptureError
from torchweft.run.workers.cell import ROOM, Cell, Spec, count_of, reading, spec_named, spec_of
from torchweft.run.workers.grouping import (
    Given,
    Group,
    Layout,
    Ops,
    Packs,
    group,
    numbers_of,
    packs_read,
    place_inputs,
)

MAX_VALUES = 50_000_000
Prepared = Callable[[Cell], Sequence[Any]]


@dataclass(frozen=True, eq=False)
class RecordedPart:
    """Ops by cell, packs, inputs by number, and the wanted values by the spec of their rows."""

    num_values: int
    ops: Sequence[Ops]
    packs: Packs
    inputs: Sequence[Given]
    wanted: Mapping[Spec, list[int]] = field(default_factory=dict)

    kind = "recorded"

    @property
    def cells(self) -> list[Cell]:
        """The cells that a device needs for it."""
        return [item.cell for item in self.ops]

    @property
    def num_ops(self) -> int:
        return sum(item.num_ops for item in self.ops)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that are made or given."""
        made = sum(
            item.num_ops * sum(spec.num_bytes for spec in item.cell.makes) for item in self.ops
        )
        return made + sum(rows.nbytes for _, rows in self.inputs)

    @property
    def message(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Plain data, and tensors: numbers of every cell's ops, then the inputs."""
        packs: dict[Spec, list[Any]] = {}
        wanted = [number for each in self.wanted.values() for number in each]
        needed = {*packs_read(self.packs, self.num_values, self.ops), *wanted}
        for number in sorted(needed & self.packs.keys()):
            spec, values = self.packs[number]
            packs.setdefault(spec, []).append((number, values))
        inputs: dict[Spec, list[Given]] = {}
        for numbers, rows in self.inputs:
            spec = spec_of(rows.shape[1:], rows.dtype)
            inputs.setdefault(spec, []).append((numbers, rows))
        data = {
            "num_values": self.num_values,
            "cells": [item.cell.name for item in self.ops],
            "packs": [[spec.shape, str(spec.dtype), each] for spec, each in packs.items()],
            "inputs": [[[n.start, n.stop] for n, _ in given] for given in inputs.values()],
            "wanted": [[spec.shape, str(spec.dtype), each] for spec, each in self.wanted.items()],
        }
        rows_of = [torch.cat([rows for _, rows in given]) for given in inputs.values()]
        return data, [*(item.numbers for item in self.ops), *rows_of]

    @staticmethod
    @reading("recording")
    def from_message(
        data: Mapping[str, Any], tensors: Sequence[Tensor], cells: Mapping[str, Cell]
    ) -> RecordedPart:
        """The part of a message. Raises `CaptureError` for data that is none."""
        num_values = count_of(data["num_values"], MAX_VALUES)
        wanted = {spec_named(*spec): numbers for *spec, numbers in data["wanted"]}
        names, packs = data["cells"], {}
        for *spec, lists in data["packs"]:
            packs.update({number: (spec_named(*spec), values) for number, values in lists})
        named = (packs, *(values for _, values in packs.values()), *wanted.values())
        said = numbers_of([number for each in named for number in each])
        for numbers in (said, *tensors[: len(names)]):
            if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_values:
                raise CaptureError("recording: it names values that are not there.")
        ops = [Ops(cells[name], tensors[at]) for at, name in enumerate(names)]
        given = []
        for spans, rows in zip(data["inputs"], tensors[len(names) :], strict=True):
            at = 0
            for first, last in spans:
                last = count_of(last, num_values)
                count = count_of(last - first, min(last, len(rows) - at))
                given.append((range(first, last), rows[at : at + count]))
                at += count
        return RecordedPart(num_values, ops, packs, given, wanted)

    @reading("recording")
    def collect(self, rows: RecordedRows) -> list[Tensor]:
        """The rows of the wanted values, by spec. Raises `CaptureError` if they are not there."""
        return [
            rows.gather(spec, [v for number in numbers for v in self._values(number)])
            for spec, numbers in self.wanted.items()
        ]

    def _values(self, number: int) -> Sequence[int]:
        return self.packs[number][1] if number in self.packs else (number,)

    def answers(self, made: Sequence[Tensor]) -> dict[int, Tensor]:
        """The wanted values by their numbers, from the rows of each spec: of packs several."""
        values = {}
        for numbers, rows in zip(self.wanted.values(), made, strict=True):
            at = 0
            for number in numbers:
                count = len(self._values(number))
                values[number] = rows[at : at + count] if number in self.packs else rows[at]
                at += count
        return values


class RowStore:
    """Rows by spec on one device, one tensor for each spec.

    A group gathers its arguments by row numbers and writes its results to rows of their own, so it
    does not matter which groups made what it reads. Under autograd a store is not written into but
    replaced by one with the new rows: gradients flow as they would through the unbatched model.
    """

    def __init__(self, device: torch.device | str = "cpu", *, grad: bool = False) -> None:
        self.device, self.grad = torch.device(device), grad
        self.rows: dict[Spec, Tensor] = {}

    def reserve(self, num_rows: Mapping[Spec, int]) -> None:
        """Room for so many rows of each spec; what is there stays. Raises `CaptureError` if that is
        more than this box has."""
        if (size := sum(spec.num_bytes * count for spec, count in num_rows.items())) > ROOM:
            raise CaptureError(f"rows: they need {size} bytes, and this box has {ROOM}.")
        for spec, count in num_rows.items():
            old = self.rows.get(spec)
            if old is not None and len(old) >= count:
                continue
            new = torch.empty((count, *spec.shape), dtype=spec.dtype, device=self.device)
            self.rows[spec] = new if old is None else torch.cat([old, new[len(old) :]])

    def write(self, spec: Spec, start: int, made: Tensor, *, own: bool = False) -> None:
        """Put rows where they belong. own: nobody else has them."""
        if self.grad:
            stop = start + len(made)
            self.rows[spec] = torch.slice_scatter(self.rows[spec], made, 0, start, stop)
        elif own and len(made) == len(self.rows[spec]) and made.is_contiguous():
            self.rows[spec] = made  # all rows there will be: nothing to copy
        else:
            self.rows[spec][start : start + len(made)] = made

    def run(self, group: Group, prepared: Prepared) -> None:
        """Run a group: gather, compute, write."""
        cell, count = group.cell, group.num_rows
        if cell.kind == "pack":
            spec = cell.reads[0]
            index = group.rows.t().reshape(-1)
            made = self.rows[spec].index_select(0, index.to(self.device))
            self.write(cell.makes[0], group.starts[0], made.view(count, *cell.makes[0].shape))
            return
        given = self.gather(cell, group.rows, count)
        if cell.kind == "unpack":
            self.write(cell.makes[0], group.starts[0], given[0].flatten(0, 1))
            return
        outputs = cell.functions[1](self.device, prepared(cell), *given)
        results = zip(cell.makes, group.starts, outputs, cell.fresh, strict=True)
        for spec, start, rows, fresh in results:
            self.write(spec, start, rows, own=fresh)

    def gather(self, cell: Cell, rows: Tensor, count: int) -> Sequence[Tensor]:
        """The arguments of a group; those of one spec in one gather."""
        reads = cell.reads
        if len(reads) == 1 and (start := _consecutive(rows[0])) is not None:
            return (self.rows[reads[0]][start : start + count],)
        rows = rows.to(self.device)
        if len(set(reads)) == 1:
            gathered = self.rows[reads[0]].index_select(0, rows.reshape(-1))
            if len(reads) == 1:
                return (gathered,)
            return gathered.view(len(reads), count, *reads[0].shape).unbind(0)
        return [self.rows[spec].index_select(0, rows[at]) for at, spec in enumerate(reads)]


def _consecutive(rows: Tensor) -> int | None:
    """The first of these rows, if they stand one after another: they need no gather then."""
    start, count = int(rows[0]), len(rows)
    spans = int(rows[-1]) - start == count - 1 and bool((rows[1:] > rows[:-1]).all())
    return start if spans else None


class RecordedRows(Layout):
    """The rows of what was recorded, on one device: their layout, and the store."""

    def __init__(self, device: torch.device | str = "cpu", *, grad: bool = False) -> None:
        super().__init__()
        self.store = RowStore(device, grad=grad)
        # Values from `first_away` on stay on the workers, except those that were brought.
        self.first_away, self.brought = 1 << 62, frozenset[int]()
        self.owner: dict[tuple[Spec, int], int] = {}  # of rows that were given out: the value

    def add(self, part: RecordedPart, bundles: Sequence[int] = ()) -> list[Group]:
        """Make room for a part, and write its inputs; the groups that are to run."""
        self.grow(part.num_values)
        self.packs.update(part.packs)
        inputs = place_inputs(self, part.inputs)
        groups = group(self, part.ops, bundles)
        self.store.reserve(self.num_rows)
        for spec, start, rows in inputs:
            self.store.write(spec, start, rows.to(self.store.device))
        return groups

    def value(self, number: int, spec: Spec) -> Tensor:
        """The tensor of a value."""
        if number >= self.first_away and number not in self.brought:
            raise away(spec)
        rows = self.rows_of(number)
        if rows.dim():
            return self.gather(*self.packs[number])
        made = self.store.rows[spec][row := int(rows)]
        owner = self.owner.setdefault((spec, row), number)
        return made if owner == number else made.clone()  # equal values share a row

    def values(self, wanted: Sequence[tuple[int, Spec]]) -> list[Tensor]:
        """The tensors of many values: packs of one spec in one gather."""
        by_spec: dict[Spec, list[int]] = {}
        for number, _ in wanted:
            if number in self.packs:
                by_spec.setdefault(self.packs[number][0], []).append(number)
        packed: dict[int, Tensor] = {}
        for spec, numbers in by_spec.items():
            lists = [self.packs[number][1] for number in numbers]
            rows = self.gather(spec, [value for values in lists for value in values])
            packed.update(zip(numbers, torch.split(rows, [*map(len, lists)]), strict=True))
        return [
            packed[number] if number in packed else self.value(number, spec)
            for number, spec in wanted
        ]

    def gather(self, spec: Spec, values: Sequence[int]) -> Tensor:
        """The rows of values of one spec."""
        rows = self.row_of[numbers_of(values)].to(self.store.device)
        return self.store.rows[spec].index_select(0, rows)


def away(spec: Spec) -> CaptureError:
    """The error for a value that stayed where it was computed."""
    return CaptureError(
        f"kept: a value of {spec} was kept by your code and not among the outputs of its call, so "
        "it stayed on a worker. Return it, or run the model without workers."
    )
