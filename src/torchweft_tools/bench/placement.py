"""The placement bench: every planner on many graphs and machines, against the best plan known.

    torchweft bench placement --data FOLDER --json

Graphs: sentences of the Stanford Sentiment Treebank, random trees and graphs, networks with
branches, DNN graphs and STG graphs with proven optima; without data the generated ones alone.
Machines of 2, 3 and 5 devices of unlike speed; transfers of 0.05 to 3 mean ops. For each planner:

    over_best, worst_over_best     its score over the best score of any planner
    over_bound                     over the bound that CP-SAT proved
    plan_ms                        planning alone; with_planning: score and planning over the best

An op takes about 1 ms (a unit of time of STG: 1 ms), so planning time weighs as much as it would
for small networks. Planners that search have `--search-ms` per case, the solver `--solver-s`.
`learned` has a row for each policy that comes with the package: one training with three seeds. No
policy has seen any of these graphs, nor machines of more devices than `TRAINED_DEVICES`.
DynPartition's bandit places only trees; it is trained for each machine and ratio on other trees.
Measurements on real workers come from the dynamic bench, unless `--no-workers`.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from torchweft.errors import PlacementError, WeftError
from torchweft.placement import Placement, Planner, Problem, plan, planner_names
from torchweft_tools.formats.read_any import ProblemOptions, read_problem
from torchweft_tools.train.cases import (
    MACHINES,
    RATIOS,
    TRAINED_DEVICES,
    UNIT_S,
    case,
    layered,
    mean_op_s,
    random_dag,
    random_tree,
    scaled,
    sst_trees,
    stg_optima,
    tree_case,
)

Progress = Callable[[int, int], None]
Row = dict[str, Any]
SEARCH = ("annealing", "tree-dp", "portfolio", "guided")
EQUAL = ("stg", "equal processors")
STG_PROCESSORS = (2, 4, 8, 16)
TREES = ("random tree", "sst")
NUM_TREES, NUM_EPISODES, OTHER = 64, 1000, 10**6  # of the bandit: other trees than those drawn
COLUMNS = ("family", "devices", "ratio", "planner", "cases", "over_best", "worst_over_best",
           "over_bound", "plan_ms", "with_planning")  # fmt: skip


class PlannedCase(NamedTuple):
    """A problem with the group of rows it belongs to; `optimum_s` where it is known."""

    family: str
    ratio: float | None
    problem: Problem
    optimum_s: float | None = None


class Result(NamedTuple):
    """The placement of a case by every planner."""

    case: PlannedCase
    placements: dict[str, Placement]
    best_s: float
    bound_s: float
    proven: bool


def run(
    *,
    data: str = "",
    num_cases: int = 2,
    num_stg: int = 8,
    num_ops: int = 40,
    search_ms: float = 100.0,
    solver_s: float = 2.0,
    seed: int = 0,
    no_workers: bool = False,
    quick: bool = False,
    progress: Progress | None = None,
) -> tuple[list[Row], Row]:
    """A row for each family, machine, ratio and planner, and the summary.

    data: a folder with sst, dnn-partitioning or stg50 in it; by default WEFT_DATA.
    num_cases: graphs of each family.
    num_stg: graphs of the STG set.
    num_ops: ops of a graph that is drawn.
    search_ms: milliseconds that a searching planner has for a case.
    solver_s: seconds that the solver has for a case.
    seed: the random seed.
    no_workers: leave out the measurements on real workers.
    quick: one small graph of each family and no workers, to see that everything runs.
    """
    if quick:
        num_cases = num_stg = 1
        num_ops, search_ms, solver_s, no_workers = 12, 20.0, 0.3, True
    data = data or os.environ.get("WEFT_DATA", "")
    folder = _folder(data)
    cases = list(_drawn(folder, num_cases, num_ops, seed))
    cases += [*_dnn(folder), *_stg(folder, num_stg, num_ops, seed)]
    _warm(cases[0].problem)
    results, policies = [], _policies()
    for number, item in enumerate(cases):
        planners = policies | _bandit(item, num_ops)
        results.append(_plan(item, planners, search_ms / 1e3, solver_s, seed))
        if progress is not None:
            progress(number + 1, len(cases))
    workers = {} if no_workers else _on_workers(data)
    return list(_rows(results)), _summary(results, ["learned", *policies], workers)


def _policies() -> dict[str, Planner]:
    """The other policies of the package, each as a planner that makes one pass."""
    from torchweft.placement.learn.policy import POLICIES, Policy, planner_of

    others = {seed: Policy.load(POLICIES / f"seed{seed}.safetensors") for seed in (1, 2)}
    return {f"learned, seed {seed}": planner_of(policy) for seed, policy in others.items()}


def _bandit(item: PlannedCase, num_ops: int) -> dict[str, Planner]:
    """DynPartition's bandit as a planner, if the case is a tree that it can take."""
    from torchweft_tools.bench.peers.dynpartition import MAX_OPS

    if item.family not in TREES or item.problem.num_ops > MAX_OPS or item.ratio is None:
        return {}
    return {"dynpartition": _trained_bandit(item.problem.num_devices, item.ratio, num_ops)}


@cache
def _trained_bandit(num_devices: int, ratio: float, num_ops: int) -> Planner:
    """A bandit that was trained on other trees with this machine and ratio."""
    from torchweft_tools.bench.peers.dynpartition import Bandit, train

    (slowness,) = (machine for machine in MACHINES if len(machine) == num_devices)
    trees = [case(random_tree(num_ops, OTHER + at), slowness, ratio) for at in range(NUM_TREES)]
    bandit = Bandit(num_devices)
    for _ in train(bandit, trees, NUM_EPISODES):
        pass
    return bandit.plan


def _on_workers(data: str) -> Row:
    """What the dynamic bench measures on this machine."""
    from torchweft_tools.bench import dynamic

    summary: Row = {}
    for row in ("placed", "batched"):
        summary |= dynamic.run(data=data, only=row)[1]
    return summary


def _folder(data: str) -> Path | None:
    if not data:
        return None
    if not (folder := Path(data)).is_dir():
        raise WeftError(f"data: there is no folder {data}; --data must name one.", rule="data")
    return folder


def _drawn(folder: Path | None, num_cases: int, num_ops: int, seed: int) -> Iterator[PlannedCase]:
    """Trees and graphs on every machine, with every ratio."""
    draw = random.Random(seed)
    sentences = [tree for tree in sst_trees(folder) if len(tree) >= 15] if folder else []
    for slowness in MACHINES:
        for ratio in RATIOS:
            for _ in range(num_cases):
                number = draw.randrange(10**6)
                works = {
                    "random tree": random_tree(num_ops, number),
                    "random graph": random_dag(num_ops, number),
                    "branches": layered(num_ops, number),
                }
                if sentences:
                    works["sst"] = tree_case(draw.choice(sentences), "sst")
                for family, work in works.items():
                    yield PlannedCase(family, ratio, case(work, slowness, ratio))


def _dnn(folder: Path | None) -> Iterator[PlannedCase]:
    """DNN graphs with the devices, transfers and memory limits of their files."""
    for path in sorted((folder / "dnn-partitioning").rglob("*.json")) if folder else ():
        if "throughput" in str(path):
            problem = read_problem(path, ProblemOptions(objective="throughput"))
        else:
            problem = read_problem(path)
        unit = scaled(problem, UNIT_S / (mean_op_s(problem) or 1.0))
        yield PlannedCase(f"dnn {problem.objective}", None, unit)


def _stg(folder: Path | None, num_cases: int, num_ops: int, seed: int) -> Iterator[PlannedCase]:
    """Equal processors, no transfers: STG files with a proven optimum, else generated graphs."""
    draw, optima = random.Random(seed), stg_optima(folder) if folder else []
    for processors in STG_PROCESSORS:
        equal = (1.0,) * processors
        known = [item for item in optima if item[1] == processors]
        for path, _, optimum_s in draw.sample(known, min(num_cases, len(known))):
            problem = scaled(read_problem(path, ProblemOptions(slowness=equal)), UNIT_S)
            yield PlannedCase("stg", 0.0, problem, optimum_s * UNIT_S)
        for _ in range(0 if optima else num_cases):
            work = random_dag(num_ops, draw.randrange(10**6))
            yield PlannedCase("equal processors", 0.0, case(work, equal, 0.0))


def _warm(problem: Problem) -> None:
    """Load what planners need, so that the first case does not pay for it."""
    for name in planner_names():
        try:
            plan(problem, name, deadline_s=0.01)
        except PlacementError:
            continue


def _plan(
    item: PlannedCase, policies: Mapping[str, Planner], search_s: float, solver_s: float, seed: int
) -> Result:
    wanted: dict[str, tuple[str | Planner, float | None]] = {
        name: (name, search_s if name in SEARCH else None)
        for name in planner_names()
        if name != "cp-sat"  # which runs anyway, for the bound
    }
    wanted |= {name: (planner, None) for name, planner in policies.items()}
    if item.family in EQUAL:
        wanted["portfolio long"] = "portfolio", solver_s
    else:
        wanted["cp-sat"] = "cp-sat", solver_s
    placements = {}
    for row, (planner, deadline_s) in wanted.items():
        try:
            placements[row] = plan(item.problem, planner, deadline_s=deadline_s, seed=seed)
        except PlacementError as error:
            if error.rule not in ("tree", "cp-sat"):  # no tree; no ortools
                raise
    best_s = min(placement.score_s for placement in placements.values())
    bounds = [placement.bound_s or 0.0 for placement in placements.values()]
    bound_s = max(*bounds, item.optimum_s or 0.0)
    return Result(item, placements, best_s, bound_s, best_s <= bound_s * (1 + 1e-6))


def _rows(results: Sequence[Result]) -> Iterator[Row]:
    groups: dict[tuple[str, int, float | None], list[Result]] = {}
    for result in results:
        key = result.case.family, result.case.problem.num_devices, result.case.ratio
        groups.setdefault(key, []).append(result)
    for (family, devices, ratio), group in groups.items():
        for name in dict.fromkeys(name for result in group for name in result.placements):
            pairs = [
                (result, result.placements[name]) for result in group if name in result.placements
            ]
            over_best = [_over(placement.score_s, result.best_s) for result, placement in pairs]
            with_planning = [
                _over(placement.score_s + placement.planning_s, result.best_s)
                for result, placement in pairs
            ]
            yield {
                "family": family,
                "devices": devices,
                "ratio": ratio,
                "planner": name,
                "held_out_devices": devices not in TRAINED_DEVICES,
                "cases": len(pairs),
                "proven": sum(result.proven for result, _ in pairs),
                "over_best": statistics.mean(over_best),
                "worst_over_best": max(over_best),
                "over_bound": statistics.mean(_over(p.score_s, r.bound_s) for r, p in pairs),
                "plan_ms": 1e3 * statistics.mean(p.planning_s for _, p in pairs),
                "with_planning": statistics.mean(with_planning),
            }


def _over(score_s: float, best_s: float) -> float:
    return score_s / best_s if best_s else 1.0


def _summary(results: Sequence[Result], seeds: Sequence[str], workers: Row) -> Row:
    """The figures. seeds: the rows of one planner, from trainings with several seeds; workers:
    what was measured on workers, if anything."""
    transfers = [r for r in results if r.case.ratio is not None and r.case.ratio >= 0.3]
    drawn = [r for r in results if r.case.ratio]
    proven = [r for r in results if r.proven or r.case.optimum_s is not None]
    equal = [r for r in proven if r.case.family in EQUAL]
    held_out = [r for r in transfers if r.case.problem.num_devices not in TRAINED_DEVICES]
    names = dict.fromkeys(name for result in drawn for name in result.placements)
    heft_gap, guided_gap = (_mean_over(drawn, name, _best_s) - 1 for name in ("heft", "guided"))
    by_seed = [_mean_over(transfers, name, _classical_s) for name in seeds]
    over_proven = [_mean_over(proven, name, _bound_s) for name in seeds if proven]
    return {
        "learned_vs_best_classical": statistics.mean(by_seed),
        "learned_worst_guarded": max(_overs(results, "guarded", _guard_s)),
        "guided_gap_over_heft_gap": guided_gap / heft_gap if heft_gap > 0 else None,
        "plan_ms_50_nodes": _tree_ms("learned"),
        "stg_portfolio_ratio": _mean_over(equal, "portfolio long", _bound_s) if equal else None,
        "simulator_error": workers.get("simulator_error"),
        "simulator_error_one_tree": workers.get("simulator_error_one_tree"),
        "batched_vs_per_node": workers.get("batched_vs_per_node"),
        "learned_vs_best_classical_by_seed": by_seed,
        "learned_vs_best_classical_held_out_devices": statistics.mean(
            _mean_over(held_out, name, _classical_s) for name in seeds
        ),
        "learned_over_proven": statistics.mean(over_proven) if proven else None,
        "learned_over_proven_by_seed": over_proven,
        "heft_over_proven": _mean_over(proven, "heft", _bound_s) if proven else None,
        "annealing_gap_over_heft_gap": (
            (_mean_over(drawn, "annealing", _best_s) - 1) / heft_gap if heft_gap > 0 else None
        ),
        "heft_ms_50_nodes": _tree_ms("heft"),
        "mean_over_best": {name: _mean_over(drawn, name, _best_s) for name in names},
        "portfolio_worst_guarded": max(_overs(results, "portfolio", _guard_s)),
        "cases": len(results),
        "proven": len(proven),
    }


def _best_s(result: Result) -> float:
    return result.best_s


def _bound_s(result: Result) -> float:
    return result.bound_s


def _classical_s(result: Result) -> float:
    return min(result.placements[name].score_s for name in ("heft", "peft"))


def _guard_s(result: Result) -> float:
    return min(_classical_s(result), result.placements["single"].score_s)


def _overs(
    results: Iterable[Result], name: str, best: Callable[[Result], float]
) -> Iterator[float]:
    for result in results:
        if name in result.placements:
            yield _over(result.placements[name].score_s, best(result))


def _mean_over(results: Iterable[Result], name: str, best: Callable[[Result], float]) -> float:
    """The mean of a planner's ratios to the best; it must have results."""
    return statistics.mean(_overs(results, name, best))


def _tree_ms(name: str) -> float:
    """The median milliseconds to plan a tree of about 50 ops, on one core."""
    from torchweft.placement.learn.learner import one_thread

    work = random_tree(50, 0)
    with one_thread():
        times = [plan(case(work, MACHINES[1], 1.0), name).planning_s for _ in range(41)]
    return 1e3 * statistics.median(times)
