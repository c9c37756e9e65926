"""The precedence of ops: which op must come before which, because they touch the same bytes.

    Precedence.before["mlp0"] == (("reduce0", True), ...)     True: part by part, False: all first

Three kinds of dependency, all through roots, so aliases count: read after write, write after read,
write after write. A *serial* op changes bytes that all parts share, so its parts go in part order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchweft.plan.graph import Graph, Op


@dataclass(frozen=True)
class Precedence:
    """For each op the ops that must come before it, and the ops whose parts go in order."""

    before: Mapping[str, tuple[tuple[str, bool], ...]]
    serial: frozenset[str]


def precedence(graph: Graph) -> Precedence:
    """Walk the ops in program order and note who touched each root last."""
    writer: dict[str, tuple[Op, bool]] = {}
    readers: dict[str, list[tuple[Op, bool]]] = {}
    before: dict[str, tuple[tuple[str, bool], ...]] = {}
    serial = set()
    for op in graph.ops:
        ahead: dict[str, bool] = {}

        def after(other: tuple[Op, bool], by_part: bool, ahead: dict[str, bool] = ahead) -> None:
            same = by_part and other[1]
            ahead[other[0].name] = ahead.get(other[0].name, True) and same

        for name in op.touched:
            maker = graph.maker.get(name)
            if maker is not None and graph.value[name].alias_of is not None:
                # Read after write of the view itself.
                after(
                    (maker, not maker.whole), not op.whole and graph.value[name].batch is not None
                )
        for root, (by_part, writes) in touches(graph, op).items():
            if root in writer:
                after(writer[root], by_part)
            if writes:
                for reader in readers.get(root, ()):
                    after(reader, by_part)
                writer[root], readers[root] = (op, by_part), []
                if not by_part and not op.whole:
                    serial.add(op.name)
            else:
                readers.setdefault(root, []).append((op, by_part))
        ahead.pop(op.name, None)
        before[op.name] = tuple(ahead.items())
    return Precedence(before, frozenset(serial))


def touches(graph: Graph, op: Op) -> dict[str, tuple[bool, bool]]:
    """For each root that an op touches: (only the rows of its own part, does it change them)."""
    how: dict[str, tuple[bool, bool]] = {}
    root, value = graph.root, graph.value
    for names, writes in ((op.reads, False), (op.mutates, True), (op.makes, True)):
        for name in names:
            if writes and value[name].alias_of is not None and name not in op.mutates:
                continue
            base = root[name]
            own, wrote = how.get(base, (not op.whole and value[base].batch is not None, False))
            how[base] = (own and value[name].batch is not None, wrote or writes)
    return how
