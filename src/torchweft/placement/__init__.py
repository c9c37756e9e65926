"""The room of placement: which device runs each op of a graph, and when. No torch, no numpy.

problem          the numbers that planners work on, and what no placement of them can beat
placement        a placement, is it legal, and a draft: one in the making
planners         one signature, by name
graph_problem    a problem from our own graph; a placement of it as a plan
"""

from torchweft.placement.graph_problem import as_plan, graph_problem
from torchweft.placement.placement import Draft, Placement, check, faults, finished, placed
from torchweft.placement.planners.planner import Planner, plan, planner_names
from torchweft.placement.problem import Edge, Hold, Problem, bound_s

__all__ = [
    "Draft",
    "Edge",
    "Hold",
    "Placement",
    "Planner",
    "Problem",
    "as_plan",
    "bound_s",
    "check",
    "faults",
    "finished",
    "graph_problem",
    "placed",
    "plan",
    "planner_names",
]
