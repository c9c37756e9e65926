"""A planner: a function from a problem to a placement, with a deadline. `plan` calls one by name.

    def planner(problem: Problem, *, deadline_s: float | None, seed: int) -> Placement

    plan(problem, "heft")                              quick ones ignore the deadline
    plan(problem, "portfolio", deadline_s=0.1)         searching ones use it up, and never more
    plan(problem, my_planner)                          any function of this signature

`plan` stamps the planner's name, the seconds that planning took and the best bound known, and
checks the result: no planner is trusted. Learned planners and the solver are loaded when they are
first used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from torchweft.errors import PlacementError, unknown
from torchweft.placement.placement import SLACK, Placement, best, check
from torchweft.placement.planners import lists
from torchweft.placement.planners.annealing import annealing
from torchweft.placement.planners.lists import STAGES_S, guard, stages, wants_stages
from torchweft.placement.planners.tree_dp import fits, tree_dp
from torchweft.placement.problem import Problem, bound_s

DEFAULT_S = 2.0
QUICK = (lists.critical_path, lists.greedy, lists.cpop)
START_S = 0.3  # to start the solver
SOLVER = "torchweft_tools.cp_sat"  # loaded only where its package, ortools, is installed
TREE_OPS = 16  # beyond, tree-dp rarely ends
LEAST_S = 1e-3


class Planner(Protocol):
    """What every planner is."""

    def __call__(self, problem: Problem, *, deadline_s: float | None, seed: int) -> Placement:
        """A legal placement of the problem, found within the deadline where it searches."""


def portfolio(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """The best placement of several planners within one deadline (2 s if there is none).

        1  single, heft, peft: always, so it is never worse than any of them
        2  critical-path, greedy, cpop; for streams, memory limits and groups: stages
        3  done if the best one meets the bound
        4  annealing, for a part of the time
        5  small trees: tree-dp, for a part of the time
        6  cp-sat, if ortools is there, the problem is not too large and enough time is left; else
           more annealing

    The bound that comes with the answer is the best that any of them proved.
    """
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
    solve = find_spec("ortools") is not None
    solve = solve and left_s(START_S + import_module(SOLVER).loading_s(problem)) > 0
    small = problem.num_ops <= TREE_OPS and fits(problem)
    if seconds := left_s():
        seconds *= 0.25 if solve or small else 1.0
        known = better(annealing(problem, deadline_s=seconds, seed=seed, start=known))
    if small and (seconds := left_s()):
        seconds *= 0.3 if solve else 1.0
        known = better(tree_dp(problem, deadline_s=seconds, seed=seed, start=known))
    if solve and (seconds := left_s()):
        cp_sat = import_module(SOLVER).cp_sat
        known = better(cp_sat(problem, deadline_s=seconds, seed=seed, start=known))
    return known


LEARNED = "torchweft.placement.learn.policy"
PLANNERS: Mapping[str, Planner | str] = {
    "single": lists.single,
    "round-robin": lists.round_robin,
    "random": lists.random_devices,
    "greedy": lists.greedy,
    "heft": lists.heft,
    "cpop": lists.cpop,
    "peft": lists.peft,
    "critical-path": lists.critical_path,
    "stages": lists.stages,
    "annealing": annealing,
    "tree-dp": tree_dp,
    "cp-sat": SOLVER,
    "learned": LEARNED,
    "guarded": LEARNED,
    "guided": LEARNED,
    "portfolio": portfolio,
}
"""By name; of those that need numpy, torch or ortools, the module that has them."""
JUDGES: Mapping[str, str] = {"exhaustive": "torchweft_tools.bench.oracle.exhaustive"}
"""Planners that are there to judge the others, on tiny graphs."""


def planner_names() -> tuple[str, ...]:
    """The names that `plan` knows."""
    return tuple(PLANNERS)


def get_planner(name: str) -> Planner:
    """A planner by its name. Raises `PlacementError` for an unknown one; lists the choices."""
    if name not in {**PLANNERS, **JUDGES}:
        raise PlacementError(f"planner: {unknown('planner', name, PLANNERS)}", rule="planner")
    planner = PLANNERS.get(name) or JUDGES[name]
    if isinstance(planner, str):
        return cast(Planner, getattr(import_module(planner), name.replace("-", "_")))
    return planner


def plan(
    problem: Problem,
    planner: str | Planner = "portfolio",
    *,
    deadline_s: float | None = None,
    seed: int = 0,
) -> Placement:
    """The placement that a planner finds: checked, named, timed, with a lower bound.

    Raises `PlacementError` if there is none within the memory limits, or the planner is unknown.
    """
    if deadline_s is not None and not deadline_s >= 0:
        text = f"deadline_s must be a number of seconds of at least 0; got {deadline_s!r}."
        raise PlacementError(f"deadline: {text}", rule="deadline")
    function = get_planner(planner) if isinstance(planner, str) else planner
    name = planner if isinstance(planner, str) else getattr(planner, "__name__", "planner")
    began_s = time.perf_counter()
    placement = function(problem, deadline_s=deadline_s, seed=seed)
    planning_s = time.perf_counter() - began_s
    check(problem, replace(placement, planner=name))
    best_s = max(bound_s(problem), placement.bound_s or 0.0)
    if best_s > placement.score_s * (1 + SLACK):
        text = f"{placement.score_s:g} s, found by {name}, is below {best_s:g} s, which was proven"
        cure = "If the planner is your own, its bound_s is too high; else please report the graph."
        raise PlacementError(f"bound: {problem.name!r}: {text}. {cure}", rule="bound")
    best_s = min(best_s, placement.score_s)  # sums of seconds are off by a hair
    return replace(placement, planner=name, planning_s=planning_s, bound_s=best_s)
