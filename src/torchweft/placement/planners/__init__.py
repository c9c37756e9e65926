"""Planners: functions from a problem to a placement; `planner` has them by name."""
