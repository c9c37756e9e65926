"""The recovery bench: one device becomes half as fast; how much of it 500 served inputs win back.

    frozen          the placements of before the drift, under the costs of after it
    table           the cost table follows, the policy stays as it was before the drift
    learned         the table follows and the policy learns from what it serves: the whole thing
    before_alone    the policy of before, on the table that follows, without the guard
    learned_alone   the policy that learned, on the same table, without the guard
    best            a long search under the costs of after the drift

    recovered = (frozen - arm) / (frozen - best)

Without a table that follows, a policy has nothing to learn from: replayed inputs would cost what
they did before. So no arm learns without the table. `simulated` has no clock and no workers: the
same seed gives the same numbers. `served` runs on two real workers, one of them throttled
(emulated), the other throttled while it serves. There every arm places each measured request once,
after the last served input, and arms take turns, so that noise hits all of them alike.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from torchweft.dynamic.model import Dynamic
from torchweft.errors import PlacementError
from torchweft.placement import Placement, Planner, Problem, plan
from torchweft.placement.learn.learner import Learner, Pace, one_thread
from torchweft.placement.learn.policy import Policy, default_policy, guarded, learned, planner_of
from torchweft.placement.placement import placed
from torchweft.placement.planners.annealing import annealing
from torchweft.run.driver.prices import Drift
from torchweft.run.workers.pool import Spot
from torchweft_tools.bench.models.dynamic_models import BinaryTreeLSTM
from torchweft_tools.train.cases import case, random_tree

ARMS = ("frozen", "table", "learned", "before_alone", "learned_alone", "best")
SLOWER = 2.0
SEARCH_S = 0.5
LEAST_LOSS = 0.05  # of the best: a share of less than that is noise
LOOKS = (1, 3, 10, 30, 100, 300)  # inputs after the drift: points of the curve
NUM_DRAWS = 1000
NOISE = 0.1  # of what a simulated device takes for a call, in logarithms


Progress = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Ignore the progress."""


def replay(problem: Problem, placement: Placement) -> Placement:
    """The same devices and orders under the costs of another problem with the same ops: what a
    placement really takes when the costs have drifted. Raises `PlacementError` if the ops differ.
    """
    if placement.ops != problem.ops or placement.devices != problem.devices:
        raise PlacementError(
            f"problem: the placement of {placement.problem!r} has other ops or devices than "
            f"problem {problem.name!r}.",
            rule="problem",
        )
    return placed(problem, placement.device, placement.order)


@dataclass(eq=False)
class FrozenPlanner:
    """A planner that places each problem once, and repeats that placement from then on."""

    planner: Planner
    placements: dict[Any, Placement] = field(default_factory=dict)

    def __call__(self, problem: Problem, *, deadline_s: float | None, seed: int) -> Placement:
        """The placement of the first time, under the costs of this time."""
        key = problem.ops, problem.edges
        if key not in self.placements:
            self.placements[key] = self.planner(problem, deadline_s=deadline_s, seed=seed)
        return replay(problem, self.placements[key])


def policy_of(path: str) -> Policy:
    """The policy of a file; without one the package's own, or an untrained one if it has none."""
    if path:
        return Policy.load(path)
    try:
        return default_policy()
    except PlacementError:
        torch.manual_seed(0)
        return Policy()


def long_search(problem: Problem, *, deadline_s: float | None, seed: int) -> Placement:
    """The best placement that a long search finds."""
    return plan(problem, "portfolio", deadline_s=SEARCH_S, seed=seed)


def arms_of(before: Policy, learner: Learner) -> dict[str, Planner]:
    """The planners of the arms that plan by the table as it is now."""
    return {
        "table": planner_of(before, guarded),
        "learned": learner,
        "before_alone": planner_of(before, learned),
        "learned_alone": planner_of(learner.policy, learned),
    }


def recovered(seconds: Mapping[str, float]) -> dict[str, float | None]:
    """The share of the loss that each arm wins back; None where next to nothing was lost."""
    lost_s = seconds["frozen"] - seconds["best"]
    lost = lost_s > LEAST_LOSS * seconds["best"]
    return {
        arm: (seconds["frozen"] - seconds[arm]) / lost_s if lost else None for arm in ARMS[1:-1]
    }


def slowed(problem: Problem, factors: Sequence[float]) -> Problem:
    """The problem on devices that are so many times slower."""
    rows = problem.seconds
    seconds = tuple(tuple(s * f for s, f in zip(row, factors, strict=True)) for row in rows)
    return replace(problem, seconds=seconds)


@dataclass(eq=False)
class World:
    """Devices with true costs, and the table that follows them."""

    slowness: tuple[float, ...]
    ratio: float
    draw: random.Random
    drift: Drift = field(default_factory=Drift)
    truth: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.truth = [1.0] * len(self.slowness)

    def input(self) -> Problem:
        """A new tree, with costs as they were measured at first."""
        num_ops = 2 * self.draw.randint(8, 30) + 1
        return case(random_tree(num_ops, self.draw.randrange(10**9)), self.slowness, self.ratio)

    def priced(self, first: Problem) -> Problem:
        """What the table says of an input now."""
        return slowed(first, [self.drift.get(("op", name), 1.0) for name in first.devices])

    def true(self, first: Problem) -> Problem:
        """What an input really costs now."""
        return slowed(first, self.truth)

    def serve(self, first: Problem, planner: Planner) -> None:
        """Place an input by the table, run it, and let the table see how long its ops took."""
        placement = planner(self.priced(first), deadline_s=None, seed=0)
        for at, device in enumerate(first.devices):
            here = [op for op, where in enumerate(placement.device) if where == at]
            if here:
                late = self.truth[at] * self.draw.lognormvariate(0, NOISE)
                ratio = late / self.drift.get(("op", device), 1.0)
                self.drift.saw(
                    ("op", device), ratio, late * sum(first.seconds[op][at] for op in here)
                )


@one_thread()
def simulated(
    *, policy: Policy | None = None, pace: Pace | None = None, seed: int = 0,
    slowness: tuple[float, ...] = (1.0, 1.5), ratio: float = 1.0, num_before: int = 100,
    num_inputs: int = 500, num_held_out: int = 60, progress: Progress = no_progress,
) -> dict[str, Any]:  # fmt: skip
    """Served and measured in the simulator, every input another tree; measured on trees that are
    never served. By default on two unlike devices, of which the faster one slows down."""
    world = World(slowness, ratio, random.Random(seed))
    pace = replace(pace or Pace(), limit_s=float("inf"))  # no clock decides anything
    learner = Learner(policy, pace, seed=seed)

    def serve(num: int) -> None:
        for _ in range(num):
            first = world.input()
            world.serve(first, learner)
            learner.served(partial(world.priced, first))
            if learner.due:
                learner.turn()

    held_out = [world.input() for _ in range(num_held_out)]
    serve(num_before)
    before = copy.deepcopy(learner.policy)
    frozen = [
        planner_of(before, guarded)(world.priced(p), deadline_s=None, seed=0) for p in held_out
    ]
    world.truth[0] = SLOWER

    def total_s(placements: Iterable[Placement]) -> float:
        pairs = zip(held_out, placements, strict=True)
        return sum(replay(world.true(first), placement).score_s for first, placement in pairs)

    seconds = {"frozen": total_s(frozen)}
    seconds["best"] = total_s(annealing(world.true(p), seed=seed) for p in held_out)
    curve, done = [], 0
    for num in (*(num for num in LOOKS if num < num_inputs), num_inputs):
        serve(num - done)
        done = num
        progress(done, num_inputs)
        for arm, planner in arms_of(before, learner).items():
            priced = [world.priced(first) for first in held_out]
            seconds[arm] = total_s(planner(p, deadline_s=None, seed=0) for p in priced)
        curve.append({"inputs": num, **recovered(seconds)})
    more = {"held_out": num_held_out, "ratio": ratio, "curve": curve}
    return _row("simulated", seconds, learner) | more


def served(
    inputs: Sequence[Any], num_words: int, source: str, *, policy: Policy | None = None,
    pace: Pace | None = None, num_before: int = 60, num_inputs: int = 500, num_trees: int = 4,
    num_measured: int = 12, repeats: int = 7, mem_dim: int = 600, seed: int = 0,
    spots: Sequence[Spot] = (Spot("fast", cores=(0,)), Spot("slow", cores=(1,), slowness=1.5)),
    progress: Progress = no_progress,
) -> dict[str, Any]:  # fmt: skip
    """The same on real workers, in seconds of a placed call without its planning. An input is a
    request of several trees; requests that are measured are served as well."""
    draw = random.Random(seed)
    torch.manual_seed(0)
    model = BinaryTreeLSTM(num_words, mem_dim=mem_dim).eval()
    learner = Learner(policy, pace, seed=seed)
    requests = [draw.sample(list(inputs), num_trees) for _ in range(num_measured)]
    done, num_calls = 0, num_before + num_inputs + num_measured * (1 + (1 + repeats) * len(ARMS))
    with torch.no_grad(), Dynamic(model, workers=spots, planner=learner) as dynamic:
        placer, pool = dynamic._workers()

        def call(request: Sequence[Any]) -> float:
            nonlocal done
            dynamic.map(request)
            done += 1
            progress(done, num_calls)
            assert dynamic.job is not None, "a placed call has a job"
            return dynamic.job.ended_s - dynamic.job.began_s

        def run(request: Sequence[Any], planner: Planner) -> float:
            """Seconds of a call by a planner; nothing is learned from it."""
            turns, dynamic.turns, placer.planner = dynamic.turns, None, planner
            seconds = call(request)
            placer.planner, dynamic.turns = learner, turns
            return seconds

        def serve(num: int) -> list[float]:
            return [
                call(requests[at // 2 % num_measured] if at % 2 else draw.sample(inputs, num_trees))
                for at in range(num)
            ]

        undrifted_s = statistics.median(serve(num_before)[num_before // 2 :])
        before = copy.deepcopy(learner.policy)
        frozen = FrozenPlanner(planner_of(before, guarded))
        for request in requests:
            run(request, frozen)
        pool.mates[spots[0].name].send({"kind": "throttle", "slowness": SLOWER})
        took_s = serve(num_inputs)
        after = {**arms_of(before, learner), "best": long_search}
        arms = {"frozen": frozen, **{arm: FrozenPlanner(planner) for arm, planner in after.items()}}
        medians = in_turns(arms, requests, run, repeats)
        assert dynamic.turns is not None, "the planner learns"
        waited_s = dynamic.turns.waited_s
    more = {
        "trees": source, "workers": [spot.label for spot in spots], "mem_dim": mem_dim,
        "trees_a_call": num_trees, "intervals": intervals(medians, seed),
        "frozen_ms": 1e3 * statistics.mean(medians["frozen"]),
        "undrifted_ms": 1e3 * undrifted_s, "last_ms": 1e3 * statistics.median(took_s[-100:]),
        "waited_ms_an_input": 1e3 * waited_s / learner.num_served,
        "planned_anew": placer.num_planned,
    }  # fmt: skip
    return _row("workers", {arm: sum(rows) for arm, rows in medians.items()}, learner) | more


def in_turns(
    arms: Mapping[str, Planner], requests: Sequence[Any],
    run: Callable[[Any, Planner], float], repeats: int,
) -> dict[str, list[float]]:  # fmt: skip
    """Seconds of each arm for each request, the median of several runs; arms take turns."""
    times = {arm: [list[float]() for _ in requests] for arm in arms}
    for number in range(1 + repeats):
        for at, request in enumerate(requests):
            for arm, planner in arms.items():
                seconds = run(request, planner)
                times[arm][at] += [seconds] if number else []  # the first time it is placed
    return {arm: [*map(statistics.median, rows)] for arm, rows in times.items()}


def intervals(seconds: Mapping[str, Sequence[float]], seed: int) -> dict[str, list[float]]:
    """The share that each arm recovers, as a 95 % interval over requests: they are drawn again with
    replacement, all arms alike."""
    draw = random.Random(seed)
    every = range(len(seconds["frozen"]))
    shares: dict[str, list[float]] = {}
    for _ in range(NUM_DRAWS):
        drawn = draw.choices(every, k=len(every))
        sums = {arm: sum(rows[at] for at in drawn) for arm, rows in seconds.items()}
        for arm, share in recovered(sums).items():
            shares.setdefault(arm, []).extend([] if share is None else [share])
    edges = {arm: sorted(each) for arm, each in shares.items() if each}
    return {arm: [s[len(s) // 40], s[-1 - len(s) // 40]] for arm, s in edges.items()}


def _row(where: str, seconds: Mapping[str, float], learner: Learner) -> dict[str, Any]:
    over_best = {arm: s / seconds["best"] for arm, s in seconds.items() if arm != "best"}
    return {
        "where": where, "recovered": recovered(seconds), "over_best": over_best,
        "served": learner.num_served, "turns": learner.num_turns, "steps": learner.num_steps,
        "planned": learner.num_planned, "guarded": learner.num_guarded,
    }  # fmt: skip
