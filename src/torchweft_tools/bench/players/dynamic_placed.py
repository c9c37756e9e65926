"""Real runs on two unlike workers: measured against simulated, a row for every planner.

    single, heft, portfolio, learned    groups of a call are placed, as `Dynamic.map` does it
    dynpartition                        its bandit names a device for every node of a tree; nodes
                                        run one by one, unbatched, as in its own execution

Each planner places an input once, and has its own prices, which follow its own runs, as if it
served alone. Planners take turns, run by run. After some runs to warm up, the simulator predicts
how long the next ones will take, at the prices of that moment; then they run:

    simulator_error     |simulated - measured| / measured, measured being the median of these runs
    error_of_one_run    the same against every single run
    noise               single runs against their own median: what no simulator can know

each the median over inputs (and runs). A bias over all inputs shows in simulated_ms / measured_ms.
The bandit has been trained before, in the simulator, on the same trees.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchweft.dynamic.model import Dynamic, load
from torchweft.errors import PlacementError
from torchweft.placement import Edge, Placement, Planner, Problem, placed, plan
from torchweft.run.driver.executor import Job
from torchweft.run.workers.grouping import Group
from torchweft.run.workers.pool import Spot
from torchweft_tools.bench.measure.pairs import ratio
from torchweft_tools.bench.models.dynamic_models import BinaryTreeLSTM, Tree
from torchweft_tools.bench.peers.dynpartition import MAX_OPS, Bandit, train
from torchweft_tools.bench.players.recovery import FrozenPlanner, Progress, no_progress
from torchweft_tools.bench.players.rehearsal import WatchedPrices

Input = tuple[Tree, Tensor]
BANDIT = "dynpartition"
PLANNERS = ("single", "heft", "portfolio", "learned")
NUM_EPISODES, NUM_WARM, NUM_RUNS = 400, 8, 15


@dataclass(eq=False)
class Runs:
    """How a planner runs inputs, with prices of its own, and what was measured."""

    way: Callable[[Sequence[Input]], list[Tensor]]
    prices: WatchedPrices
    job: Job | None = None
    measured_s: list[list[float]] = field(default_factory=list)
    simulated_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)
    apart: float = 0.0

    def simulate(self) -> None:
        """What the prices of now say of the next runs of the input that ran last."""
        assert self.job is not None, "it was placed"
        self.simulated_s.append(self.prices.rehearse(self.job.script).makespan_s)
        self.measured_s.append([])

    def run(self, dynamic: Dynamic, given: Sequence[Input], wanted: Sequence[Tensor]) -> float:
        """Run an input; the seconds on the workers."""
        placer, _ = dynamic._workers()
        placer.executor.prices = self.prices
        began_s = time.perf_counter()
        outputs = self.way(given)
        self.call_s.append(time.perf_counter() - began_s)
        self.job = dynamic.job
        assert self.job is not None, "a placed call has a job"
        self.prices.ended(self.job)
        gaps = [float((a - b).abs().max()) for a, b in zip(outputs, wanted, strict=True)]
        self.apart = max(self.apart, *gaps)
        return self.job.ended_s - self.job.began_s

    @property
    def medians_s(self) -> list[float]:
        """Seconds of each input, the median of its runs."""
        return [statistics.median(runs) for runs in self.measured_s]

    def row(self) -> dict[str, float]:
        """Medians over the inputs and runs."""
        inputs = list(zip(self.simulated_s, self.medians_s, self.measured_s, strict=True))
        return {
            "measured_ms": 1e3 * statistics.median(self.medians_s),
            "simulated_ms": 1e3 * statistics.median(self.simulated_s),
            "call_ms": 1e3 * statistics.median(self.call_s),
            "simulator_error": statistics.median(abs(s / m - 1) for s, m, _ in inputs),
            "error_of_one_run": statistics.median(abs(s / r - 1) for s, _, x in inputs for r in x),
            "noise": statistics.median(abs(r / m - 1) for _, m, x in inputs for r in x),
            "largest_difference": self.apart,
        }


def run_placed(
    inputs: Sequence[Input], num_words: int, spots: Sequence[Spot], *,
    size: int, planners: Sequence[str] = PLANNERS, mem_dim: int = 300,
    progress: Progress = no_progress,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for every planner: calls of `size` trees each; with one tree the bandit, too."""
    torch.manual_seed(0)
    model = BinaryTreeLSTM(num_words, mem_dim=mem_dim).eval()
    calls = [inputs[at : at + size] for at in range(0, len(inputs) - size + 1, size)]
    ways: dict[str, Callable[[Sequence[Input]], Any]] = {}
    left_out = []
    with torch.no_grad(), Dynamic(model, workers=spots, watchdog_s=60.0) as dynamic:
        placer, _ = dynamic._workers()
        for name in planners:
            placer.planner = name
            try:
                dynamic.map(calls[0])  # cells are known and measured
                ways[name] = _by_groups(dynamic, name)
            except PlacementError as error:  # such as: there is no policy
                left_out.append({"planner": name, "trees_a_call": size, "left_out": str(error)})
        if size == 1:
            ways[BANDIT] = ByNodes(dynamic, [tree for tree, _ in inputs])
        prices = placer.executor.prices
        seen = {name: Runs(way, WatchedPrices(prices)) for name, way in ways.items()}
        for done, given in enumerate(calls):
            progress(done, len(calls))
            wanted = [model(*each) for each in given]
            for number in range(NUM_WARM + NUM_RUNS):
                for runs in seen.values():
                    if number == NUM_WARM:
                        runs.simulate()
                    seconds = runs.run(dynamic, given, wanted)
                    if number >= NUM_WARM:
                        runs.measured_s[-1].append(seconds)
    heft = seen["heft"].medians_s
    rows: list[dict[str, Any]] = []
    for name, runs in seen.items():
        over = ratio([mine / theirs for mine, theirs in zip(runs.medians_s, heft, strict=True)])
        row = {"planner": name, "trees_a_call": size, **runs.row(), "over_heft": over.median}
        rows.append(row)
    return rows + left_out


def _by_groups(dynamic: Dynamic, planner: str) -> Callable[[Sequence[Input]], list[Tensor]]:
    kept = FrozenPlanner(partial(plan, planner=planner))

    def way(given: Sequence[Input]) -> list[Tensor]:
        assert dynamic.placer is not None, "there are workers"
        dynamic.placer.planner = kept
        return dynamic.map(given)

    return way


class ByNodes:
    """DynPartition's way on our workers: a device for each node, and each node by itself."""

    def __init__(
        self, dynamic: Dynamic, trees: Sequence[Tree], *, num_episodes: int = NUM_EPISODES
    ) -> None:
        self.dynamic = dynamic
        placer, self.pool = dynamic._workers()
        self.placer = placer
        self.bandit = Bandit(len(self.pool.names))
        small = [tree for tree in trees if len(tree.nodes()) <= MAX_OPS]
        with torch.enable_grad():
            list(train(self.bandit, [self.problem(tree) for tree in small], num_episodes))

    def problem(self, tree: Tree) -> Problem:
        """A tree as the bandit sees it: its nodes, at the prices of one row."""
        prices, names = self.placer.executor.prices, self.pool.names
        cells = list(self.placer.executor.cells)
        cost = {
            (cell.name.partition(".")[0], device): prices.of(cell, 1, device)
            for cell in cells
            for device in names
        }
        nodes = tree.nodes()
        number = {id(node): at for at, node in enumerate(nodes)}
        state = next(cell.makes[0] for cell in cells if cell.name.startswith("composer"))
        edges = [
            Edge(
                number[id(child)],
                number[id(node)],
                2 * state.num_bytes,
                f"state{number[id(child)]}",
            )
            for node in nodes
            for child in node.children
        ]
        kinds = [("composer",) if node.children else ("embedding", "leaf") for node in nodes]
        seconds = tuple(
            tuple(sum(cost[kind, d] for kind in (*each, "output")) for d in names) for each in kinds
        )
        links = [[prices.links.get((a, b)) for b in names] for a in names]
        return Problem(
            "tree", tuple(f"n{at}" for at in range(len(nodes))), tuple(names), seconds,
            tuple(edges),
            tuple(tuple(link.latency_s if link else 0.0 for link in row) for row in links),
            tuple(tuple(1 / link.bytes_per_s if link else 0.0 for link in row) for row in links),
        )  # fmt: skip

    def __call__(self, given: Sequence[Input]) -> list[Tensor]:
        """The outputs of one tree."""
        ((tree, words),) = given
        devices, _, _ = self.bandit.choose(self.problem(tree))
        dynamic = self.dynamic
        with dynamic.state.record() as recording:
            made = dynamic.state.model.forward(*recording.inputs_of((tree, words)))
            loaded = load(recording, [made], range(recording.next))  # each op is a group
            self.placer.planner = self._planner(loaded.groups, tree, devices)
            dynamic.job = self.placer.executor.submit(self.placer.planned(loaded))
            dynamic.job.over.result()
            return list(recording.store.values([(made.id, made.spec)]))

    def _planner(self, groups: Sequence[Group], tree: Tree, devices: Sequence[int]) -> Planner:
        """A planner that puts the ops of each node on the device that was chosen for it."""
        nodes = tree.nodes()
        leaves = [at for at, node in enumerate(nodes) if not node.children]
        inner = [at for at, node in enumerate(nodes) if node.children]
        every = range(len(nodes))
        of_kind = {"leaf": leaves, "embedding": leaves, "composer": inner, "output": every}
        device_of: dict[str, str] = {}
        for kind, them in of_kind.items():  # in the order of recording, as nodes are
            mine = [
                (group.bundle, f"{group.cell.name}.{at}")
                for at, group in enumerate(groups)
                if group.cell.name.startswith(f"{kind}.")
            ]
            for (_, name), number in zip(sorted(mine), them, strict=True):
                device_of[name] = self.pool.names[devices[number]]

        def planner(problem: Problem, *, deadline_s: float | None, seed: int) -> Placement:
            chosen = [
                problem.devices.index(device_of[name]) if name in device_of else allowed[0]
                for name, allowed in zip(problem.ops, problem.allowed, strict=True)
            ]
            return placed(problem, chosen, range(problem.num_ops))

        return planner
