"""`RecordedPart`: a whole recording for one device, as plain data. The worker groups it itself.

    Recording --take_all--> Recorded --message--> worker: layout, groups, rows --> the values wanted

In a stream the driver does no more than record and choose a device, so that it can feed many. What
goes there and back is few tensors: numbers of the ops of each cell, inputs and answers by spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import CaptureError
from torchweft.run.workers.cell import Cell, Spec, count_of, reading, spec_named, spec_of
from torchweft.run.workers.grouping import (
    Given,
    Group,
    Layout,
    Ops,
    group,
    numbers_of,
    place_inputs,
)
from torchweft.run.workers.store import RowStore

Packs = dict[int, tuple[Spec, list[int]]]
MAX_VALUES = 50_000_000


@dataclass(frozen=True, eq=False)
class RecordedPart:
    """Ops by cell, packs, inputs by number, and the values wanted by the spec of rows."""

    num_values: int
    ops: Sequence[Ops]
    packs: Packs
    inputs: Sequence[Given]
    wanted: Mapping[Spec, list[int]]

    kind = "recorded"

    @property
    def cells(self) -> list[Cell]:
        """The cells that a device needs for it."""
        return [item.cell for item in self.ops]

    @property
    def num_ops(self) -> int:
        """All its ops."""
        return sum(item.num_ops for item in self.ops)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that are made or given."""
        made = sum(
            item.num_ops * sum(spec.num_bytes for spec in item.cell.makes) for item in self.ops
        )
        return made + sum(each.nbytes for _, each in self.inputs)

    def to_data(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Plain data, and tensors: numbers of every cell's ops, then the inputs."""
        packs: dict[Spec, list[Any]] = {}
        for number, (spec, values) in self.packs.items():
            packs.setdefault(spec, []).append((number, values))
        inputs: dict[Spec, list[Given]] = {}
        for numbers, rows in self.inputs:
            spec = spec_of(rows.shape[1:], rows.dtype)
            inputs.setdefault(spec, []).append((numbers, rows))
        data = {
            "num_values": self.num_values,
            "cells": [item.cell.name for item in self.ops],
            "packs": [[spec.shape, str(spec.dtype), found] for spec, found in packs.items()],
            "inputs": [[[n.start, n.stop] for n, _ in found] for found in inputs.values()],
            "wanted": [[spec.shape, str(spec.dtype), each] for spec, each in self.wanted.items()],
        }
        rows_of = [torch.cat([rows for _, rows in found]) for found in inputs.values()]
        return data, [*(item.numbers for item in self.ops), *rows_of]

    def answers(self, found: Sequence[Tensor]) -> dict[int, Tensor]:
        """The values wanted, by their numbers: of packs several rows, of others one."""
        made = {}
        for numbers, rows in zip(self.wanted.values(), found, strict=True):
            at = 0
            for number in numbers:
                if number in self.packs:
                    count = len(self.packs[number][1])
                    made[number] = rows[at : at + count]
                    at += count
                else:
                    made[number] = rows[at]
                    at += 1
        return made


class RecordedRun:
    """A recorded part on its device: groups to run, and rows for what they make.

    Raises `CaptureError` for data that is none.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        tensors: Sequence[Tensor],
        cells: Mapping[str, Cell],
        store: RowStore,
    ) -> None:
        with reading("recording"):
            self._read(data, tensors, cells, store)

    def _read(
        self,
        data: Mapping[str, Any],
        tensors: Sequence[Tensor],
        cells: Mapping[str, Cell],
        store: RowStore,
    ) -> None:
        num_values = count_of(data["num_values"], MAX_VALUES)
        self.wanted = [(spec_named(*spec), numbers) for *spec, numbers in data["wanted"]]
        self.layout, self.store = Layout(), store
        names = data["cells"]
        for *spec, found in data["packs"]:
            self.layout.packs.update({number: (spec_named(*spec), each) for number, each in found})
        self.packs = dict(self.layout.packs)
        lists = (self.packs, *(each for _, each in (*self.packs.values(), *self.wanted)))
        said = numbers_of([number for each in lists for number in each])
        for numbers in (said, *tensors[: len(names)]):
            if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_values:
                raise CaptureError("recording: it names values that are not there.")
        self.layout.grow(num_values)
        pending = [Ops(cells[name], tensors[at]).pending for at, name in enumerate(names)]
        given = []
        for spans, rows in zip(data["inputs"], tensors[len(names) :], strict=True):
            at = 0
            for first, last in spans:
                last = count_of(last, num_values)
                count = count_of(last - first, min(last, len(rows) - at))
                given.append((range(first, last), rows[at : at + count]))
                at += count
        inputs = place_inputs(self.layout, given)
        self.groups: list[Group] = group(self.layout, pending)
        store.reserve(self.layout.num_rows)
        for spec, start, rows in inputs:
            store.write(spec, start, rows.to(store.device))

    def answers(self) -> list[Tensor]:
        """The values wanted, by spec: their rows, or those that packs consist of."""
        found = []
        with reading("recording"):
            for spec, numbers in self.wanted:
                values: list[int] = []
                for number in numbers:
                    values += self.packs[number][1] if number in self.packs else (number,)
                rows = self.layout.row_of[numbers_of(values)].to(self.store.device)
                found.append(self.store.rows[spec].index_select(0, rows))
        return found
