"""The portfolio: several planners within one deadline; the best placement of all of them.

    1  single, heft, peft, critical-path, greedy, cpop: always, whatever the deadline, so that it
       is never worse than any of them
    2  done if the best one meets the bound
    3  annealing, for a part of the time
    4  small trees: tree-dp, for a part of the time
    5  cp-sat, if ortools is there, the problem is not too large and enough time is left; else more
       annealing

The bound that comes with the answer is the best that any of them proved.
"""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.util import find_spec

from torchweft.placement.annealing import annealing
from torchweft.placement.bounds import bound_s
from torchweft.placement.cp_sat import cp_sat
from torchweft.placement.lists import cpop, critical_path, heft, peft
from torchweft.placement.placement import Placement
from torchweft.placement.problem import Problem
from torchweft.placement.simple import greedy, single
from torchweft.placement.tree_dp import fits, tree_dp

DEFAULT_S = 1.0
QUICK = (single, heft, peft, critical_path, greedy, cpop)
SOLVER_S = 0.5  # less is not enough to load and start the solver
SOLVER_SIZE = 60_000  # (ops + edges) * devices
TREE_OPS = 16  # beyond, tree-dp rarely ends
LEAST_S = 1e-3


def portfolio(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """The best placement found by the deadline (1 s if there is none); never worse than the best of
    single, heft and peft."""
    ends_s = time.perf_counter() + (DEFAULT_S if deadline_s is None else deadline_s)
    best = min((planner(problem) for planner in QUICK), key=lambda item: item.score_s)
    best = replace(best, bound_s=bound_s(problem))
    size = (problem.num_ops + len(problem.edges)) * problem.num_devices

    def left_s() -> float:
        return ends_s - time.perf_counter()

    def better(found: Placement) -> Placement:
        proven_s = max(best.bound_s or 0.0, found.bound_s or 0.0)
        return replace(min(best, found, key=lambda item: item.score_s), bound_s=proven_s)

    solve = left_s() > SOLVER_S and size <= SOLVER_SIZE and find_spec("ortools") is not None
    small = problem.num_ops <= TREE_OPS and fits(problem)
    if left_s() > LEAST_S and not best.optimal:
        share = 0.25 if solve or small else 1.0
        best = better(annealing(problem, deadline_s=share * left_s(), seed=seed, start=best))
    if left_s() > LEAST_S and not best.optimal and small:
        best = better(
            tree_dp(problem, deadline_s=(0.3 if solve else 1.0) * left_s(), seed=seed, start=best)
        )
    if solve and left_s() > LEAST_S and not best.optimal:
        best = better(cp_sat(problem, deadline_s=left_s(), seed=seed, start=best))
    return best
