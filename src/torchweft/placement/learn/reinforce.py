"""REINFORCE: the loss and the step by which a policy learns from passes drawn over problems.

    problems --drawn passes--> shorter or longer than their problem's mean --reinforce--> loss
    loss --descend--> the policy's next weights

Training, fine-tuning and the learner beside a served model all take these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.placement.learn.numbers import Bools, Ints, numbers_of
from torchweft.placement.learn.policy import Policy, Scorer
from torchweft.placement.learn.rollout import Observed, Rollout
from torchweft.placement.problem import Problem

MAX_NORM = 1.0


class Decisions(NamedTuple):
    """Choices made in a rollout: what was seen, what was chosen, in which tries it counts."""

    seen: list[Observed]
    chosen: list[Ints]
    counts: list[Bools]

    def add(self, seen: Observed, chosen: Ints, counts: Bools) -> None:
        """Note one choice of every try."""
        self.seen.append(seen)
        self.chosen.append(chosen)
        self.counts.append(counts)


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
    made = Decisions([], [], [])
    while rollout.going:
        seen = rollout.look()
        scores = scorer(rollout, seen)
        chosen = (scores + generator.gumbel(size=scores.shape)).argmax(1)
        made.add(seen, chosen, rollout.live)
        rollout.put(chosen)
    took = torch.from_numpy(rollout.end_s).view(-1, num_tries)
    mean = took.mean(1, keepdim=True)
    gain = ((mean - took) / mean).flatten()
    gain = (gain / (gain.std() + 1e-6)).clamp(-3, 3)
    return weighted_loss(policy, rollout, made, gain)


def weighted_loss(policy: Policy, rollout: Rollout, made: Decisions, weight: Tensor) -> Tensor:
    """Minus the mean log-chance of the decisions, each times the weight of its try."""
    op, device = policy.encode(rollout.numbers)
    counts = torch.from_numpy(np.stack(made.counts))
    which = torch.arange(counts.shape[1]).expand_as(counts)[counts]

    def kept(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.stack(arrays))[counts]

    rows = kept([seen.ops + rollout.static[:, None] for seen in made.seen])
    devices = device[torch.from_numpy(rollout.problem)][which]
    facts, mask = kept([s.facts for s in made.seen]), kept([s.mask for s in made.seen])
    chance = torch.log_softmax(policy(facts, op[rows], devices, mask), -1)
    chosen = chance.gather(-1, kept(made.chosen)[:, None]).squeeze(-1)
    return -(chosen * weight[which]).mean()


def descend(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimizer."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
    optimizer.step()
