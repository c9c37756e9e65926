"""`Recorded`: a whole recording for one device, as plain data. The worker groups it itself.

    Recording --take_all--> Recorded --message--> worker: layout, groups, rows --> the values wanted

In a stream the driver does no more than record and choose a device, so that it can feed many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchweft.dynamic.cell import Cell, Spec, pack_cell, spec_named
from torchweft.dynamic.grouping import Group, Layout, Pending, group, packs_needed
from torchweft.dynamic.lazy import Lazy
from torchweft.dynamic.local import Given, inputs_in, place_inputs, take
from torchweft.dynamic.recording import Recording
from torchweft.dynamic.store import Store


@dataclass(frozen=True, eq=False)
class Recorded:
    """Pending ops by cell, packs, inputs by number, and the numbers of the values wanted."""

    num_values: int
    pending: Sequence[Pending]
    packs: Mapping[int, tuple[Spec, list[int]]]
    inputs: Sequence[Given]
    wanted: Sequence[tuple[int, Spec]]

    kind = "recorded"

    @property
    def cells(self) -> list[Cell]:
        """The cells that a device needs for it."""
        packs = {pack_cell(spec, len(values)): None for spec, values in self.packs.values()}
        return [*(item.cell for item in self.pending), *packs]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows that are made or given."""
        made = sum(
            len(item.bases) * sum(spec.num_bytes for spec in item.cell.makes)
            for item in self.pending
        )
        return made + sum(each.numel() * each.element_size() for _, each in self.inputs)

    def to_data(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Plain data, and tensors: numbers of every cell's ops, then the inputs."""
        data = {
            "num_values": self.num_values,
            "cells": [item.cell.name for item in self.pending],
            "packs": [
                [number, pack_cell(spec, len(values)).name, values]
                for number, (spec, values) in self.packs.items()
            ],
            "inputs": [[numbers.start, numbers.stop] for numbers, _ in self.inputs],
            "wanted": [[number, spec.shape, str(spec.dtype)] for number, spec in self.wanted],
        }
        numbers = [each for item in self.pending for each in (item.args, item.bases)]
        return data, [*numbers, *(tensor for _, tensor in self.inputs)]


def take_all(recording: Recording, wanted: Sequence[Lazy]) -> Recorded:
    """Everything that a recording asks for; it must not have run anything before."""
    assert recording.store is None, "what ran before is not in it"
    layout = Layout()
    pending = take(recording, layout)
    inputs = inputs_in(recording, layout, pending)
    values = {lazy.id: lazy.spec for lazy in wanted if lazy.id not in recording.given}
    packs = {number: layout.packs[number] for number in packs_needed(layout, pending, values)}
    return Recorded(recording.next, pending, packs, inputs, list(values.items()))


class Unfolded:
    """A recorded part on its device: groups to run, and rows for what they make."""

    def __init__(
        self,
        data: Mapping[str, Any],
        tensors: Sequence[Tensor],
        cells: Mapping[str, Cell],
        store: Store,
    ) -> None:
        self.wanted = [(number, spec_named(*rest)) for number, *rest in data["wanted"]]
        self.layout, self.store = Layout(), store
        self.layout.grow(data["num_values"])
        pending = [
            Pending(cells[name], tensors[2 * at], tensors[2 * at + 1])
            for at, name in enumerate(data["cells"])
        ]
        for number, name, values in data["packs"]:
            self.layout.packs[number] = cells[name].reads[0], values
        numbers = [range(first, last) for first, last in data["inputs"]]
        given = zip(numbers, tensors[2 * len(pending) :], strict=True)
        inputs = place_inputs(self.layout, given)
        self.groups: list[Group] = group(self.layout, pending)
        store.reserve(self.layout.num_rows)
        for spec, start, rows in inputs:
            store.write(spec, start, rows.to(store.device))

    def answers(self) -> list[Tensor]:
        """The values wanted, in order."""
        found = []
        for number, spec in self.wanted:
            rows = self.layout.rows_of(number)
            if isinstance(rows, int):
                found.append(self.store.rows[spec][rows])
            else:  # a pack: its rows are of another spec
                row = self.layout.packs[number][0]
                found.append(self.store.rows[row].index_select(0, rows.to(self.store.device)))
        return found
