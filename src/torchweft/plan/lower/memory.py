"""Memory: when bytes are dead, and which values may share them.

    add_frees      a free behind the last use of every value that an op made
    share_buffers  values that can be written into given memory get offsets in common buffers

Both ask the plan's clocks: what is ordered behind what, by lanes and waits. Neither adds a wait, so
no lane is slowed down to save bytes. Values are compared in *units*: a buffer's unit is the product
of symbols that its values have in common (`s0`), so an offset is a number whatever the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchweft.plan.lower.conflicts import Ledger
from torchweft.plan.plan import Buffer, Place, Plan, Range, Step
from torchweft.plan.sizes import Size

Clock = Mapping[str, int]


def clocks(plan: Plan) -> tuple[list[Clock], list[int]]:
    """For each step how far each lane is known to be when it ends, and its place on its lane.

    The steps must stand in an order in which they could run one by one, as `lower` leaves them.
    """
    now: dict[str, dict[str, int]] = {lane.name: {} for lane in plan.lanes}
    ended: dict[str, Clock] = {}
    ends: list[Clock] = []
    at: list[int] = []
    targets = {step.target for step in plan.steps if step.kind == "wait"}
    for step in plan.steps:
        before = now[step.lane]
        now[step.lane] = clock = {**before, step.lane: before.get(step.lane, 0) + 1}
        for lane, count in ended.get(step.target or "", {}).items():
            clock[lane] = max(clock.get(lane, 0), count)
        ends.append(clock)
        at.append(clock[step.lane])
        if targets and step.label in targets:
            ended.setdefault(step.label, clock)
    return ends, at


@dataclass
class Life:
    """The steps that touch one location of a root, and those that write it first."""

    root: str
    parts: Range | None
    first: int
    uses: list[int] = field(default_factory=list)


def lives(plan: Plan) -> list[Life]:
    """Every location that an op makes, with all its uses, in the order of making."""
    graph, ledger = plan.graph, Ledger(plan, plan.graph)
    placed = {place.value for place in plan.places}
    locations: list[Life] = []
    where: dict[tuple[str, int], Life] = {}
    for index, step in enumerate(plan.steps):
        if step.kind == "free":
            continue
        ops = step.names if step.kind in ("run", "issue") else ()
        makes = {name for op in ops for name in graph.op[op].makes}
        opened: dict[str, Life] = {}
        for name, part, _ in ledger.touched(step):
            life = where.get((name, part))
            if life is None and name in makes:
                if name not in opened:
                    whole = name in placed or graph.value[name].batch is None
                    opened[name] = Life(name, None if whole else step.parts, index)
                    locations.append(opened[name])
                life = opened[name]
                count = 1 if graph.value[name].batch is None else plan.num_parts
                for each in range(*(life.parts or (0, count))):
                    where[name, each] = life
            if life is not None and (not life.uses or life.uses[-1] != index):
                life.uses.append(index)
    return locations


def _over(plan: Plan, life: Life, at: list[int]) -> Clock:
    """How far each lane must have come for all uses to be over."""
    needs: dict[str, int] = {}
    for use in life.uses:
        needs[plan.steps[use].lane] = max(needs.get(plan.steps[use].lane, 0), at[use])
    return needs


def add_frees(plan: Plan) -> Plan:
    """A free behind the last use of each location, on a lane that knows all uses to be over."""
    graph = plan.graph
    kept = {graph.root[name] for name in graph.outputs}
    kept |= {place.value for place in plan.places if place.buffer is not None}  # dead by reuse
    ends, at = clocks(plan)
    after: dict[int, list[Step]] = {}
    rows: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        rows.setdefault(step.lane, []).append(index)
    foreign = {step.names[0] for step in plan.steps if step.kind == "copy" and step.on is not None}
    for life in lives(plan):
        if life.root in kept or life.root in foreign:
            continue
        lane, needs = plan.steps[life.uses[-1]].lane, _over(plan, life, at)
        for index in rows[lane][at[life.uses[-1]] - 1 :]:
            if all(ends[index].get(other, 0) >= count for other, count in needs.items()):
                after.setdefault(index, []).append(Step("free", lane, (life.root,), life.parts))
                break
    steps = [s for index, step in enumerate(plan.steps) for s in (step, *after.get(index, ()))]
    return plan.then(f"free: {len(steps) - len(plan.steps)} frees", steps=tuple(steps))


@dataclass
class FreeBlock:
    """Units of a buffer that are free for steps that come behind `needs`."""

    offset: int
    num_units: int
    needs: Clock


def share_buffers(plan: Plan) -> Plan:
    """Offsets in shared buffers for values that their makers can write into given memory.

    Going through the steps in order, a value takes the smallest free block that is large enough and
    whose former users have all ended before its first write; else the buffer grows.
    """
    graph = plan.graph
    kept = {graph.root[name] for name in graph.outputs} | {place.value for place in plan.places}
    torn = _writers(plan)
    ends, at = clocks(plan)
    devices = {lane.name: lane.device for lane in plan.lanes}
    shelves: dict[tuple[str, Size], _Shelf] = {}
    places: list[Place] = []
    lent: dict[int, list[tuple[_Shelf, FreeBlock]]] = {}
    whole = _wholes(lives(plan))
    for index, step in enumerate(plan.steps):
        for life in whole.get(index, ()):
            unit = graph.value[life.root].bytes.unit
            if life.root in kept | plan.copied or unit is None or unit[0] <= 0:
                continue
            if len({devices[plan.steps[use].lane] for use in life.uses}) > 1:
                continue
            shelf = shelves.setdefault((devices[step.lane], unit[1]), _Shelf(f"b{len(shelves)}"))
            writers = [ends[writer] for writer in torn[life.root]]
            block = shelf.take(unit[0], writers)
            places.append(Place(life.root, shelf.name, block.offset))
            block.needs = _over(plan, life, at)
            lent.setdefault(max(life.uses), []).append((shelf, block))
        for shelf, block in lent.pop(index, ()):
            shelf.blocks.append(block)
    buffers = tuple(Buffer(shelf.name, device, unit) for (device, unit), shelf in shelves.items())
    note = f"reuse: {len(places)} values in {len(buffers)} buffers"
    return plan.then(note, buffers=plan.buffers + buffers, places=plan.places + tuple(places))


def _writers(plan: Plan) -> dict[str, list[int]]:
    """The steps that make each root."""
    writers: dict[str, list[int]] = {}
    for index, step in enumerate(plan.steps):
        if step.kind in ("run", "issue"):
            for op in step.names:
                for name in plan.graph.op[op].makes:
                    writers.setdefault(name, []).append(index)
    return writers


def _wholes(pieces: list[Life]) -> dict[int, list[Life]]:
    """One life a root, over all its parts, by the step that starts it."""
    joined: dict[str, Life] = {}
    for life in pieces:
        whole = joined.setdefault(life.root, Life(life.root, None, life.first))
        whole.uses += life.uses
    by_first: dict[int, list[Life]] = {}
    for life in joined.values():
        by_first.setdefault(life.first, []).append(life)
    return by_first


class _Shelf:
    """One buffer while it is being filled: its free blocks and its end."""

    def __init__(self, name: str) -> None:
        self.name, self.end = name, 0
        self.blocks: list[FreeBlock] = []

    def take(self, num_units: int, writers: list[Clock]) -> FreeBlock:
        """The smallest block that is large enough and whose users ended before all the writers."""

        def over(block: FreeBlock) -> bool:
            # A writer's own clock counts the writer itself, which comes behind the block's users.
            needs = block.needs.items()
            return all(clock.get(lane, 0) >= count for clock in writers for lane, count in needs)

        fitting = [block for block in self.blocks if block.num_units >= num_units and over(block)]
        if not fitting:
            self.end += num_units
            return FreeBlock(self.end - num_units, num_units, {})
        best = min(fitting, key=lambda block: block.num_units)
        self.blocks.remove(best)
        if best.num_units > num_units:
            rest = FreeBlock(best.offset + num_units, best.num_units - num_units, best.needs)
            self.blocks.append(rest)
        return FreeBlock(best.offset, num_units, {})
