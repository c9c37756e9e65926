"""The portfolio: several planners within one deadline; the best placement of all of them.

    1  single, heft, peft: always, whatever the deadline, so it is never worse than any of them
    2  critical-path, greedy, cpop; for streams, memory limits and groups: stages
    3  done if the best one meets the bound
    4  annealing, for a part of the time
    5  small trees: tree-dp, for a part of the time
    6  cp-sat, if ortools is there, the problem is not too large and enough time is left; else more
       annealing

The bound that comes with the answer is the best that any of them proved.
"""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.util import find_spec

from torchweft.placement.bounds import bound_s
from torchweft.placement.placement import Placement, best
from torchweft.placement.planners.annealing import annealing
from torchweft.placement.planners.cp_sat import LOAD_S, cp_sat, is_loaded, writing_s
from torchweft.placement.planners.lists import cpop, critical_path, greedy, guard
from torchweft.placement.planners.stages import STAGES_S, stages, wants_stages
from torchweft.placement.planners.tree_dp import fits, tree_dp
from torchweft.placement.problem import INF, Problem

DEFAULT_S = 2.0
QUICK = (critical_path, greedy, cpop)
START_S = 0.3  # to start the solver
TREE_OPS = 16  # beyond, tree-dp rarely ends
LEAST_S = 1e-3


def portfolio(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """The best placement found by the deadline (2 s if there is none); never worse than the best of
    single, heft and peft."""
    ends_s = time.perf_counter() + (DEFAULT_S if deadline_s is None else deadline_s)
    known = replace(guard(problem), bound_s=bound_s(problem))

    def left_s(need_s: float = LEAST_S) -> float:
        """Seconds left; 0 if they are fewer than needed, or nothing is left to find."""
        seconds = ends_s - time.perf_counter()
        return seconds if seconds > need_s and not known.optimal else 0.0

    def better(other: Placement) -> Placement:
        proven_s = max(known.bound_s or 0.0, other.bound_s or 0.0)
        return replace(best([known, other]), bound_s=proven_s)

    for planner in QUICK:
        if left_s():
            known = better(planner(problem))
    if wants_stages(problem) and left_s(LEAST_S + STAGES_S * problem.num_ops):
        known = better(stages(problem))
    solve = left_s(_solver_s(problem)) > 0
    small = problem.num_ops <= TREE_OPS and fits(problem)
    if seconds := left_s():
        seconds *= 0.25 if solve or small else 1.0
        known = better(annealing(problem, deadline_s=seconds, seed=seed, start=known))
    if small and (seconds := left_s()):
        seconds *= 0.3 if solve else 1.0
        known = better(tree_dp(problem, deadline_s=seconds, seed=seed, start=known))
    if solve and (seconds := left_s()):
        known = better(cp_sat(problem, deadline_s=seconds, seed=seed, start=known))
    return known


def _solver_s(problem: Problem) -> float:
    """Seconds below which it is of no use to start the solver; inf if it is not installed."""
    if not is_loaded() and find_spec("ortools") is None:
        return INF
    return START_S + (0.0 if is_loaded() else LOAD_S) + writing_s(problem)
