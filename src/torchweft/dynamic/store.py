"""A `Store`: the rows that groups have made, one tensor for each spec, and how a group runs.

    store of float32[150]:   row 0  row 1  row 2 ...      value number -> row: the layout

A group gathers its arguments by row numbers and writes its results to rows of their own, so it
does not matter which groups made what it reads. Under autograd a store is not written into but
replaced by one with the new rows: gradients flow as they would through the unbatched model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.dynamic.cell import Cell, Spec
from torchweft.dynamic.grouping import Group

Prepared = Callable[[Cell], Sequence[Any]]


class Store:
    """Rows by spec on one device."""

    def __init__(self, device: torch.device | str = "cpu", *, grad: bool = False) -> None:
        self.device, self.grad = torch.device(device), grad
        self.rows: dict[Spec, Tensor] = {}

    def reserve(self, num_rows: Mapping[Spec, int]) -> None:
        """Room for so many rows of each spec; what is there stays."""
        for spec, count in num_rows.items():
            old = self.rows.get(spec)
            if old is not None and len(old) >= count:
                continue
            new = torch.empty((count, *spec.shape), dtype=spec.dtype, device=self.device)
            self.rows[spec] = new if old is None else torch.cat([old, new[len(old) :]])

    def write(self, spec: Spec, start: int, made: Tensor) -> None:
        """Put rows where they belong."""
        if self.grad:
            stop = start + len(made)
            self.rows[spec] = torch.slice_scatter(self.rows[spec], made, 0, start, stop)
        else:
            self.rows[spec][start : start + len(made)] = made

    def run(self, group: Group, prepared: Prepared) -> None:
        """Run a group: gather, compute, write."""
        cell, count = group.cell, group.num_rows
        if cell.kind == "pack":
            spec = cell.reads[0]
            index = group.rows.t().reshape(-1)
            made = self.rows[spec].index_select(0, index)
            self.write(cell.makes[0], group.starts[0], made.view(count, *cell.makes[0].shape))
            return
        given = self.gather(cell, group.rows, count)
        if cell.kind == "unpack":
            self.write(cell.makes[0], group.starts[0], given[0].flatten(0, 1))
            return
        outputs = cell.functions[1](self.device, prepared(cell), *given)
        for spec, start, made in zip(cell.makes, group.starts, outputs, strict=True):
            self.write(spec, start, made)

    def gather(self, cell: Cell, rows: Tensor, count: int) -> Sequence[Tensor]:
        """The arguments of a group; those of one spec in one gather."""
        reads = cell.reads
        if len(set(reads)) == 1:
            found = self.rows[reads[0]].index_select(0, rows.reshape(-1))
            if len(reads) == 1:
                return (found,)
            return found.view(len(reads), count, *reads[0].shape).unbind(0)
        return [self.rows[spec].index_select(0, rows[at]) for at, spec in enumerate(reads)]
