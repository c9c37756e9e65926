"""Planned buffers: values of a plan that are never alive together share bytes.

    reuse    values take offsets in shared buffers, if their makers can write there

It asks the plan's clocks: what is ordered behind what, by lanes and waits. It adds no wait, so no
lane is slowed down to save bytes. Values are compared in *units*: a buffer's unit is the product of
symbols that its values have in common (`s0`), so an offset is a number whatever the batch.

Such plans are drawn, verified and simulated. Runtimes leave memory to torch: they run a value of a
buffer as one that has a place alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchweft.plan.lower.lower import (
    Clock,
    Life,
    add_frees,
    add_waits,
    clocks,
    issue_early,
    lives,
    made_by,
    over,
    place_wholes,
    send_values,
)
from torchweft.plan.plan import Buffer, Place, Plan
from torchweft.plan.sizes import Size


def lower_into_buffers(plan: Plan) -> Plan:
    """A plan that can run, as `lower` makes it, with values in shared buffers."""
    return add_frees(share_buffers(add_waits(place_wholes(send_values(issue_early(plan))))))


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
    ends, at = clocks(plan)
    writers: dict[str, list[Clock]] = {}  # when the steps that make each root end
    for end, step in zip(ends, plan.steps, strict=True):
        for name in made_by(plan, step):
            writers.setdefault(name, []).append(end)
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
            block = shelf.take(unit[0], writers[life.root])
            places.append(Place(life.root, shelf.name, block.offset))
            block.needs = over(plan, life, at)
            lent.setdefault(max(life.uses), []).append((shelf, block))
        for shelf, block in lent.pop(index, ()):
            shelf.blocks.append(block)
    buffers = tuple(Buffer(shelf.name, device, unit) for (device, unit), shelf in shelves.items())
    note = f"reuse: {len(places)} values in {len(buffers)} buffers"
    return plan.then(note, buffers=plan.buffers + buffers, places=plan.places + tuple(places))


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

        def is_over(block: FreeBlock) -> bool:
            # A writer's own clock counts the writer itself, which comes behind the block's users.
            needs = block.needs.items()
            return all(clock.get(lane, 0) >= count for clock in writers for lane, count in needs)

        fitting = [
            block for block in self.blocks if block.num_units >= num_units and is_over(block)
        ]
        if not fitting:
            self.end += num_units
            return FreeBlock(self.end - num_units, num_units, {})
        best = min(fitting, key=lambda block: block.num_units)
        self.blocks.remove(best)
        if best.num_units > num_units:
            rest = FreeBlock(best.offset + num_units, best.num_units - num_units, best.needs)
            self.blocks.append(rest)
        return FreeBlock(best.offset, num_units, {})
