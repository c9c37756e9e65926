"""The sums over rows of a graph, put together: weight gradients wait for the end of their stretch.

A backward pass has a weight gradient behind every product. Left where it is, each would cut the
row-wise stretch in two; nobody needs it so soon, so it waits until the stretch ends anyway:

    row  sum  row  sum  free(sum)  mixing      ->     [row row] [sum sum] [free] [mixing]
    row  sum  row  collective  row             ->     [row row] [collective] [sum] [row]
"""

from __future__ import annotations

from torch import fx

from torchweft.capture.ops.regions import Region, needs
from torchweft.capture.ops.units import Unit
from torchweft.capture.rows.rows import Rows


def sink(units: list[Unit], rows: Rows) -> list[Unit]:
    """The units in an order that keeps every dependence, additive ones late and side by side."""
    if not any(unit.kind == "additive" for unit in units):
        return units
    return _Sinker(units, rows).sorted()


class _Sinker:
    """`stretch`: the row-wise units since the last cut. `waiting`: what shall come behind them."""

    def __init__(self, units: list[Unit], rows: Rows) -> None:
        self.units, self.rows = units, rows
        self.cheap: dict[fx.Node, Unit] = {
            node: unit for unit in units if unit.cheap for node in unit.nodes
        }
        self.done: list[Unit] = []
        self.num_groups = 0
        self._restart()

    def sorted(self) -> list[Unit]:
        for unit in self.units:
            if unit.cheap:
                self.done.append(unit)
                continue
            waits = needs(unit, self.waiting, self.cheap, self.rows)
            if unit.kind == "additive" and not waits:
                self.waiting.add(unit)
                continue
            if unit.kind == "batch-free" and waits and unit.key is None and not unit.writes:
                self.waiting.add(unit)
                continue
            if unit.collective is not None and not waits:
                self.done.append(unit)  # the sums run while it is under way
                self._flush()
                continue
            if waits or self._cuts(unit):
                self._flush()
            if unit.kind == "additive":
                self.waiting.add(unit)
                continue
            if unit.kind == "row-wise":
                self.stretch.add(unit)
            self.done.append(unit)
        self._flush()
        return self.done

    def _cuts(self, unit: Unit) -> bool:
        """Whether a unit ends the stretch, wherever the sums are."""
        if not self.stretch.units or unit.kind == "batch-free":
            return False
        if unit.kind == "row-wise" and unit.collective is None:
            return unit.key != self.stretch.units[-1].key
        return needs(unit, self.stretch, self.cheap, self.rows)

    def _restart(self) -> None:
        self.stretch = Region([], "batch-free")
        self.waiting = Region([], "batch-free")

    def _flush(self) -> None:
        """Put what waits behind the stretch, the sums of one mark as one op."""
        sums = [unit for unit in self.waiting.units if unit.kind == "additive"]
        for unit in sums:
            unit.key = ("sums", self.num_groups, unit.key)
        self.num_groups += 1
        groups = dict.fromkeys(unit.key for unit in sums)
        self.done += [unit for key in groups for unit in sums if unit.key == key]
        self.done += [unit for unit in self.waiting.units if unit.kind != "additive"]
        self._restart()
