"""Exhaustive search, for tiny problems: every device for every op, every order of the ops.

It tries all assignments within the memory limits. For each, ops start one after another (no start
before the last one), each as early as it can: every placement worth having is among these. A branch
ends where it cannot beat the best one, by paths or by loads. Nothing is shared with the other exact
planners, which it is there to check.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import product
from operator import add

from torchweft.errors import PlacementError
from torchweft.placement.placement import OpenDevices, Placement, busy_s, period_s, placed
from torchweft.placement.problem import INF, Problem

MAX_TRIED = 3_000_000
MAX_LATENCY_OPS = 10
DEFAULT_S = 30.0


def exhaustive(problem: Problem, *, deadline_s: float | None = None, seed: int = 0) -> Placement:
    """The best placement of all, proven unless the deadline (30 s if there is none) passed first.

    Raises `PlacementError` for a problem that is not tiny, or that has no legal placement.
    """
    choices = [problem.allowed[group[0]] for group in problem.groups]
    tiny = problem.objective == "throughput" or problem.num_ops <= MAX_LATENCY_OPS
    if not tiny or math.prod(map(len, choices)) > MAX_TRIED:
        raise PlacementError(
            f"size: exhaustive takes at most {MAX_LATENCY_OPS} ops and {MAX_TRIED} assignments; "
            f"{problem} is larger. Use cp-sat, or portfolio.",
            rule="size",
        )
    search, proven = _FullSearch(problem, DEFAULT_S if deadline_s is None else deadline_s), False
    try:
        for chosen in product(*choices):
            search.watch()
            devices = _within(problem, chosen)
            if devices is not None:
                search.assignment(devices)
        proven = True
    except TimeoutError:
        pass
    if search.best is None:
        which = "no assignment" if proven else "none of the assignments tried in time"
        text = f"memory: {which} of {problem.name!r} keeps the memory limits."
        raise PlacementError(text, rule="memory")
    return placed(problem, *search.best, bound_s=search.best_s if proven else None)


def _within(problem: Problem, chosen: Sequence[int]) -> list[int] | None:
    """A device for each op, or None where memory runs out."""
    room = OpenDevices(problem)
    for group, device in zip(problem.groups, chosen, strict=True):
        if device not in room.open(group[0]):
            return None
        room.take(group[0], device)
    return room.devices


class _FullSearch:
    """The best assignment and order so far."""

    def __init__(self, problem: Problem, deadline_s: float) -> None:
        self.problem = problem
        self.ends_s = time.perf_counter() + deadline_s
        self.gives_up_s = self.ends_s + DEFAULT_S  # where memory is so tight that nothing is found
        self.best: tuple[list[int], list[int]] | None = None
        self.best_s = INF

    def watch(self) -> None:
        """Stop at the deadline, or later if nothing has been found by then."""
        if time.perf_counter() > (self.gives_up_s if self.best is None else self.ends_s):
            raise TimeoutError

    def assignment(self, devices: list[int]) -> None:
        """Look for the best order of one assignment."""
        problem, self.devices = self.problem, devices
        if problem.objective == "throughput":
            score_s = period_s(problem, devices)
            if score_s < self.best_s:
                self.best, self.best_s = (devices, list(range(problem.num_ops))), score_s
            return
        # Seconds from an op's start to the end of the graph, if it never has to wait.
        self.rest_s = [0.0] * problem.num_ops
        for op in reversed(range(problem.num_ops)):
            behind = [
                seconds[devices[op]][devices[target]] + self.rest_s[target]
                for target, seconds in problem.succs[op]
            ]
            self.rest_s[op] = problem.seconds[op][devices[op]] + max(behind, default=0.0)
        self.left_s = busy_s(problem, devices)
        if max(*self.left_s, *self.rest_s) < self.best_s:
            self.finish_s = [0.0] * problem.num_ops
            self.waiting = [len(preds) for preds in problem.preds]
            self._order([], [0.0] * problem.num_devices, 0.0)

    def _order(self, order: list[int], free_s: list[float], last_s: float) -> None:
        """Try every next op that starts no earlier than the last one did."""
        problem, devices = self.problem, self.devices
        if len(order) == problem.num_ops:
            if max(free_s) < self.best_s:
                self.best, self.best_s = (list(devices), list(order)), max(free_s)
            return
        self.watch()
        if max(map(add, free_s, self.left_s)) >= self.best_s:
            return
        for op in range(problem.num_ops):
            if self.waiting[op] or op in order:
                continue
            device = devices[op]
            arrivals = [
                self.finish_s[source] + seconds[devices[source]][device]
                for source, seconds in problem.preds[op]
            ]
            start_s = max([free_s[device], problem.ready_s[op][device], *arrivals])
            if start_s < last_s or start_s + self.rest_s[op] >= self.best_s:
                continue
            before_s, left_s = free_s[device], self.left_s[device]
            seconds = problem.seconds[op][device]
            free_s[device] = self.finish_s[op] = start_s + seconds
            self.left_s[device] -= seconds
            for target, _ in problem.succs[op]:
                self.waiting[target] -= 1
            self._order([*order, op], free_s, start_s)
            for target, _ in problem.succs[op]:
                self.waiting[target] += 1
            free_s[device], self.left_s[device] = before_s, left_s
