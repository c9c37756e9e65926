"""The `Owners` of bytes: which calls touch them, and so which collective may reduce in place.

    y = linear(x);  z = all_reduce(y)          nobody else touches y: reduced where it is
    y = linear(x);  z = all_reduce(y) + y      y is still wanted: a copy is reduced

The proof: the bytes belong to no input and no output; the call that first has them always makes
new ones (a `reshape` may be a view in a part of one row); all other calls that touch them stand in
the op of that call, or are views that only the collective takes. So they pass from one op to the
collective and nowhere else. A part may be a slice of them: other parts have slices of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from torchweft.capture.marks import target_name
from torchweft.capture.ops.regions import Region
from torchweft.capture.ops.units import storages
from torchweft.capture.rows.rows import Rows

MAKERS = (
    "linear matmul mm bmm addmm baddbmm einsum embedding add sub mul div truediv relu gelu silu "
    "tanh sigmoid softmax layer_norm rms_norm sum"
)
NEW = frozenset(MAKERS.split())


class Owners:
    """Calls by the bytes that they touch."""

    def __init__(
        self, graph: fx.Graph, rows: Rows, regions: Iterable[Region], cheap: set[fx.Node]
    ) -> None:
        self.rows, self.cheap = rows, cheap
        self.home = {node: region for region in regions for node in region.nodes}
        self.touching: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            values = [rows.value(used) for used in (node, *node.all_input_nodes)]
            for number in storages(values):
                self.touching.setdefault(number, []).append(node)

    def is_dead(self, region: Region) -> bool:
        """Whether the input of a collective is wanted by nobody behind it."""
        given = region.calls[0].args[0]
        numbers = storages(self.rows.value(given)) if isinstance(given, fx.Node) else set()
        if len(numbers) != 1:
            return False
        touching = self.touching[numbers.pop()]
        maker = self.home.get(touching[0])
        if maker is None or maker.collective is not None or not _is_new(touching[0]):
            return False
        homes = [self.home.get(node) for node in touching if node not in self.cheap]
        return all(home is maker or home is region for home in homes)


def _is_new(node: fx.Node) -> bool:
    """Whether a call makes new bytes, however many rows there are."""
    names = target_name(node).split(".")
    return bool({names[-1], *names[-2:-1]} & NEW)
