"""The `Learner`: a planner that goes on learning from the inputs it has served.

    learner = Learner(Policy.load("policy.safetensors"))
    placement = plan(problem, learner)       a pass of the policy, or the guard where that is better
    learner.served(rebuild)              an input was served; rebuild() gives its problem again, at
                                         the prices of that later moment
    learner.due and learner.turn()       now and then, between two inputs: some gradient steps
    learner.save("policy.safetensors")

It keeps the last inputs served, replays some of them under the present prices, and makes those
passes likelier that are shorter than the mean of their problem (REINFORCE, as in training). What
it was served counts, not when: the same problems give the same policy, whatever the clock says,
unless `limit_s` cuts a turn short (the steps left out are counted).

The guard is always on: what `plan` gets is never worse than the best of single, heft and peft.

    problems --drawn passes--> shorter or longer than their problem's mean --reinforce--> loss
    loss --descend--> the policy's next weights                       training takes these steps too
"""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.errors import PlacementError
from torchweft.placement.learn.policy import Policy, Scorer, default_policy, learned
from torchweft.placement.learn.rollout import Bools, Ints, Observed, Rollout, numbers_of
from torchweft.placement.placement import Placement, best
from torchweft.placement.planners.lists import guard
from torchweft.placement.problem import Problem

MAX_NORM = 1.0
Decision = tuple[Observed, Ints, Bools]
"""One choice of every try: what was seen, what was chosen, in which tries it counts."""
Rebuild = Callable[[], Problem]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch has one thread here: equal seeds give equal bits, and small sums need not wait."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def reinforce(
    policy: Policy, problems: Sequence[Problem], num_tries: int, generator: np.random.Generator
) -> Tensor:
    """The loss whose gradient makes passes that are shorter than their problem's mean likelier."""
    numbers = numbers_of(problems)
    rollout, scorer = Rollout(numbers, num_tries), Scorer(policy, numbers)
    made: list[Decision] = []
    while rollout.going:
        seen = rollout.look()
        scores = scorer(rollout, seen)
        chosen = (scores + generator.gumbel(size=scores.shape)).argmax(1)
        made.append((seen, chosen, rollout.live))
        rollout.put(chosen)
    took = torch.from_numpy(rollout.end_s).view(-1, num_tries)
    mean = took.mean(1, keepdim=True)
    gain = ((mean - took) / mean).flatten()
    gain = (gain / (gain.std() + 1e-6)).clamp(-3, 3)
    return weighted_loss(policy, rollout, made, gain)


def weighted_loss(
    policy: Policy, rollout: Rollout, made: Sequence[Decision], weight: Tensor
) -> Tensor:
    """Minus the mean log-chance of the decisions, each times the weight of its try."""
    op, device = policy.encode(rollout.numbers)
    looks, choices, counted = zip(*made, strict=True)
    counts = torch.from_numpy(np.stack(counted))
    which = torch.arange(counts.shape[1]).expand_as(counts)[counts]

    def kept(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays))[counts]

    rows = kept([seen.ops + rollout.static[:, None] for seen in looks])
    devices = device[torch.from_numpy(rollout.problem)][which]
    facts, mask = kept([seen.facts for seen in looks]), kept([seen.mask for seen in looks])
    chance = torch.log_softmax(policy(facts, op[rows], devices, mask), -1)
    chosen = chance.gather(-1, kept(choices)[:, None]).squeeze(-1)
    return -(chosen * weight[which]).mean()


def descend(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimizer."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
    optimizer.step()


@dataclass(frozen=True)
class Pace:
    """How a learner learns. every: inputs between two turns; 0: a turn is never due. num_steps:
    gradient steps of a turn, each on `num_problems` replayed inputs, with `num_tries` passes over
    each. limit_s: no further step begins once a turn has taken so long. num_kept: inputs that can
    be replayed."""

    every: int = 20
    num_steps: int = 2
    num_problems: int = 4
    num_tries: int = 16
    rate: float = 3e-3
    limit_s: float = 0.5
    num_kept: int = 128

    def __post_init__(self) -> None:
        counts = (self.every + 1, self.num_steps, self.num_problems, self.num_tries, self.num_kept)
        if min(counts) < 1 or self.num_tries < 2 or not self.rate > 0 or not self.limit_s >= 0:
            cure = "Counts start at 1 (every: 0, tries: 2); rate is above 0, limit_s at least 0."
            raise PlacementError(f"pace: invalid {self}. {cure}", rule="pace")


class Learner:
    """A policy (a copy of the one given) behind its guard, with what it has served."""

    def __init__(
        self, policy: Policy | None = None, pace: Pace | None = None, *, seed: int = 0
    ) -> None:
        self.pace, self.seed = pace or Pace(), seed
        with torch.inference_mode(False):
            self.policy = copy.deepcopy(policy or default_policy())
        self.optimizer = torch.optim.Adam(self.policy.parameters(), self.pace.rate)
        self.past: deque[Rebuild] = deque(maxlen=self.pace.num_kept)
        self.num_served = self.num_learned = self.num_turns = self.num_steps = self.num_cut = 0
        self.num_planned = self.num_guarded = 0
        self.last = 0  # inputs served when the last turn began

    def __call__(
        self, problem: Problem, *, deadline_s: float | None = None, seed: int = 0
    ) -> Placement:
        """A pass of the policy, or the best of single, heft and peft where that is better."""
        alone = self.alone(problem)
        chosen = best([alone, guard(problem)])
        self.num_planned += 1
        self.num_guarded += chosen is not alone
        return chosen

    @property
    def version(self) -> int:
        """Changes whenever the policy has: what it planned before is out of date."""
        return self.num_steps

    def alone(self, problem: Problem) -> Placement:
        """A pass of the policy without the guard, to measure what it has learned."""
        with one_thread():
            return learned(problem, policy=self.policy)

    def served(self, rebuild: Rebuild) -> None:
        """An input was served; `rebuild` gives its problem at the prices of any later moment."""
        self.past.append(rebuild)
        self.num_served += 1

    @property
    def due(self) -> bool:
        """Whether enough inputs were served since the last turn began."""
        return 0 < self.pace.every <= self.num_served - self.last

    def turn(self) -> None:
        """Learn from what was served so far: the gradient steps of one turn."""
        self.last = self.num_served
        if not self.past:
            return
        began_s, pace = time.perf_counter(), self.pace
        for step in range(pace.num_steps):
            if step and time.perf_counter() - began_s > pace.limit_s:
                self.num_cut += pace.num_steps - step
                break
            draw = random.Random(self.seed * 1_000_003 + self.num_steps)
            chosen = draw.sample(self.past, min(pace.num_problems, len(self.past)))
            self._step([rebuild() for rebuild in chosen])
        self.num_turns += 1
        self.num_learned = self.num_served

    def _step(self, problems: Sequence[Problem]) -> None:
        generator = np.random.default_rng([self.seed, self.num_steps])
        with one_thread(), torch.inference_mode(False), torch.enable_grad():
            loss = reinforce(self.policy, problems, self.pace.num_tries, generator)
            if not loss.isfinite():
                text = "the loss of a step is not a finite number; the policy is as it was before."
                raise PlacementError(f"learning: {text}", rule="learning")
            descend(self.policy, self.optimizer, loss)
        self.num_steps += 1

    def save(self, path: str | Path) -> None:
        """Write the policy as it is now, with what it has learned from."""
        notes = {"num_served": self.num_learned, "num_steps": self.num_steps, "seed": self.seed}
        self.policy.save(path, **notes)

    def __str__(self) -> str:
        guard = f"the guard stepped in for {self.num_guarded} of {self.num_planned} plans"
        cut = f", {self.num_cut} more left out for time" if self.num_cut else ""
        steps = f"{self.num_turns} turns, {self.num_steps} steps{cut}"
        return f"learned from {self.num_learned} of {self.num_served} inputs ({steps}); {guard}"
