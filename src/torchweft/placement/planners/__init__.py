"""Planners: functions from a problem to a placement, by name."""

from torchweft.placement.planners.planner import (
    PLANNERS,
    Planner,
    get_planner,
    plan,
    planner_names,
)

__all__ = ["PLANNERS", "Planner", "get_planner", "plan", "planner_names"]
