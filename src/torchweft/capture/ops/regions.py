"""The `Region`: a stretch of a graph that becomes one op.

Units are taken in program order. Row-wise units grow the open region; a unit of another kind,
a collective or the border of a mark closes it. A unit that needs nothing of the open region is
put before it, so that a mask computed in the middle of a layer does not cut the layer:

    row  row  free  row  mixing(row)  row      ->      [free] [row row row] [mixing] [row]
                ^ needs no row                          (dependences and writes keep their order)

What waits for a slow op (a collective, a read from disk) is not joined to what does not: the latter
can run beside it.

    slow  row  row  row(slow)  row             ->      [slow] [row row] [row row]

A last call that cannot write where it is told (a layer norm, a convolution) is peeled off, if its
result is wanted whole: the parts write its *input* where that belongs, and it makes the whole
result at once. Nothing is copied.

    row  row  add  norm -> output              ->      [row row add]  [norm]
                                                        part by part   once
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import fx

from torchweft.capture.bodies.outs import Makers, Unfit
from torchweft.capture.marks import Mark
from torchweft.capture.ops.units import Unit, handed_out, mark_cheap, only_views, storages
from torchweft.capture.rows.rows import ORDER, Rows, id_of

WHOLE = ("batch-free", "random", "mixing")


@dataclass
class Region:
    """Units that run as one op."""

    units: list[Unit]
    kind: str
    mark: Mark | None = None
    key: object = None
    awaits: frozenset[int] = frozenset()
    nodes: set[fx.Node] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)

    def add(self, unit: Unit) -> None:
        """Take a unit in; the region has the worst kind of its units."""
        self.units.append(unit)
        self.nodes.update(unit.nodes)
        self.reads |= unit.reads
        self.writes |= unit.writes
        self.kind = max(self.kind, unit.kind, key=ORDER.index)

    @property
    def calls(self) -> list[fx.Node]:
        return [node for unit in self.units for node in unit.nodes]

    @property
    def collective(self) -> fx.Node | None:
        """The call that starts a collective, if the region is one."""
        return self.units[0].collective

    @property
    def states(self) -> set[str]:
        """The side state that its calls touch, by name."""
        return {name for unit in self.units for name in unit.states}

    @property
    def reason(self) -> Unit:
        """The unit that makes the region what it is."""
        return next(unit for unit in self.units if unit.kind == self.kind)


def cut(units: list[Unit], rows: Rows) -> list[Region]:
    """The regions, in an order that keeps every dependence."""
    cheap = {node: unit for unit in units if unit.cheap for node in unit.nodes}
    regions: list[Region] = []  # the last one is open
    for unit, awaits in zip(units, _awaited(units), strict=True):
        if unit.cheap:
            continue
        at = len(regions)
        if regions and _joins(regions[-1], unit, awaits):
            regions[-1].add(unit)
            continue
        free = unit.key is None and unit.kind in WHOLE  # marked units stay together
        if regions and free and not needs(unit, regions[-1], cheap, rows):
            at -= 1  # before the open region, as part of the one there if that is alike
            before = regions[at - 1] if at else None
            if before and before.kind == unit.kind and _joins(before, unit, awaits):
                before.add(unit)
                continue
        regions.insert(at, Region([], unit.kind, unit.mark, unit.key, awaits))
        regions[at].add(unit)
    return regions


def _awaited(units: list[Unit]) -> list[frozenset[int]]:
    """For each unit the slow units that it waits for, directly or not."""
    behind: dict[fx.Node, frozenset[int]] = {}
    awaited = []
    for number, unit in enumerate(units):
        used = {other for node in unit.nodes for other in node.all_input_nodes}
        awaits = frozenset[int]().union(*(behind.get(node, frozenset()) for node in used))
        awaited.append(awaits)
        behind |= dict.fromkeys(unit.nodes, awaits | {number} if is_slow(unit) else awaits)
    return awaited


def is_slow(unit: Unit) -> bool:
    """Whether other work can be done while a unit is under way."""
    marked = unit.mark is not None and unit.mark.uses in ("network", "io")
    return unit.collective is not None or marked


def _joins(region: Region, unit: Unit, awaits: frozenset[int]) -> bool:
    """Whether a unit may become part of the open region."""
    if unit.collective is not None or region.collective is not None or region.key != unit.key:
        return False
    if any(not again and name in region.states for name, again in unit.states.items()):
        return False
    if unit.key is not None:
        return True
    alike = region.kind == unit.kind and region.units[0].block == unit.block
    return alike and unit.kind != "random" and region.awaits == awaits


def needs(unit: Unit, region: Region, cheap: dict[fx.Node, Unit], rows: Rows) -> bool:
    """Whether a unit must stay behind a region: it reads what that makes, or one writes."""
    if unit.draws and any(other.draws for other in region.units):
        return True  # draws keep their order, or they would draw other numbers
    if unit.writes & (region.reads | region.writes) or unit.reads & region.writes:
        return True
    if unit.writes and any(unit.writes & storages(rows.value(node)) for node in region.nodes):
        return True
    waiting, seen = list(unit.nodes), set(unit.nodes)
    while waiting:
        for used in waiting.pop().all_input_nodes:
            if used in region.nodes:
                return True
            if used in cheap and used not in seen:
                seen.add(used)
                waiting.append(used)
    return False


def settle(units: list[Unit], rows: Rows, graph: fx.Graph) -> None:
    """Correct the kinds of units whose place in the graph asks for it.

    Results that share bytes with an input or with another output are handed out whole, so the
    call that makes them runs over all rows. A batch-free call inside a mark stays there only if
    nobody outside reads it; so does a view of noticed bytes.
    """
    home = {node: unit for unit in units for node in unit.nodes}
    shared = shared_outputs(graph, rows)
    noticed = storages([rows.value(node) for node in shared])
    noticed |= set().union(*(unit.writes for unit in units)) if units else set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            noticed |= storages(rows.value(node))
    for node in shared:
        unit = home.get(node)
        if unit is not None and unit.kind in ("row-wise", "batch-free"):
            if rows.axis(rows.value(node)) is not None or unit.kind == "row-wise":
                unit.kind = "mixing"
                unit.reason = "its result shares bytes with an input or an output"
            unit.mark, unit.key = None, None
    for unit in reversed(units):
        if unit.key is not None and unit.kind == "batch-free" and unit.collective is None:
            users = [user for node in unit.nodes for user in node.users]
            outside = any(
                user.op == "output" or home.get(user, unit).key != unit.key for user in users
            )
            alone = all(other.kind == "batch-free" for other in units if other.key == unit.key)
            if (outside or unit.writes) and not alone:
                unit.mark, unit.key = None, None
    _unmark_views(units, rows, noticed)
    mark_cheap(units, rows, noticed)


def _unmark_views(units: list[Unit], rows: Rows, noticed: set[int]) -> None:
    """Views of noticed bytes are no work of a mark, unless it has no other."""
    working: set[object] = set()
    views = []
    for unit in units:
        shown = storages([rows.value(node) for node in unit.nodes])
        if only_views(unit, rows) and shown and shown <= noticed:
            views.append(unit)
        else:
            working.add(unit.key)
    for unit in views:
        if unit.key in working and unit.collective is None:
            unit.mark, unit.key = None, None


def shared_outputs(graph: fx.Graph, rows: Rows) -> list[fx.Node]:
    """Outputs that are views of inputs or of what another output shows (and not its maker)."""
    maker: dict[int, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            for number in storages(rows.value(node)):
                maker.setdefault(number, node)
    outputs = graph.output_node().all_input_nodes
    values = {id(rows.value(node)): node for node in outputs if storages(rows.value(node))}
    number_of = {node: id_of(rows.value(node)) for node in values.values()}
    counts = Counter(number_of.values())
    shared = []
    for node, number in number_of.items():
        given = maker[number].op in ("placeholder", "get_attr")
        first = rows.value(maker[number]) is rows.value(node)
        if not first and (given or counts[number] > 1):
            shared.append(node)
    return shared


def sink(units: list[Unit], rows: Rows) -> list[Unit]:
    """The units in an order that keeps every dependence, additive ones late and side by side.

    A backward pass has a weight gradient behind every product. Left where it is, each would cut the
    row-wise stretch in two; nobody needs it so soon, so it waits until the stretch ends anyway:

        row  sum  row  sum  free(sum)  mixing      ->     [row row] [sum sum] [free] [mixing]
        row  sum  row  collective  row             ->     [row row] [collective] [sum] [row]
    """
    if not any(unit.kind == "additive" for unit in units):
        return units
    cheap = {node: unit for unit in units if unit.cheap for node in unit.nodes}
    done: list[Unit] = []
    stretch, waiting = _empty(), _empty()  # row-wise since the last cut, and what comes behind
    for unit in units:
        if unit.cheap:
            done.append(unit)
            continue
        waits = needs(unit, waiting, cheap, rows)
        plain = unit.kind == "batch-free" and unit.key is None and not unit.writes
        if plain if waits else unit.kind == "additive":
            waiting.add(unit)
            continue
        talks = unit.collective is not None and not waits
        if talks:
            done.append(unit)  # the sums run while it is under way
        if talks or waits or _cuts(unit, stretch, cheap, rows):
            done += _sums_first(waiting.units, len(done))
            stretch, waiting = _empty(), _empty()
        if unit.kind == "additive":
            waiting.add(unit)
        elif not talks:
            if unit.kind == "row-wise":
                stretch.add(unit)
            done.append(unit)
    return done + _sums_first(waiting.units, len(done))


def _empty() -> Region:
    return Region([], "batch-free")


def _cuts(unit: Unit, stretch: Region, cheap: dict[fx.Node, Unit], rows: Rows) -> bool:
    """Whether a unit ends the stretch, wherever the sums are."""
    if not stretch.units or unit.kind == "batch-free":
        return False
    if unit.kind == "row-wise" and unit.collective is None:
        return unit.key != stretch.units[-1].key
    return needs(unit, stretch, cheap, rows)


def _sums_first(waiting: list[Unit], number: int) -> list[Unit]:
    """What has waited, the sums of one mark side by side, to be one op; `number` is the place."""
    groups: dict[object, list[Unit]] = {}
    for unit in waiting:
        if unit.kind == "additive":
            groups.setdefault(unit.key, []).append(unit)
            unit.key = ("sums", number, unit.key)
    others = [unit for unit in waiting if unit.kind != "additive"]
    return [unit for group in groups.values() for unit in group] + others


def peel(units: list[Unit], rows: Rows, graph: fx.Graph) -> None:
    """Make units mixing that would only make parts to be copied together.

    Those who read such a result row by row wait for it, so nothing slow (a collective, a read from
    disk) may stand behind them: parts overlap there. A view that only calls over all parts read is
    taken by each of them, of the whole. A second call that counts (a product, a convolution) is
    never peeled off behind the first: then a copy costs less than what is no longer done in parts.
    """
    if torch.is_grad_enabled() and rows.level == "torch":
        return  # nothing is written in place then, so everything is copied anyway
    home = {node: unit for unit in units for node in unit.nodes}
    makers, handed = Makers(graph, rows, units), handed_out(rows)
    heavy: dict[int, int] = {}
    slow: set[int] = set()
    for unit in reversed(units):
        users = [user for node in unit.nodes for user in _users(node, home)]
        if is_slow(unit) or any(id(user) in slow for user in users):
            slow.add(id(unit))
        plain = unit.kind == "row-wise" and unit.collective is unit.key is None
        if not plain or unit.cheap or unit.writes or unit.draws:
            continue
        whole = list(map(_is_whole, users))
        shown = any(id(rows.value(node)) in handed for node in unit.nodes)  # to the caller
        inside = users and None not in users and not shown
        if only_views(unit, rows) and all(whole) and inside:
            unit.cheap = True  # whoever needs it takes the view of the whole itself
            continue
        if not _works_before(unit, home, rows):
            continue  # nothing would be left in parts
        if not any(whole) or (id(unit) in slow and not all(whole)):
            continue
        needed = [node for node in unit.nodes if any(map(_is_whole, _users(node, home)))]
        reasons = [_reason(node, makers, home) for node in needed]
        if not any(reasons):
            continue
        counts = any(rows.calls[node].flops != 0 for node in unit.nodes)
        weight = counts + max((heavy.get(id(user), 0) for user in users), default=0)
        if weight > 1:
            continue
        heavy[id(unit)] = weight
        why = next(filter(None, reasons))
        unit.kind, unit.reason = "mixing", f"its result is needed whole, and {why}"


def _works_before(unit: Unit, home: dict[fx.Node, Unit], rows: Rows) -> bool:
    """Whether row-wise work, and not only views, leads to a unit."""
    seen, waiting = {id(unit)}, [unit]
    while waiting:
        used = [used for node in waiting.pop().nodes for used in node.all_input_nodes]
        for other in (home[node] for node in used if node in home):
            if id(other) in seen or other.kind != "row-wise":
                continue
            if not only_views(other, rows):
                return True
            seen.add(id(other))
            waiting.append(other)
    return False


def _is_whole(user: Unit | None) -> bool:
    return user is None or user.kind in WHOLE


def _reason(node: fx.Node, makers: Makers, home: dict[fx.Node, Unit]) -> str:
    """Why a result cannot be written by parts where it belongs; empty if it can."""
    try:
        maker = makers.maker(node)
    except Unfit as unfit:
        return str(unfit)
    unit = home.get(maker.node)
    return "" if unit is not None and unit.kind == "row-wise" else "what it shows is whole already"


def _users(node: fx.Node, home: dict[fx.Node, Unit]) -> list[Unit | None]:
    """The units that read a result; None stands for the caller. Cheap ones pass it on."""
    readers: list[Unit | None] = []
    for user in node.users:
        unit = home.get(user)
        if user.op == "output":
            readers.append(None)
        elif unit is not None and unit.cheap:
            readers += _users(user, home)
        elif unit is not None and unit is not home.get(node):
            readers.append(unit)
    return readers
