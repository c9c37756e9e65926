"""The `KnownRace`: a published race, rebuilt by hand as a graph and as plans, broken and mended.

A graph is one line an op, in program order; what no op makes is an input, what no op reads an
output:

    attend  q,kv -> y mutates kv                 reads, makes, changes in place (- for nothing)
    align   scale -> aligned=scale               aligned is an alias of scale
    gather  shard -> full all_gather@dp two-phase
    pass    y -> - send@pp>1                     a message to rank 1

A plan is its steps, as a plan file has them; `lanes` and `places` are its head. Without several
parts nothing has a batch, so a unit of a buffer is one value of four bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torchweft.plan.graph import Batch, Collective, Graph, Op, Value
from torchweft.plan.plan import Plan, Step
from torchweft.plan.sizes import Size
from torchweft_tools.buffers import lower_into_buffers

_OP = re.compile(
    r"(\w+) +(\S+) -> (\S+)(?: mutates (\S+))?(?: (\w+)@(\w+)(?:>([0-9]+))?)?( two-phase)?"
)


@dataclass(frozen=True)
class KnownRace:
    """One thread. `ops`, `broken` and `mended` have an entry for each rank.

    rule: what `verify` must say of the broken form; None if it cannot (`why_not` tells why).
    wrong, cure: what the engine did, and what mended it.
    """

    thread: str
    wrong: str
    cure: str
    rule: str | None
    ops: tuple[str, ...] = ()
    lanes: str = ""
    broken: tuple[str, ...] = ()
    mended: tuple[str, ...] = ()
    places: str = ""
    mended_places: str | None = None
    parts: str = "1"
    why_not: str = ""

    @property
    def name(self) -> str:
        """The thread as a name: `vllm_52033`."""
        return re.sub(r"\W", "_", self.thread.rpartition("/")[2])

    def broken_plans(self) -> list[Plan]:
        """What the engine ran, one plan a rank."""
        return self._plans(self.broken, self.places)

    def mended_plans(self) -> list[Plan]:
        """What it runs since, one plan a rank."""
        places = self.places if self.mended_places is None else self.mended_places
        return self._plans(self.mended, places)

    def lowered_plans(self) -> list[Plan]:
        """The order of the mended form without waits, copies, frees and places, lowered by us."""
        return [
            lower_into_buffers(replace(plan, steps=_bare(plan), buffers=(), places=()))
            for plan in self.mended_plans()
        ]

    def _plans(self, forms: tuple[str, ...], places: str) -> list[Plan]:
        plans = []
        for ops, steps in zip(self.ops, forms, strict=True):
            graph = read_graph(self.name, ops, batched=" " in self.parts)
            head = f"weft plan 1\ngraph {graph.name} {graph.digest}\nparts {self.parts}\n"
            head += "".join(f"{_lane(lane)}\n" for lane in self.lanes.split("; "))
            plans.append(Plan.parse(f"{head}{places}\nsteps\n{steps}\nend").bind(graph))
        return plans


def read_graph(name: str, text: str, *, batched: bool) -> Graph:
    """The graph of some lines of ops; `batched`: every value has rows, and ops are row-wise."""
    ops: list[Op] = []
    aliases: dict[str, str | None] = {}
    for line in text.strip().splitlines():
        match = _OP.fullmatch(line.strip())
        assert match is not None, f"cannot read the op {line.strip()!r}"
        label, reads, makes, mutates, kind, communicator, peer, two_phase = match.groups()
        made = [item.partition("=") for item in _names(makes)]
        aliases |= {value: alias or None for value, _, alias in made}
        ops.append(
            Op(
                label,
                _names(reads),
                tuple(value for value, *_ in made),
                _names(mutates or "-"),
                uses="network" if kind else "compute",
                rows="row-wise" if batched else "batch-free",
                two_phase=two_phase is not None,
                collective=Collective(kind, communicator, int(peer) if peer else None)
                if kind
                else None,
            )
        )
    touched = dict.fromkeys(value for op in ops for value in op.touched)
    inputs = tuple(value for value in touched if value not in aliases)
    values = tuple(
        Value(
            value,
            (Size.of("s0"),) if batched else (Size.of(1),),
            batch=Batch(0) if batched else None,
            alias_of=aliases.get(value),
            placeable=True,
        )
        for value in (*inputs, *aliases)
    )
    outputs = tuple(value for value in aliases if value not in touched)
    return Graph(name, values, tuple(ops), inputs, outputs, "s0" if batched else None)


def _names(text: str) -> tuple[str, ...]:
    return () if text == "-" else tuple(text.split(","))


def _lane(text: str) -> str:
    lane, _, via = text.partition(" via ")
    return f"lane {lane} uses " + (f"network via {via}" if via else "compute,network")


def _bare(plan: Plan) -> tuple[Step, ...]:
    """The runs, splits and merges of a plan: what a strategy writes, before it is lowered."""
    steps = []
    for step in plan.steps:
        if step.kind == "issue":
            assert step.on is not None, "an issue names its lane"
            steps.append(step._replace(kind="run", lane=step.on, on=None))
        elif step.kind in ("split", "run", "merge"):
            steps.append(step)
    return tuple(steps)
