"""Instances: problems drawn at random, to train and to measure placers on.

    draw(random.Random(0))                        a tree or DAG on 2 to 4 devices of unlike speed
    draw(random.Random(0), trees=my_trees)        half of them from trees of the user's

`ratio` is the transfer/compute ratio: mean seconds of a value over a link per mean seconds of an
inner op over the devices. Equal seeds draw equal problems, on any machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from torchweft.placement.problem import Edge, Problem

LEAF_S, INNER_S = 0.4, 1.0
NUM_BYTES = 1000
RATIOS = (0.05, 3.0)
Shape = list[list[int]]
"""For each op the ops that it reads from, all before it."""


def random_tree(draw: random.Random, num_leaves: int) -> Shape:
    """A binary tree, from bushy to a chain, its ops from the leaves up."""
    found: Shape = []

    def grow(leaves: int) -> int:
        if leaves == 1:
            found.append([])
        else:
            left = draw.randint(1, leaves - 1)
            if draw.random() < 0.5:
                left = draw.choice((1, leaves - 1, max(1, leaves // 2)))
            found.append([grow(left), grow(leaves - left)])
        return len(found) - 1

    grow(num_leaves)
    return found


def random_dag(draw: random.Random, num_ops: int) -> Shape:
    """A DAG of some width whose ops read from up to three recent ones."""
    width = draw.randint(2, 6)
    found: Shape = []
    for op in range(num_ops):
        recent = range(max(0, op - 2 * width), op)
        count = 0 if op < draw.randint(1, width) else draw.randint(1, 3)
        found.append(sorted(draw.sample(recent, min(count, len(recent)))))
    return found


def random_slowness(draw: random.Random, num_devices: int) -> list[float]:
    """How slow devices are, the fastest 1: equal ones and up to four times slower ones."""
    found = [1.0, *(draw.choice((1.0, draw.uniform(1, 4))) for _ in range(num_devices - 1))]
    draw.shuffle(found)
    return found


def instance(
    shape: Shape,
    slowness: Sequence[float],
    ratio: float,
    draw: random.Random,
    *,
    name: str = "drawn",
    spread: float = 0.0,
    unlike: float = 0.0,
) -> Problem:
    """The problem of a shape on devices. spread: how much seconds and bytes of ops differ;
    unlike: how much devices differ in what they are good at (both as deviations of logarithms)."""
    every = range(len(slowness))
    own_s = [(INNER_S if reads else LEAF_S) * math.exp(draw.gauss(0, spread)) for reads in shape]
    seconds = tuple(
        tuple(op_s * slow * math.exp(draw.gauss(0, unlike)) for slow in slowness) for op_s in own_s
    )
    byte_s = ratio * INNER_S * sum(slowness) / len(slowness) / NUM_BYTES
    sizes = [max(1, round(NUM_BYTES * math.exp(draw.gauss(0, spread)))) for _ in shape]
    return Problem(
        name,
        tuple(f"op{op}" for op in range(len(shape))),
        tuple(f"device{device}" for device in every),
        seconds,
        tuple(Edge(u, op, sizes[u], f"v{u}") for op, reads in enumerate(shape) for u in reads),
        ((0.0,) * len(slowness),) * len(slowness),
        tuple(tuple(0.0 if a == b else byte_s for b in every) for a in every),
    )


def draw_one(
    draw: random.Random,
    *,
    trees: Sequence[Shape] = (),
    num_devices: Sequence[int] = (2, 3, 4),
    ratio: float | None = None,
) -> Problem:
    """A problem: from the trees if there are any, or a tree, or a DAG, of 7 to 64 ops."""
    slowness = random_slowness(draw, draw.choice(num_devices))
    if ratio is None:
        ratio = math.exp(draw.uniform(*map(math.log, RATIOS)))
    kind = draw.random()
    if kind < 0.5 and trees:
        shape = draw.choice(trees)
    elif kind < 0.75:
        shape = random_tree(draw, draw.randint(4, 32))
    else:
        shape = random_dag(draw, draw.randint(8, 64))
    spread, unlike = draw.choice((0, 0, 0.5)), draw.choice((0, 0, 0.3))
    return instance(shape, slowness, ratio, draw, spread=spread, unlike=unlike)
