"""A `RowStore`: the rows that groups have made, one tensor for each spec, and how a group runs.

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

from torchweft.errors import CaptureError
from torchweft.run.workers.cell import ROOM, Cell, Spec
from torchweft.run.workers.grouping import Group

Prepared = Callable[[Cell], Sequence[Any]]


class RowStore:
    """Rows by spec on one device."""

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
    if int(rows[-1]) - start != count - 1 or not bool((rows[1:] > rows[:-1]).all()):
        return None
    return start
