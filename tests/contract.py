"""What every runtime has to run: a graph made by hand, its bodies, and plans on several lanes."""

from __future__ import annotations

import random

import torch

from torchweft.plan.context import Context
from torchweft.plan.graph import Batch, Graph, Op, Value
from torchweft.plan.lower.lower import lower
from torchweft.plan.machine import cpu
from torchweft.plan.sizes import Size
from torchweft.plan.strategies import branches, overlap, sequential
from torchweft.plan.verify import verify
from torchweft.plan.write.strategy import write

ROWS, WIDE = 24, 16


def value(name, **more):
    return Value(name, (Size.of("s0"), Size.of(WIDE)), batch=Batch(0), **more)


def diamond() -> tuple[Graph, dict]:
    """x -> a -> (left, right, third) -> join, with a state that two ops change in place."""
    values = (
        value("x"), value("state"), value("a"), value("left"), value("right"), value("third"),
        value("joined"), value("y"), Value("mean", (Size.of(WIDE),)),
    )  # fmt: skip
    ops = (
        Op("start", ("x",), ("a",)),
        Op("go_left", ("a",), ("left",)),
        Op("go_right", ("a", "state"), ("right",), mutates=("state",)),
        Op("go_third", ("a",), ("third",)),
        Op("join", ("left", "right", "third"), ("joined",)),
        Op("again", ("joined", "state"), ("y",), mutates=("state",)),
        Op("mean", ("y",), ("mean",), rows="mixing"),
    )
    graph = Graph("diamond", values, ops, ("x", "state"), ("y", "mean"), "s0")

    def go_right(a, state):
        state.mul_(2).add_(a)
        return (state.clone(),)

    def again(joined, state):
        state.add_(joined)
        return (state * joined,)

    bodies = {
        "start": lambda x: (x * 3 + 1,),
        "go_left": lambda a: (a.sin(),),
        "go_right": go_right,
        "go_third": lambda a: (a.cos(),),
        "join": lambda left, right, third: (left + right * third,),
        "again": again,
        "mean": lambda y: (y.mean(0),),
    }
    return graph, bodies


def inputs():
    generator = torch.Generator().manual_seed(1)
    x, state = torch.randn(2, ROWS, WIDE, generator=generator)
    return x, state


def by_hand(graph, bodies, given):
    held = dict(zip(graph.inputs, given, strict=True))
    for op in graph.ops:
        made = bodies[op.name](*(held[name] for name in op.reads))
        held.update(zip(op.makes, made, strict=True))
    return tuple(held[name] for name in graph.outputs)


def planned(strategy, num_lanes, graph, machine=cpu):
    return verify(lower(write(strategy, graph, Context(batch=ROWS), machine(num_lanes))))


spread = branches(handover_s=0.0)
CASES = [
    (sequential, 1),
    (overlap(parts=2), 1),
    (overlap(parts=5), 1),
    (spread, 2),
    (spread, 3),
]


def scatter(s, *, parts=2):
    """Deals ops to lanes at random: many waits."""
    rng = random.Random(parts)
    s.split(parts)
    while ready := s.ready():
        op, part = rng.choice(ready)
        s.run(op, part, lane=rng.choice(["compute", "compute1", "compute2"]))
    s.merge()


def edged(s, *, seed=0, parts=2):
    """As `scatter`, and every run comes after two others that it has nothing to do with."""
    rng, done = random.Random(seed), []
    s.split(parts)
    while ready := s.ready():
        op, part = rng.choice(ready)
        lane = rng.choice(["compute", "compute1", "compute2"])
        s.run(op, part, lane=lane, after=rng.sample(done, min(2, len(done))))
        done.append((op, part))
    s.merge()
