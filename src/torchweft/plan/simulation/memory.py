"""The `LiveBytes` of a simulated call: what is made, kept and freed, sampled at every change.

memory.check(machine)       raises `MemoryPlanError` where a device does not hold its peak
"""

from __future__ import annotations

from collections import Counter

from torchweft.errors import MemoryPlanError
from torchweft.plan.machine import Machine
from torchweft.plan.plan import Plan, Range, Step
from torchweft.plan.simulation.prices import StepPrices
from torchweft.plan.trace import format_bytes

Piece = tuple[set[int], int, bool]  # its cells that are not freed yet, its bytes, is it a place


class LiveBytes:
    """Live bytes: loose pieces and places alone until they are freed, buffers all the time.

    peaks: by device, the most bytes at once, and the step that reached it (None: buffers alone).
    """

    def __init__(self, plan: Plan, prices: StepPrices) -> None:
        self.plan, self.live = plan, Counter[str]()  # by device
        self.graph, self.prices, self.num_parts = plan.graph, prices, plan.num_parts
        self.copied = plan.copied
        self.places = {place.value: place.buffer for place in plan.places}
        self.pieces: dict[tuple[str, str], list[Piece]] = {}  # by device and root
        for buffer in plan.buffers:
            unit = buffer.unit.evaluate(prices.context.env(self.graph.batch))
            inside = [place for place in plan.places if place.buffer == buffer.name]
            ends = [place.offset * unit + prices.num_bytes(place.value) for place in inside]
            self.live[buffer.device] += max(ends, default=0)
        self.peaks: dict[str, tuple[int, Step | None]]
        self.peaks = {device: (live, None) for device, live in self.live.items()}
        self.samples = [(0.0, self.live.total())]

    def start(self, step: Step, device: str, now_s: float) -> None:
        """Count what a step makes, from its start."""
        if step.kind == "copy":
            device = step.on or device
            self._make(device, step.names[0], step.parts, placed=step.on is None)
        elif step.kind in ("run", "issue"):
            for name in (name for op in step.names for name in self.graph.op[op].makes):
                value = self.graph.value[name]
                if value.alias_of is None:
                    placed = name in self.places and name not in self.copied
                    self._make(device, name, step.parts, placed=placed)
        if self.live[device] > self.peaks.get(device, (0, None))[0]:
            self.peaks[device] = self.live[device], step
        self._sample(now_s)

    def end(self, step: Step, device: str, now_s: float) -> None:
        """Drop what a free frees, and the loose piece that a copy has put in its place."""
        if step.kind != "free" and (step.kind != "copy" or step.on is not None):
            return
        root = self.graph.root[step.names[0]]
        pieces = self.pieces.pop((device, root), [])
        for cells, num_bytes, placed in pieces:
            if step.kind == "free" or not placed:
                cells -= self._cells(root, step.parts)
                self.live[device] -= 0 if cells else num_bytes
        self.pieces[device, root] = [piece for piece in pieces if piece[0]]
        self._sample(now_s)

    def _make(self, device: str, name: str, parts: Range | None, *, placed: bool) -> None:
        root = self.graph.root[name]
        parts = None if placed else parts
        pieces, cells = self.pieces.setdefault((device, root), []), self._cells(root, parts)
        # A place is made once for all parts, and the parts of an additive op add to one piece.
        if not any(piece[2] == placed and piece[0] & cells for piece in pieces):
            in_buffer = placed and self.places.get(name) is not None
            num_bytes = 0 if in_buffer else self.prices.num_bytes(name, parts)
            pieces.append((cells, num_bytes, placed))
            self.live[device] += num_bytes

    def _cells(self, root: str, parts: Range | None) -> set[int]:
        batched = self.graph.value[root].batch is not None
        return set(range(*(parts or (0, self.num_parts)))) if batched else {0}

    def _sample(self, now_s: float) -> None:
        if (total := self.live.total()) != self.samples[-1][1]:
            self.samples.append((now_s, total))

    def check(self, machine: Machine) -> None:
        """Raise `MemoryPlanError` (rule "memory") if a device has held more than it has."""
        for device in machine.devices:
            peak, step = self.peaks.get(device.name, (0, None))
            if device.memory_bytes is None or peak <= device.memory_bytes:
                continue
            number = lane = None
            at, shown = "from its first step on", ""
            if step is not None:
                number, lane = self.plan.steps.index(step), step.lane
                at = f"at step {number} ({step.label} on {lane})"
                shown = f"\n{self.plan.excerpt(number)}"
            text = (
                f"memory: the plan holds {format_bytes(peak)} {at}, on device {device.name!r} "
                f"{format_bytes(peak - device.memory_bytes)} more than its memory_bytes, "
                f"{format_bytes(device.memory_bytes)}."
            )
            cure = (
                "Take more parts (or fewer, where parts wait for each other), a strategy that "
                "keeps less at once (prefetch, for weights on disk), or raise memory_bytes."
            )
            text = f"{text}{shown}\n  {cure}"
            raise MemoryPlanError(text, rule="memory", lane=lane, step=number)
