"""The reference: which version of every value each op sees when ops run in program order.

`docs/plans.md`, "The reference". Between two ops all cells of a root have one version, so a number
a root is enough; inside an op that runs part by part, part p sees what parts 0 .. p-1 left.
"""

from __future__ import annotations

from typing import NamedTuple

from torchweft.plan.graph import Graph, Op


class Touch(NamedTuple):
    """How an op touches a root, by which names, and what versions it meets.

    by_part: a run touches the cells of its own parts, else all cells.
    before, rise: the version ahead of the op, and what the op adds; per_part: each part adds it.
    made: the op makes the root.
    """

    root: str
    names: tuple[str, ...]
    by_part: bool
    before: int
    rise: int
    per_part: bool
    made: bool

    @property
    def writes(self) -> bool:
        """Whether the op changes the bytes."""
        return self.made or self.rise > 0

    def versions(self, start: int, stop: int) -> tuple[int | None, int]:
        """(version it must see, version it leaves) when it runs over parts [start:stop]."""
        if self.per_part:
            before = self.before + start
            return (None if self.made and start == 0 else before), self.before + stop
        return (None if self.made else self.before), self.before + self.rise


class Reference(NamedTuple):
    """All touches of every op, the names it uses, and the final version of every root."""

    touches: dict[str, tuple[Touch, ...]]
    final: dict[str, int]


def reference(graph: Graph, num_parts: int) -> Reference:
    """Walk the ops in program order and note the versions."""
    version = {name: 0 for name, root in graph.root.items() if name == root}
    touches: dict[str, tuple[Touch, ...]] = {}
    for op in graph.ops:
        own = []
        for root, names in _roots(graph, op).items():
            touch = _touch(graph, op, root, names, version[root], num_parts)
            version[root] = touch.before + touch.rise * (num_parts if touch.per_part else 1)
            own.append(touch)
        touches[op.name] = tuple(own)
    return Reference(touches, version)


def _roots(graph: Graph, op: Op) -> dict[str, list[str]]:
    """The roots an op touches, each with the names by which it does."""
    names: dict[str, list[str]] = {}
    for name in op.touched:
        names.setdefault(graph.root[name], []).append(name)
    for name in op.makes:
        if graph.value[name].alias_of is None:
            names.setdefault(name, []).append(name)
    return names


def _touch(
    graph: Graph, op: Op, root: str, names: list[str], version: int, num_parts: int
) -> Touch:
    batched = all(graph.value[name].batch is not None for name in [root, *names])
    by_part = batched and not op.whole
    made = root in op.makes
    mutated = any(graph.root[name] == root for name in op.mutates)
    if made and op.rows == "additive":
        return Touch(root, tuple(names), False, -num_parts, 1, True, True)
    if made or not mutated:
        return Touch(root, tuple(names), by_part, version, 0, False, made)
    return Touch(root, tuple(names), by_part, version, 1, not by_part and not op.whole, False)
