"""Grouping: the ops of a recording become groups, each one run of a cell over many rows.

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
Packs = dict[int, tuple[Spec, list[int]]]  # values that consist of rows of one spec
Block = tuple[Spec, int, int]  # first row, number of rows


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

    @property
    def results(self) -> list[Block]:
        """The rows that it makes."""
        made = zip(self.cell.rows_made(self.num_rows), self.starts, strict=True)
        return [(spec, start, count) for (spec, count), start in made]


@dataclass(frozen=True, eq=False, slots=True)
class Ops:
    """The ops of one cell as they were recorded: of each the first value it makes, and the values
    it reads, one after another."""

    cell: Cell
    numbers: Tensor

    @property
    def num_ops(self) -> int:
        return len(self.numbers) // (1 + len(self.cell.reads))

    @property
    def table(self) -> Tensor:
        """A row for each op: the first value it makes, and the values it reads."""
        return self.numbers.view(-1, 1 + len(self.cell.reads))


class _CellOps:
    """The ops of one cell while they are grouped: they read `args` [ops, arguments], and make
    values from `bases` on."""

    def __init__(self, cell: Cell, table: Tensor) -> None:
        self.cell, self.args, self.bases = cell, table[:, 1:], table[:, 0].contiguous()
        self.rows: Tensor | None = None  # what ops read, where several of them are one
        self.bounds = [(0, 0, 0, len(table))]  # (level, bundle, first op, last op + 1)
        self.starts: tuple[int, ...] = ()


def numbers_of(numbers: Sequence[int]) -> Tensor:
    """Python numbers as a tensor; torch.tensor takes five times as long."""
    if not numbers:
        return torch.empty(0, dtype=torch.int64)
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


class Layout:
    """Which row of the store of its spec each value has; it grows with every flush."""

    def __init__(self) -> None:
        self.num_rows: dict[Spec, int] = {}
        self.row_of = torch.empty(0, dtype=torch.int64)
        self.packs: Packs = {}  # that no op has read yet: they have no row

    @property
    def num_values(self) -> int:
        """Values below this number have a place."""
        return len(self.row_of)

    def take(self, spec: Spec, count: int) -> int:
        """The first of `count` new rows."""
        start = self.num_rows.get(spec, 0)
        self.num_rows[spec] = start + count
        return start

    def rows_of(self, number: int) -> Tensor:
        """The row of a value, as a scalar; of a pack that has none, the rows it consists of."""
        row = self.row_of[number]
        return row if row >= 0 else self.row_of[numbers_of(self.packs[number][1])]

    def grow(self, num_values: int) -> None:
        """Make room for values up to this number."""
        more = torch.full((num_values - self.num_values,), -1)
        self.row_of = torch.cat([self.row_of, more])


def place_inputs(layout: Layout, given: Iterable[Given]) -> list[tuple[Spec, int, Tensor]]:
    """A place for all inputs: (spec, first row, rows)."""
    by_spec: dict[Spec, tuple[list[int], list[Tensor]]] = {}
    for numbers, rows in given:
        known, tensors = by_spec.setdefault(spec_of(rows.shape[1:], rows.dtype), ([], []))
        known += numbers
        tensors.append(rows)
    placed = []
    for spec, (known, tensors) in by_spec.items():
        made = torch.cat(tensors)
        if not spec.shape and not spec.dtype.is_floating_point:  # words: equal ones are one
            made, which = torch.unique(made, return_inverse=True)
        else:
            which = torch.arange(len(known))
        start = layout.take(spec, len(made))
        layout.row_of[numbers_of(known)] = start + which
        placed.append((spec, start, made))
    return placed


def read_by_ops(specs: Mapping[int, Spec], num_values: int, ops: Iterable[Ops]) -> list[int]:
    """Those of these values that ops read."""
    kinds = set(specs.values())
    readers = [item for item in ops if not kinds.isdisjoint(item.cell.reads)]
    if not readers:
        return []
    mask = torch.zeros(num_values, dtype=torch.bool)
    for item in readers:
        mask[item.table[:, 1:]] = True
    known = numbers_of(list(specs))
    numbers: list[int] = known[mask[known]].tolist()
    return numbers


def packs_read(packs: Packs, num_values: int, ops: Iterable[Ops]) -> list[int]:
    """Those of these packs that ops read."""
    specs = {
        number: spec_of((len(values), *spec.shape), spec.dtype)
        for number, (spec, values) in packs.items()
    }
    return read_by_ops(specs, num_values, ops)


def group(layout: Layout, ops: Sequence[Ops], bundles: Sequence[int] = ()) -> list[Group]:
    """The groups of these ops, in an order in which they can run; packs they read are ops too."""
    tables: dict[tuple[Spec, int], list[list[int]]] = {}
    for number in packs_read(layout.packs, layout.num_values, ops):
        spec, values = layout.packs.pop(number)
        tables.setdefault((spec, len(values)), []).append([number, *values])
    pending = [_CellOps(item.cell, item.table) for item in ops]
    pending += [_CellOps(pack_cell(*key), torch.tensor(table)) for key, table in tables.items()]
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
        cut = [each for member in ring for each in _cut(pending[member], layout)]
        groups += sorted(cut, key=lambda each: each.level) if len(ring) > 1 else cut
    return groups


def _makers(layout: Layout, pending: Sequence[_CellOps]) -> tuple[Tensor, Tensor]:
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


def _reads(cell_of: Tensor, pending: Sequence[_CellOps]) -> list[set[int]]:
    """For each cell the cells whose values it reads."""
    num = len(pending) + 1
    counts = numbers_of([item.args.numel() for item in pending])
    readers = torch.repeat_interleave(torch.arange(num - 1), counts)
    makers = cell_of[torch.cat([item.args.flatten() for item in pending])] + 1
    pairs = torch.bincount(readers * num + makers, minlength=num * num).nonzero().flatten()
    read: list[set[int]] = [set() for _ in pending]
    for pair in pairs.tolist():
        reader, maker = divmod(pair, num)
        if maker:
            read[reader].add(maker - 1)
    return read


def _levels(ring: list[_CellOps], maker_of: Tensor) -> list[Tensor]:
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


def _sort(item: _CellOps, levels: Tensor | None, borders: Tensor | None) -> None:
    """The ops of a cell by level and bundle, and where each group of them starts and ends."""
    if levels is None and borders is None:
        return
    keys, num = torch.zeros_like(item.bases) if levels is None else levels, 1
    if borders is not None:
        num = len(borders) + 1
        keys = keys * num + torch.bucketize(item.bases, borders, right=True)
    keys, order = torch.sort(keys, stable=True)
    kinds, counts = torch.unique_consecutive(keys, return_counts=True)
    ends = torch.cumsum(counts, 0).tolist()
    starts = [0, *ends[:-1]]
    item.bounds = [
        (kind // num, kind % num, start, end)
        for kind, start, end in zip(kinds.tolist(), starts, ends, strict=True)
    ]
    item.bases, item.args = item.bases[order], item.args[order]


def _place(item: _CellOps, layout: Layout) -> None:
    """Rows for what the ops of a cell make: one after another, in their order."""
    sizes = item.cell.rows_made(len(item.bases))
    item.starts = tuple([layout.take(spec, count) for spec, count in sizes])
    for at, ((_, count), start) in enumerate(zip(sizes, item.starts, strict=True)):
        values = item.bases + at
        if item.cell.kind == "unpack":  # all results of an op, then those of the next one
            values = (values[:, None] + torch.arange(len(item.cell.makes))).flatten()
        layout.row_of[values] = torch.arange(start, start + count)


def _place_equal(item: _CellOps, layout: Layout) -> bool:
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


def _cut(item: _CellOps, layout: Layout) -> list[Group]:
    rows = layout.row_of[item.args].t().contiguous() if item.rows is None else item.rows
    groups = []
    for level, bundle, first, last in item.bounds:
        mine = rows if len(item.bounds) == 1 else rows[:, first:last]
        before = zip(item.cell.rows_made(first), item.starts, strict=True)
        starts = tuple([start + count for (_, count), start in before])
        groups.append(Group(item.cell, last - first, mine, starts, level, bundle))
    return groups


def _rings(reads: Sequence[set[int]]) -> list[list[int]]:
    """Cells that feed each other, makers before readers: those that need the same cells."""
    needs = [1 << node for node in range(len(reads))]  # a bit for each cell, its own among them
    grows = True
    while grows:
        grows = False
        for node, makers in enumerate(reads):
            before = needs[node]
            for maker in makers:
                needs[node] |= needs[maker]
            grows = grows or needs[node] != before
    rings: dict[int, list[int]] = {}
    for node, bits in enumerate(needs):
        rings.setdefault(bits, []).append(node)
    return [rings[bits] for bits in sorted(rings, key=int.bit_count)]
