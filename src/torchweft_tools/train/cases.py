"""Cases: problems to plan, drawn from a seed or read from public data; for benches and training.

    random_tree, random_dag, layered     work of a given number of ops, one unit each on average
    MACHINES                             2, 3 and 5 devices of unlike speed
    case(work, slowness, ratio)          a problem whose mean transfer takes `ratio` mean ops
    draw_case(draw)                      any of these on any devices, for training
    sst_trees, stg_optima                the graphs in a folder of data
    problems_in                          the problems in a folder of served runs

One unit of work takes `UNIT_S` on the fastest device, so that planning time can be compared with
the planned time.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torchweft.errors import PlacementError, clip
from torchweft.files import read_text
from torchweft.placement.problem import INF, Problem
from torchweft_tools.formats.read_trees import Tree, read_trees
from torchweft_tools.formats.weft_files import load_served, served_problem
from torchweft_tools.formats.work import Work, on_pool, slowness_pool

UNIT_S = 1e-3
MACHINES = ((1.0, 2.0), (1.0, 1.6, 4.0), (1.0, 1.3, 2.0, 3.0, 5.0))
RATIOS = (0.05, 0.3, 1.0, 3.0)
TRAINED_DEVICES = (2, 3, 4)


def case(work: Work, slowness: Sequence[float], ratio: float | None = None) -> Problem:
    """The work on devices of these speeds. A ratio scales all transfers so that the mean transfer
    takes `ratio` mean ops, over all devices; without one they stay as they are."""
    if ratio is not None:
        mean_s = sum(work.seconds["cpu"]) / len(work.ops) * sum(slowness) / len(slowness)
        mean_edge = sum(item[2] for item in work.edges) / max(1, len(work.edges))
        scale = ratio * mean_s / mean_edge if mean_edge else 0.0
        work = replace(work, edges=tuple((a, b, seconds * scale) for a, b, seconds in work.edges))
    return on_pool(work, slowness_pool(slowness))


def random_tree(num_ops: int, seed: int) -> Work:
    """A random binary tree, leaves cheaper than the rest, as a TreeLSTM computes a sentence."""
    draw = random.Random(seed)
    trees: list[int] = []
    tree: Tree = []
    for _ in range((num_ops + 1) // 2):
        trees.append(len(tree))
        tree.append([])
    while len(trees) > 1:
        at = draw.randrange(len(trees) - 1)
        tree.append([trees[at], trees[at + 1]])
        trees[at : at + 2] = [len(tree) - 1]
    return tree_case(tree, f"tree{seed}")


def tree_case(tree: Tree, name: str) -> Work:
    """A tree in units of `UNIT_S`: inner brackets 1, leaves 0.4, all values of one size."""
    seconds = tuple(UNIT_S if inside else 0.4 * UNIT_S for inside in tree)
    edges = tuple((source, op, UNIT_S) for op, inside in enumerate(tree) for source in inside)
    return Work(name, tuple(f"n{op}" for op in range(len(tree))), {"cpu": seconds}, edges)


def random_dag(num_ops: int, seed: int) -> Work:
    """A random graph: each op reads one to three of the ops shortly before it."""
    draw = random.Random(seed)
    edges = []
    for op in range(1, num_ops):
        near = range(max(0, op - max(4, num_ops // 5)), op)
        for source in draw.sample(near, min(len(near), draw.randint(1, 3))):
            edges.append((source, op, UNIT_S * draw.uniform(0.2, 1.8)))
    return _drawn(f"dag{seed}", num_ops, edges, draw)


def layered(num_ops: int, seed: int) -> Work:
    """A network of stages, each of parallel branches that join, as in inception or mixtures."""
    draw = random.Random(seed)
    edges, joined, op = [], 0, 1
    while op < num_ops - 1:
        branches = draw.randint(2, 5)
        ends = []
        for _ in range(branches):
            last = joined
            for _ in range(draw.randint(1, 3)):
                if op < num_ops - 1:
                    edges.append((last, op, UNIT_S * draw.uniform(0.2, 1.8)))
                    last, op = op, op + 1
            ends.append(last)
        edges += [(end, op, UNIT_S * draw.uniform(0.2, 1.8)) for end in set(ends)]
        joined, op = op, op + 1
    return _drawn(f"layered{seed}", op, edges, draw)


def draw_case(
    draw: random.Random,
    *,
    trees: Sequence[Tree] = (),
    num_devices: Sequence[int] = TRAINED_DEVICES,
    ratio: float | None = None,
) -> Problem:
    """A problem of 8 to 64 ops: one of the trees, if there are any, or a drawn graph; on 2 to 4
    devices, equal or up to five times slower than the fastest, in a third of all cases each better
    at different ops. One in six, and all with a ratio of 0, are graphs on equal processors without
    transfers."""
    number, num_ops = draw.randrange(10**9), draw.randint(8, 64)
    if ratio == 0 or (ratio is None and draw.random() < 1 / 6):
        work = draw.choice((random_dag, layered))(num_ops, number)
        return case(work, (1.0,) * draw.choice(num_devices), 0.0)
    kinds = [random_tree, random_dag, layered]
    if trees and draw.random() < 0.5:
        work = tree_case(draw.choice(trees), "tree")
    else:
        work = draw.choice(kinds)(num_ops, number)
    others = draw.choice(num_devices) - 1
    slowness = [1.0, *(draw.choice((1.0, draw.uniform(1, 5))) for _ in range(others))]
    draw.shuffle(slowness)
    if ratio is None:
        ratio = math.exp(draw.uniform(math.log(RATIOS[0]), math.log(RATIOS[-1])))
    problem = case(work, slowness, ratio)
    if draw.random() < 1 / 3:
        seconds = tuple(
            tuple(s * math.exp(draw.gauss(0, 0.3)) for s in row) for row in problem.seconds
        )
        problem = replace(problem, seconds=seconds)
    return problem


def _drawn(
    name: str, num_ops: int, edges: Sequence[tuple[int, int, float]], draw: random.Random
) -> Work:
    seconds = tuple(UNIT_S * draw.uniform(0.2, 1.8) for _ in range(num_ops))
    return Work(name, tuple(f"n{op}" for op in range(num_ops)), {"cpu": seconds}, tuple(edges))


def mean_op_s(problem: Problem) -> float:
    """The mean seconds of an op, over all devices that may run it."""
    finite = [seconds for row in problem.seconds for seconds in row if seconds < INF]
    return sum(finite) / max(1, len(finite))


def scaled(problem: Problem, scale: float) -> Problem:
    """The same problem in another unit of time."""

    def times(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(item * scale for item in row) for row in rows)

    return replace(
        problem,
        seconds=times(problem.seconds),
        latency_s=times(problem.latency_s),
        byte_s=times(problem.byte_s),
        ready_s=times(problem.ready_s),
    )


def sst_trees(folder: Path, split: str = "dev") -> list[Tree]:
    """The trees of a split of the Stanford Sentiment Treebank; none if the file is missing."""
    path = folder / "sst" / f"{split}.txt"
    return list(read_trees(read_text(path, PlacementError, "tree"))) if path.exists() else []


def stg_optima(folder: Path) -> list[tuple[Path, int, int]]:
    """STG files with a proven optimum: (file, processors, makespan)."""
    optima = []
    for table in sorted(folder.glob("stg*/*_OPT.csv")):
        try:
            rows = list(csv.reader(read_text(table, PlacementError, "table").splitlines()))
            # A row with a fourth column has a bound and a best length: not proven.
            for name, processors, makespan in [row for row in rows if len(row) == 3]:
                if (path := table.parent / Path(name).name).exists():
                    optima.append((path, int(processors), int(makespan)))
        except (csv.Error, ValueError) as cause:
            raise PlacementError(f"file: table {table}: {clip(cause)}.", rule="file") from None
    return optima


def problems_in(folder: Path) -> Sequence[Problem]:
    """The problems of all served runs (`*.json`) of a folder, by name.

    Raises `PlacementError` if there are none.
    """
    problems = [served_problem(load_served(path)) for path in sorted(folder.glob("*.json"))]
    if not problems:
        cure = "Save some with model.served().save(...) while serving."
        raise PlacementError(f"traces: there are no served runs in {folder}. {cure}", rule="traces")
    return problems
