"""Tree DP: the optimal placement of a tree, by dynamic programming over sets of finished ops.

    state     which ops are done; for each device when it is free; for each done op that is still to
              be read (its reader is not done): its device and its end
    step      any op whose inputs are done goes to the end of any device's queue
    dominance of two states with the same ops done and the same devices, one that is nowhere later
              makes the other useless

In a tree each op is read once, so what a state must remember is short: that is why this works for
trees and not for graphs. States that cannot beat the best placement known are dropped (`tails` and
loads); if none is left, that one is optimal. The number of states still grows fast, so passes of
growing width keep only the most promising ones; the last pass keeps all, and its answer is proven.
The better the placement known at the start, the fewer states: it begins with a little annealing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchweft.errors import PlacementError
from torchweft.placement.placement import Placement, best, placed
from torchweft.placement.planners.annealing import annealing
from torchweft.placement.planners.lists import upward_ranks
from torchweft.placement.problem import Problem, speeds, tails

WIDTHS = (4, 16, 64, 256, 1024)
DEFAULT_S = 1.0
WARM_S = 2e-3  # an op
MAX_STATES = 200_000


class _TreeState(NamedTuple):
    """`open`: the done ops to be read, (op, device, end); `before`: the state one step back."""

    path_s: float  # no answer from here ends sooner, by paths, and by loads
    load_s: float
    done: int  # a bit for each op
    free_s: tuple[float, ...]
    open: tuple[tuple[int, int, float], ...]
    left_s: float  # weighted work still to do
    op: int
    device: int
    before: _TreeState | None


def fits(problem: Problem) -> bool:
    """Whether this is a tree (every op is read once at most) without limits, for latency."""
    tree = all(len(succs) <= 1 for succs in problem.succs)
    return tree and problem.free and problem.objective == "latency"


def tree_dp(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    start: Placement | None = None,
) -> Placement:
    """The optimal placement of a tree, or the best found by the deadline (1 s if there is none).

    Raises `PlacementError` for a problem that does not fit.
    """
    if not fits(problem):
        raise PlacementError(
            "tree: tree-dp takes trees, where every op is read by one op at most, for latency, "
            f"without memory limits and groups; got {problem}. Use portfolio.",
            rule="tree",
        )
    deadline_s = DEFAULT_S if deadline_s is None else deadline_s
    ends_s = time.perf_counter() + deadline_s
    warm_s = min(deadline_s / 4, WARM_S * problem.num_ops)
    known = start or annealing(problem, deadline_s=warm_s, seed=seed)
    search = _TreeSearch(problem, known.score_s, ends_s)
    proven = False
    try:
        for width in (*WIDTHS, MAX_STATES):
            better, proven = search.sweep(width)
            known = best([better or known, known])
            if proven:
                break
    except TimeoutError:
        pass
    return placed(problem, known.device, known.order, bound_s=known.score_s if proven else None)


class _TreeSearch:
    """Sweeps over all states, level by level; a level is how many ops are done."""

    def __init__(self, problem: Problem, best_s: float, ends_s: float) -> None:
        self.problem, self.best_s, self.ends_s = problem, best_s, ends_s
        self.tails = tails(problem)
        self.preds = [sum(1 << source for source, _ in preds) for preds in problem.preds]
        rank = upward_ranks(problem)
        self.by_rank = sorted(range(problem.num_ops), key=lambda op: -rank[op])
        weights = speeds(problem)
        whole = sum(weights)
        self.weights = [w / whole if whole else 1 / len(weights) for w in weights]
        self.least = [
            min(row[d] * self.weights[d] for d in problem.allowed[op])
            for op, row in enumerate(problem.seconds)
        ]

    def sweep(self, width: int) -> tuple[Placement | None, bool]:
        """The best placement better than any before, and whether nothing was left out."""
        problem, proven = self.problem, True
        free_s = (0.0,) * problem.num_devices
        states = [_TreeState(0.0, 0.0, 0, free_s, (), sum(self.least), -1, -1, None)]
        most_ready = None if width == MAX_STATES else max(3, width // 8)
        for _ in range(problem.num_ops):
            fronts: dict[tuple[int, tuple[tuple[int, int], ...]], list[_TreeState]] = {}
            for state in states:
                if time.perf_counter() > self.ends_s:
                    raise TimeoutError
                ready = self._ready(state.done)
                if most_ready is not None and len(ready) > most_ready:
                    ready, proven = ready[:most_ready], False
                for new in self._next(state, ready):
                    key = new.done, tuple((op, device) for op, device, _ in new.open)
                    _join(fronts.setdefault(key, []), new)
            states = sorted(
                (state for front in fronts.values() for state in front),
                key=lambda state: (max(state.path_s, state.load_s), max(state.free_s)),
            )
            if len(states) > width:
                states, proven = states[:width], False
        if not states:
            return None, proven
        self.best_s = max(states[0].free_s)
        return self._placement(states[0]), proven

    def _ready(self, done: int) -> list[int]:
        return [
            op
            for op in self.by_rank
            if not done >> op & 1 and self.preds[op] & done == self.preds[op]
        ]

    def _next(self, state: _TreeState, ready: Sequence[int]) -> Iterator[_TreeState]:
        """The states one op further that could still be better than the best."""
        problem, where = self.problem, {op: (device, end) for op, device, end in state.open}
        base_s = sum(w * f for w, f in zip(self.weights, state.free_s, strict=True)) + state.left_s
        for op in ready:
            sources = [(*where[source], seconds) for source, seconds in problem.preds[op]]
            read = {source for source, _ in problem.preds[op]}
            rest = [item for item in state.open if item[0] not in read]
            for device in problem.allowed[op]:
                at_s = max(state.free_s[device], problem.ready_s[op][device])
                for source_device, there_s, seconds in sources:
                    at_s = max(at_s, there_s + seconds[source_device][device])
                end_s = at_s + problem.seconds[op][device]
                load_s = base_s - self.least[op]
                load_s += self.weights[device] * (end_s - state.free_s[device])
                path_s = max(state.path_s, end_s + self.tails[op][device])
                if max(path_s, load_s) >= self.best_s * (1 - 1e-12):
                    continue
                free_s = (*state.free_s[:device], end_s, *state.free_s[device + 1 :])
                fresh = [(op, device, end_s)] if problem.succs[op] else []
                still_open = tuple(sorted([*rest, *fresh]))
                left_s = state.left_s - self.least[op]
                done = state.done | 1 << op
                yield _TreeState(
                    path_s, load_s, done, free_s, still_open, left_s, op, device, state
                )

    def _placement(self, state: _TreeState) -> Placement:
        order, devices = [], [0] * self.problem.num_ops
        step: _TreeState | None = state
        while step is not None and step.op >= 0:
            order.append(step.op)
            devices[step.op] = step.device
            step = step.before
        return placed(self.problem, devices, order[::-1])


def _join(front: list[_TreeState], new: _TreeState) -> None:
    """Put a state into its front unless another is nowhere later; drop those it makes useless."""
    if any(_no_later(old, new) for old in front):
        return
    front[:] = [old for old in front if not _no_later(new, old)]
    front.append(new)


def _no_later(a: _TreeState, b: _TreeState) -> bool:
    return all(x <= y for x, y in zip(a.free_s, b.free_s, strict=True)) and all(
        x[2] <= y[2] for x, y in zip(a.open, b.open, strict=True)
    )
