"""Random graphs with bodies that run, and plans of them on several lanes.

Every value reaches an output, and every body changes with each of its reads, so that a number that
is read too early, too late or from dead bytes shows. Every other op of one phase writes into the
place of its make, if this has one; the makes of all others are copied there.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import torch
from device import KIND

from torchweft.capture.bodies.bodies import Into, ResultBytes
from torchweft.errors import PlanError
from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import accelerator
from torchweft.plan.plan import Plan, Step
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import branches, overlap
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import write
from torchweft.run.accelerator.dispatch import Dispatch
from torchweft.run.writer import compile_program
from torchweft_tools.bench.cases.random_plans import random_plan

ROWS, WIDE = 12, 4


def without(given: Dispatch, item: int, wait: int) -> Dispatch:
    """The same dispatch with one wait less."""
    items = list(given.items)
    kept = tuple(other for other in items[item].waits if other != wait)
    items[item] = items[item]._replace(waits=kept)
    return replace(given, items=tuple(items))


def drawn_graph(seed: int) -> tuple[Graph, dict]:
    """A graph of six to nine ops: chains and branches, state that is changed, network ops."""
    rng = random.Random(seed)
    values = {name: _value(name) for name in ("x", "state")}
    values["w"] = Value("w", (Size.of(WIDE),))
    ops: list[Op] = []
    for number in range(rng.randint(6, 9)):
        ops.append(_op(rng, number, values))
    while idle := [op for op in ops if _is_view(op, values) and not _read(op.makes[0], ops)]:
        ops.remove(idle[-1])  # nobody looks through this view, so nobody would miss it
        del values[idle[-1].makes[0]]
    outputs = [
        name for op in ops for name in op.makes
        if not _read(name, ops)
    ]  # fmt: skip
    graph = Graph(
        "drawn", tuple(values.values()), tuple(ops), ("x", "state", "w"), tuple(outputs), "s0"
    )
    return graph, {op.name: _body(int(op.name[2:]), op, values) for op in ops}


def _is_view(op: Op, values: dict[str, Value]) -> bool:
    return values[op.makes[0]].alias_of is not None


def _read(name: str, ops: list[Op]) -> bool:
    return any(name in op.reads for op in ops)


def _value(
    name: str, *, batched: bool = True, alias_of: str | None = None, placeable: bool = False
) -> Value:
    shape = (Size.of("s0"), Size.of(WIDE)) if batched else (Size.of(WIDE),)
    return Value(name, shape, "float32", Batch(0) if batched else None, alias_of, placeable)


def _op(rng: random.Random, number: int, values: dict[str, Value]) -> Op:
    batched = [name for name, value in values.items() if value.batch is not None]
    recent = batched[-4:]
    reads = list(dict.fromkeys([rng.choice(recent), rng.choice(batched)]))
    kind = rng.choice(["plain"] * 5 + ["network"] * 3 + ["change"] * 3 + ["mix", "add", "view"])
    name, made = f"op{number}", f"v{number}"
    if kind in ("mix", "add"):
        own = [other for other in batched if values[other].alias_of is None]
        reads = list(dict.fromkeys([rng.choice(own[-3:]), rng.choice(own)]))
        values[made] = _value(made, batched=False)
        return Op(name, tuple(reads), (made,), rows="mixing" if kind == "mix" else "additive")
    if kind == "view":
        values[made] = _value(made, alias_of=reads[0])
        return Op(name, (reads[0],), (made,))
    extra = [other for other, value in values.items() if value.batch is None]
    if rng.random() < 0.4:
        reads.append(rng.choice(extra))
    values[made] = _value(made, placeable=kind != "network" and number % 2 == 0)
    if kind == "network":
        return Op(name, tuple(reads), (made,), uses="network", two_phase=True)
    changed = (rng.choice([reads[0], "state"]),) if kind == "change" else ()
    reads = list(dict.fromkeys([*reads, *changed]))
    return Op(name, tuple(reads), (made,), mutates=changed)


def _body(number: int, op: Op, values: dict[str, Value]):
    """Makes of reads; two ops never compute the same."""
    if _is_view(op, values):
        return lambda read: (read.view_as(read),)

    def changed(*reads):
        total = sum((read * (0.7 + 0.1 * at) for at, read in enumerate(reads)), start=0.3 * number)
        total = torch.sin(total)
        for name, read in zip(op.reads, reads, strict=True):
            if name in op.mutates:
                read.mul_(0.5).add_(total)
        return total

    def body(*reads):
        total = changed(*reads)
        return (total.sum(0) if op.rows in ("mixing", "additive") else total + 0.01,)

    def into(*reads):
        return (torch.add(changed(*reads[:-1]), 0.01, out=reads[-1]),)

    if values[op.makes[0]].placeable:
        return Direct(body, into, values[op.makes[0]])
    return TwoPhase(body) if op.two_phase else body


class Direct:
    """A body that writes where it is told: in rooms of the test device."""

    def __init__(self, body, into, value):
        self.function = body
        order = tuple(range(len(value.shape)))
        room = ResultBytes(
            value.shape, torch.float32, torch.device(KIND), value.batch, order, {0: None}
        )
        self.into = Into(into, (), (room,))

    def __call__(self, *reads):
        return self.function(*reads)


class TwoPhase:
    """A body whose complete has work to do, as a collective's into a tensor with gaps has."""

    def __init__(self, body):
        self.issue = body

    def complete(self, flight):
        return (flight[0] * 1.5,)

    def __call__(self, *reads):
        return self.complete(self.issue(*reads))


def drawn_call(runtime, program, given):
    """The outputs of one call of a drawn plan's program."""
    bounds = program.plan.cut.bounds(ROWS)
    return runtime.run(program, given, bounds, numbers=program.numbers({"s0": ROWS}, bounds))


def drawn_inputs() -> list[torch.Tensor]:
    """The inputs of a drawn graph."""
    generator = torch.Generator().manual_seed(3)
    x, state = torch.randn(2, ROWS, WIDE, generator=generator)
    return [x, state, torch.randn(WIDE, generator=generator)]


def scattered(seed: int):
    """A strategy that deals ready ops to lanes at random."""

    def strategy(s):
        rng = random.Random(seed)
        s.split(2)
        while ready := s.ready():
            op, part = rng.choice(ready)
            s.run(op, part, lane=rng.choice(s.lanes(op)).name)
        s.merge()

    return strategy


def in_host_order(plan: Plan) -> Plan:
    """The plan as `lower` would leave it: a wait stands behind what it waits for."""
    ordered: list[Step] = []
    done: set[str] = set()
    left = list(plan.steps)
    while left:
        later: list[Step] = []
        stuck: set[str] = set()
        for step in left:
            needs = step._replace(kind="issue").label if step.kind == "complete" else step.target
            if step.lane in stuck or (needs is not None and needs not in done):
                stuck.add(step.lane)
                later.append(step)
            else:
                ordered.append(step)
                done.add(step.label)
        assert len(later) < len(left), "a verified plan has no deadlock"
        left = later
    return replace(plan, steps=tuple(ordered))


def drawn_plan(graph: Graph, seed: int):
    """A verified plan of a graph: by a strategy, dealt at random, or drawn by the bench."""
    rng = random.Random(seed)
    which = seed % 4
    if which == 3:
        for _ in range(50):
            plan = random_plan(rng, graph)
            one = all(lane.device == "cpu" for lane in plan.lanes)
            if one and len(plan.lanes) > 1 and not any(step.by for step in plan.steps):
                # Some need a piece, or a place for what has no rows, that the writer cannot make.
                with contextlib.suppress(PlanError, AssertionError):
                    compile_program(plan, drawn_graph(seed)[1])
                    return in_host_order(verify(plan))
    strategies = [overlap(parts=2), branches(handover_s=0.0), scattered(seed), scattered(seed)]
    machine = accelerator(3, network_priority=-1)
    return verify(lower(write(strategies[which], graph, Context(batch=ROWS), machine)))
