"""A planner: a function from a problem to a placement, with a deadline. `plan` calls one by name.

    def planner(problem: Problem, *, deadline_s: float | None, seed: int) -> Placement

    plan(problem, "heft")                              quick ones ignore the deadline
    plan(problem, "portfolio", deadline_s=0.1)         searching ones use it up, and never more
    plan(problem, my_planner)                          any function of this signature

`plan` stamps the planner's name, the seconds that planning took and the best bound known, and
checks the result: no planner is trusted. A planner that needs a heavy library is loaded on its
first use. A learned one is one more line of the table; `torchweft bench placement` has rows for
every line, and fills its summary from the names `learned` (one pass, no search), `guarded` (the
better of it, single, heft and peft) and `guided` (search led by it).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Protocol, cast

from torchweft.errors import PlacementError, unknown
from torchweft.placement.bounds import bound_s
from torchweft.placement.check import SLACK, check
from torchweft.placement.placement import Placement
from torchweft.placement.problem import Problem

HOUSE, LEARNED = "torchweft.placement.planners", "torchweft.placement.learn.learned"
PLANNERS: Mapping[str, tuple[str, str]] = {
    "single": (f"{HOUSE}.lists:single", "all on the one device that is best for it"),
    "round-robin": (f"{HOUSE}.lists:round_robin", "each device in turn"),
    "random": (f"{HOUSE}.lists:random_devices", "any device, by the seed"),
    "greedy": (f"{HOUSE}.lists:greedy", "program order, each op where it ends first"),
    "heft": (f"{HOUSE}.lists:heft", "longest way to the end first, where it ends first"),
    "cpop": (f"{HOUSE}.lists:cpop", "the critical path on one device, the rest as heft"),
    "peft": (f"{HOUSE}.lists:peft", "where it and all behind it would end first"),
    "critical-path": (f"{HOUSE}.lists:critical_path", "ready ops, longest way to the end first"),
    "stages": (f"{HOUSE}.stages:stages", "consecutive ops on one device, then the next one"),
    "annealing": (f"{HOUSE}.annealing:annealing", "the best of these, improved by random moves"),
    "tree-dp": (f"{HOUSE}.tree_dp:tree_dp", "trees: optimal, or the best found in time"),
    "cp-sat": (f"{HOUSE}.cp_sat:cp_sat", "OR-tools: the best found in time, and a proven bound"),
    "learned": (f"{LEARNED}:learned", "a trained policy, one pass, no search"),
    "guarded": (f"{LEARNED}:guarded", "learned, never worse than single, heft and peft"),
    "guided": (f"{LEARNED}:guided", "a search that starts from the policy's choices"),
    "portfolio": (f"{HOUSE}.portfolio:portfolio", "all of these within the time given"),
}
"""Name -> (module:function, what it does)."""


class Planner(Protocol):
    """What every planner is."""

    def __call__(self, problem: Problem, *, deadline_s: float | None, seed: int) -> Placement:
        """A legal placement of the problem, found within the deadline where it searches."""


def planner_names() -> tuple[str, ...]:
    """The names that `plan` knows."""
    return tuple(PLANNERS)


def get_planner(name: str) -> Planner:
    """A planner by its name. Raises `PlacementError` for an unknown one; lists the choices."""
    if name not in PLANNERS:
        raise PlacementError(f"planner: {unknown('planner', name, PLANNERS)}", rule="planner")
    module, _, function = PLANNERS[name][0].partition(":")
    return cast(Planner, getattr(import_module(module), function))


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
