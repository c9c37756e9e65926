"""Grouping: the pending ops of a recording become groups, each one run of a cell over many rows.

    1. which cell reads what which cell makes
    2. cells that feed each other (a cell over trees feeds itself) are one *ring*
    3. rings in order; a cell outside of a ring is one group, whatever the depth of its ops;
       in a ring, ops of one cell and one depth are one group
    4. every value gets a row of the store of its spec; what a group reads is a list of rows.
       Outside of rings, ops of a cell that read the same row (the leaves of equal words) are one

With `bundles` (the first value of each bundle of inputs) groups are kept apart by bundle, so that
they can be placed on different devices.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchweft.run.workers.cell import Cell, Spec, pack_cell, spec_of

Given = tuple[range, Tensor]  # numbers of values, and a row for each


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """One run of a cell. rows: of each argument in turn, [arguments, ops]; starts: the first row
    of each result (of an unpack: of all of them, op after op)."""

    cell: Cell
    num_rows: int
    rows: Tensor
    starts: tuple[int, ...]
    level: int = 0
    bundle: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Ops:
    """The ops of one cell as they were recorded: of each the first value it makes, and the values
    it reads, one after another."""

    cell: Cell
    numbers: Tensor

    @property
    def num_ops(self) -> int:
        """How many they are."""
        return len(self.numbers) // (1 + len(self.cell.reads))

    @property
    def args(self) -> Tensor:
        """The values they read, [ops, arguments]."""
        return self._table[:, 1:]

    @property
    def pending(self) -> PendingOps:
        """The same, ready to be grouped."""
        return PendingOps(self.cell, self.args, self._table[:, 0].contiguous())

    @property
    def _table(self) -> Tensor:
        return self.numbers.view(-1, 1 + len(self.cell.reads))


@dataclass(eq=False)
class PendingOps:
    """The ops of one cell: the values they read, [ops, arguments], and make from `bases` on."""

    cell: Cell
    args: Tensor
    bases: Tensor
    rows: Tensor | None = None  # what the ops read, where they are fewer than they were asked for
    bounds: Sequence[tuple[int, int, int, int]] = ()  # (level, bundle, first op, last op + 1)
    starts: tuple[int, ...] = ()


def numbers_of(found: Sequence[int]) -> Tensor:
    """Python numbers as a tensor; torch.tensor takes five times as long."""
    return (
        torch.frombuffer(array("q", found), dtype=torch.int64) if found else torch.empty(0).long()
    )


class Layout:
    """Which row of the store of its spec each value has; it grows with every flush."""

    def __init__(self) -> None:
        self.num_rows: dict[Spec, int] = {}
        self.row_of = torch.empty(0, dtype=torch.int64)
        self.num_values = 0
        self.packs: dict[int, tuple[Spec, list[int]]] = {}  # put together when they are asked for
        self.packed: dict[int, list[int]] = {}  # put together for an op that reads them

    def take(self, spec: Spec, count: int) -> int:
        """The first of `count` new rows."""
        start = self.num_rows.get(spec, 0)
        self.num_rows[spec] = start + count
        return start

    def rows_of(self, number: int) -> int | Tensor:
        """The row of a value; of a pack that no op read, the rows it consists of."""
        row = int(self.row_of[number])
        return row if row >= 0 else self.row_of[numbers_of(self.packs[number][1])]

    def grow(self, num_values: int) -> None:
        """Room for values up to this number."""
        more = torch.full((num_values - self.num_values,), -1)
        self.row_of = torch.cat([self.row_of, more])
        self.num_values = num_values


def place_inputs(layout: Layout, given: Iterable[Given]) -> list[tuple[Spec, int, Tensor]]:
    """A place for all inputs: (spec, first row, rows)."""
    by_spec: dict[Spec, tuple[list[int], list[Tensor]]] = {}
    for numbers, rows in given:
        known, tensors = by_spec.setdefault(spec_of(rows.shape[1:], rows.dtype), ([], []))
        known += numbers
        tensors.append(rows)
    found = []
    for spec, (known, tensors) in by_spec.items():
        made = torch.cat(tensors)
        if not spec.shape and not spec.dtype.is_floating_point:  # words: equal ones are one
            made, which = torch.unique(made, return_inverse=True)
        else:
            which = torch.arange(len(known))
        start = layout.take(spec, len(made))
        layout.row_of[numbers_of(known)] = start + which
        found.append((spec, start, made))
    return found


def read_of(
    specs: Mapping[int, Spec], layout: Layout, pending: Sequence[Ops | PendingOps]
) -> set[int]:
    """Those of these values that pending ops, or packs, read."""
    found, kinds = set(_read_by_ops(specs, layout, pending)), set(specs.values())
    for spec, numbers in layout.packs.values():
        if spec in kinds:
            found |= specs.keys() & numbers
    return found


def _read_by_ops(
    specs: Mapping[int, Spec], layout: Layout, pending: Sequence[Ops | PendingOps]
) -> list[int]:
    kinds = set(specs.values())
    readers = [item for item in pending if not kinds.isdisjoint(item.cell.reads)]
    if not readers:
        return []
    mask = torch.zeros(layout.num_values, dtype=torch.bool)
    for item in readers:
        mask[item.args] = True
    known = numbers_of(list(specs))
    found: list[int] = known[mask[known]].tolist()
    return found


def group(
    layout: Layout, pending: Sequence[PendingOps], bundles: Sequence[int] = ()
) -> list[Group]:
    """The groups of the pending ops, in an order in which they can run."""
    pending = [*pending, *_packs_read(layout, pending)]
    if not pending:
        return []
    maker_of, cell_of = _makers(layout, pending)
    reads = _reads(cell_of, pending)
    borders = torch.tensor(bundles[1:]) if len(bundles) > 1 else None
    rings = _rings(reads)
    for ring in rings:
        alone = len(ring) == 1 and ring[0] not in reads[ring[0]]
        levels = None if alone else _levels([pending[n] for n in ring], maker_of)
        for at, number in enumerate(ring):
            if alone and borders is None and _place_equal(pending[number], layout):
                continue
            _sort(pending[number], None if levels is None else levels[at], borders)
            _place(pending[number], layout)
    groups = []
    for ring in rings:
        found = [each for member in ring for each in _cut(pending[member], layout)]
        groups += sorted(found, key=lambda each: each.level) if len(ring) > 1 else found
    return groups


def _packs_read(layout: Layout, pending: Sequence[PendingOps]) -> list[PendingOps]:
    """Packs that pending ops read, as ops."""
    found: dict[tuple[Spec, int], list[int]] = {}
    for number in packs_needed(layout, pending):
        spec, values = layout.packs.pop(number)
        found.setdefault((spec, len(values)), []).append(number)
        layout.packed[number] = values
    made = []
    for (spec, count), numbers in found.items():
        cell = pack_cell(spec, count)
        args = torch.tensor([layout.packed[number] for number in numbers])
        made.append(PendingOps(cell, args, torch.tensor(numbers)))
    return made


def packs_needed(layout: Layout, pending: Sequence[Ops | PendingOps]) -> list[int]:
    """The packs that ops read."""
    specs = {
        number: spec_of((len(values), *spec.shape), spec.dtype)
        for number, (spec, values) in layout.packs.items()
    }
    return _read_by_ops(specs, layout, pending)


def _makers(layout: Layout, pending: Sequence[PendingOps]) -> tuple[Tensor, Tensor]:
    """For each value the first value of the op that makes it, and its cell (-1: none)."""
    bases = torch.cat([item.bases for item in pending])
    counts = numbers_of([len(item.bases) for item in pending])
    first = layout.row_of >= 0  # inputs, and what earlier flushes made
    first[bases] = True
    first[numbers_of(list(layout.packs))] = True
    numbers = torch.arange(layout.num_values)
    maker_of = torch.where(first, numbers, 0).cummax(0).values  # results follow the first one
    cells = torch.full((layout.num_values,), -1)
    cells[bases] = torch.repeat_interleave(torch.arange(len(pending)), counts)
    return maker_of, cells[maker_of]


def _reads(cell_of: Tensor, pending: Sequence[PendingOps]) -> list[set[int]]:
    """For each cell the cells whose values it reads."""
    num = len(pending) + 1
    counts = numbers_of([item.args.numel() for item in pending])
    readers = torch.repeat_interleave(torch.arange(num - 1), counts)
    makers = cell_of[torch.cat([item.args.flatten() for item in pending])] + 1
    pairs = torch.bincount(readers * num + makers, minlength=num * num).nonzero().flatten()
    found: list[set[int]] = [set() for _ in pending]
    for pair in pairs.tolist():
        reader, maker = divmod(pair, num)
        if maker:
            found[reader].add(maker - 1)
    return found


def _levels(ring: list[PendingOps], maker_of: Tensor) -> list[Tensor]:
    """How deep each op stands in its ring; ops come in the order of recording."""
    inside = torch.zeros(len(maker_of), dtype=torch.bool)
    for item in ring:
        inside[item.bases] = True
    depth = [0] * len(maker_of)
    bases = [item.bases.tolist() for item in ring]
    items: list[tuple[int, tuple[int, ...]]] = []
    for item, numbers in zip(ring, bases, strict=True):
        makers = maker_of[item.args]
        columns = [makers[:, at] for at in range(makers.shape[1])]
        columns = [c for n, c in enumerate(columns) if not any(map(c.equal, columns[:n]))]
        columns = [c for c in columns if bool(inside[c].any())]
        items += zip(numbers, zip(*[c.tolist() for c in columns], strict=True), strict=True)
    if len(ring) > 1:
        items.sort()
    for base, makers_of in items:
        deepest = 0
        for maker in makers_of:  # max() takes twice as long
            if depth[maker] > deepest:
                deepest = depth[maker]
        depth[base] = deepest + 1
    return [numbers_of([depth[base] for base in numbers]) for numbers in bases]


def _sort(item: PendingOps, levels: Tensor | None, borders: Tensor | None) -> None:
    """The ops of a cell by level and bundle, and where each group of them starts and ends."""
    count = len(item.bases)
    if levels is None and borders is None:
        item.bounds = [(0, 0, 0, count)]
        return
    level = torch.zeros(count, dtype=torch.int64) if levels is None else levels
    num = 1 if borders is None else len(borders) + 1
    bundle = None if borders is None else torch.bucketize(item.bases, borders, right=True)
    keys = level * num if bundle is None else level * num + bundle
    keys, order = torch.sort(keys, stable=True)
    kinds, counts = torch.unique_consecutive(keys, return_counts=True)
    ends = torch.cumsum(counts, 0).tolist()
    starts = [0, *ends[:-1]]
    item.bounds = [
        (kind // num, kind % num, start, end)
        for kind, start, end in zip(kinds.tolist(), starts, ends, strict=True)
    ]
    item.bases, item.args = item.bases[order], item.args[order]


def _place(item: PendingOps, layout: Layout) -> None:
    """Rows for what the ops of a cell make: one after another, in their order."""
    count, makes = len(item.bases), item.cell.makes
    if item.cell.kind == "unpack":
        start = layout.take(makes[0], count * len(makes))
        values = item.bases[:, None] + torch.arange(len(makes))
        layout.row_of[values] = torch.arange(start, start + values.numel()).view(values.shape)
        item.starts = (start,)
        return
    starts = []
    for at, spec in enumerate(makes):
        starts.append(layout.take(spec, count))
        layout.row_of[item.bases + at] = torch.arange(starts[-1], starts[-1] + count)
    item.starts = tuple(starts)


def _place_equal(item: PendingOps, layout: Layout) -> bool:
    """Rows for what the ops of a cell make, one for all that read the same row; False if there is
    no such pair, or they read more than one value."""
    if item.args.shape[1] != 1 or item.cell.kind != "calls" or len(item.bases) < 2:
        return False
    rows, which = torch.unique(layout.row_of[item.args[:, 0]], return_inverse=True)
    count = len(rows)
    if count == len(item.bases):
        return False
    item.starts = tuple([layout.take(spec, count) for spec in item.cell.makes])
    for at, start in enumerate(item.starts):
        layout.row_of[item.bases + at] = start + which
    item.rows, item.bounds = rows[None], [(0, 0, 0, count)]
    return True


def _cut(item: PendingOps, layout: Layout) -> list[Group]:
    rows = layout.row_of[item.args].t().contiguous() if item.rows is None else item.rows
    scale = len(item.cell.makes) if item.cell.kind == "unpack" else 1
    found = []
    for level, bundle, first, last in item.bounds:
        mine = rows if len(item.bounds) == 1 else rows[:, first:last]
        starts = tuple(start + first * scale for start in item.starts)
        found.append(Group(item.cell, last - first, mine, starts, level, bundle))
    return found


def _rings(reads: Sequence[set[int]]) -> list[list[int]]:
    """Cells that feed each other, makers before readers (Tarjan)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found: list[list[int]] = []

    def visit(node: int) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(reads[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            ring: list[int] = []
            while not ring or ring[-1] != node:
                ring.append(stack.pop())
            found.append(sorted(ring))

    for node in range(len(reads)):
        if node not in index:
            visit(node)
    return found
