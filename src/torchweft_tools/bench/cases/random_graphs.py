"""The random graph: a few ops of all kinds of rows, with aliases, mutations and collectives.

Everything is drawn from the `random.Random` that is passed in, so a seed determines a graph. Graphs
pass the checks of `Graph`; they mean nothing, but they exercise every rule of docs/plans.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.sizes import Size

Item = TypeVar("Item")
KINDS = ("all_reduce", "all_gather")
COMMUNICATORS = ("tp", "dp")


def random_graph(
    rng: Random, *, num_ops: int | None = None, talks: float = 0.25, messages: float = 0.3
) -> Graph:
    """A random graph; `talks` is the share of collectives, `messages` of sends among them."""
    return _Maker(rng, talks, messages).graph(num_ops or rng.choice((1, 2, 2, 3, 3, 4, 5, 6)))


def mirror(graph: Graph) -> Graph:
    """The graph of the other rank of a pair: what one sends, the other receives."""
    other = {"send": "recv", "recv": "send"}
    ops = []
    for op in graph.ops:
        talk = op.collective
        if talk is not None and talk.peer is not None:
            talk = replace(talk, kind=other[talk.kind], peer=1 - talk.peer)
        ops.append(replace(op, collective=talk))
    return replace(graph, ops=tuple(ops))


class _Maker:
    def __init__(self, rng: Random, talks: float, messages: float) -> None:
        self.rng, self.talks, self.messages = rng, talks, messages
        self.values: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.inputs: list[str] = []

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def graph(self, num_ops: int) -> Graph:
        self.add_inputs()
        for number in range(num_ops):
            self.add_op(number)
        declared = ((name, (0, 1)) for name in COMMUNICATORS if self.chance(0.3))
        outputs = self.outputs()
        values = tuple(self.values.values())
        return Graph(
            "random",
            values,
            tuple(self.ops),
            tuple(self.inputs),
            outputs,
            "s0",
            "none",
            tuple(declared),
        )

    # Values.

    def value(self, name: str, batched: bool, alias_of: str | None = None) -> str:
        units = Size.of(self.rng.choice((1, 1, 2, 3)))
        rows, placeable = Size.of("s0"), alias_of is None and self.chance(0.6)
        shape: tuple[Size, ...] = (units,)
        batch = None
        if batched:
            shape, batch = (rows, units), Batch(0)
            if self.chance(0.12):
                shape, batch = (units + 1, rows), Batch(1)
            elif self.chance(0.06):
                shape, batch = (rows * 2, units), Batch(0, outer=Size.of(2))
        dtype = "opaque" if not batched and alias_of is None and self.chance(0.03) else "float32"
        self.values[name] = Value(name, shape, dtype, batch, alias_of, placeable)
        return name

    def add_inputs(self) -> None:
        self.inputs.append(self.value("x", True))
        if self.chance(0.4):
            self.inputs.append(self.value("cache", True))
        if self.chance(0.5):
            self.inputs.append(self.value("w", False))
        if self.chance(0.25):
            self.inputs.append(self.value("pages", False))
        if self.chance(0.05):
            self.inputs.append(self.value("again", True, alias_of="x"))

    def known(self, batched: bool | None = None) -> list[str]:
        return [
            name
            for name, value in self.values.items()
            if batched is None or (value.batch is not None) == batched
        ]

    def recent(self, names: Sequence[Item]) -> Item:
        """One of the names, later ones more often, so that ops hang together."""
        return max(self.rng.choice(names), self.rng.choice(names), key=names.index)

    # Ops.

    def add_op(self, number: int) -> None:
        unbatched = self.known(False)
        kinds = ["row-wise"] * 11 + ["mixing"] * 2 + ["additive"] * 2 + ["random"]
        rows = self.rng.choice(kinds + (["batch-free"] * 3 if unbatched else []))
        op = Op(f"op{number}", rows=rows)
        if rows == "batch-free":
            op = replace(op, reads=(self.recent(unbatched),))
        elif rows == "random":
            op = replace(op, reads=(self.recent(self.known()),) if self.chance(0.5) else ())
        else:
            reads = [self.recent(self.known(True))]
            if self.chance(0.4):
                reads.append(self.recent(self.known()))
            op = replace(op, reads=tuple(dict.fromkeys(reads)))
        op = self.with_effects(op, number)
        op = self.with_resource(op)
        self.ops.append(op)

    def with_effects(self, op: Op, number: int) -> Op:
        """The op with what it mutates and makes."""
        mutates: tuple[str, ...] = ()
        if op.rows not in ("additive", "random") and self.chance(0.3):
            # A cache, some paged state, or one of its own reads: all are changed in place.
            choices = self.known(False if op.rows == "batch-free" else None)
            mutates = (self.rng.choice(choices if self.chance(0.5) else op.reads),)
            if op.rows == "row-wise" and not self.agree([*op.reads, *mutates], mutates[0]):
                mutates = ()
        makes = []
        touched = op.reads + mutates
        if op.rows in ("row-wise", "mixing", "batch-free") and self.chance(0.22):
            of = self.rng.choice(mutates or touched)
            makes.append(self.value(f"a{number}", self.alias_has_batch(op, of), alias_of=of))
        if not makes and not (mutates and self.chance(0.3)):
            makes.append(self.value(f"v{number}", self.made_has_batch(op)))
            if self.chance(0.08):
                makes.append(self.value(f"u{number}", self.made_has_batch(op)))
            elif op.rows != "additive" and self.chance(0.05):
                batched = self.alias_has_batch(op, makes[0])
                makes.append(self.value(f"b{number}", batched, alias_of=makes[0]))
        return replace(op, mutates=mutates, makes=tuple(makes))

    def agree(self, names: Sequence[str], changed: str) -> bool:
        """Whether all names for the changed bytes have a batch, or none has."""
        same = [name for name in names if self.root(name) == self.root(changed)]
        return len({self.values[name].batch is None for name in same}) == 1

    def root(self, name: str) -> str:
        alias = self.values[name].alias_of
        return name if alias is None else self.root(alias)

    def made_has_batch(self, op: Op) -> bool:
        if op.rows in ("row-wise", "random"):
            return True
        return op.rows == "mixing" and self.chance(0.6)

    def alias_has_batch(self, op: Op, of: str) -> bool:
        if op.rows in ("row-wise", "batch-free"):
            return op.rows == "row-wise"
        has = self.values[of].batch is not None
        return has if self.chance(0.8) else not has

    def with_resource(self, op: Op) -> Op:
        if op.rows in ("row-wise", "batch-free", "mixing") and self.chance(self.talks):
            return self.with_talk(op)
        uses = self.rng.choice(("compute", "compute", "compute", "memory", "io"))
        return replace(op, uses=uses, two_phase=uses == "io" and self.chance(0.5))

    def with_talk(self, op: Op) -> Op:
        communicator = self.rng.choice(COMMUNICATORS)
        talk = Collective(self.rng.choice(KINDS), communicator)
        if self.chance(self.messages):
            talk = Collective(self.rng.choice(("send", "recv")), communicator, 1)
        if self.chance(0.3):
            talk = replace(talk, tag="t")
        return replace(op, uses="network", two_phase=self.chance(0.7), collective=talk)

    def outputs(self) -> tuple[str, ...]:
        split = {name for op in self.ops if not op.whole for name in op.makes}
        good = [
            name
            for name, value in self.values.items()
            if name not in split or value.alias_of is None
        ]
        wanted = [self.recent(good) for _ in range(self.rng.choice((1, 1, 2, 3)))]
        made = [name for name in good if name not in self.inputs]
        return tuple(dict.fromkeys(wanted + ([made[-1]] if made and self.chance(0.5) else [])))
