"""REINFORCE: the loss and the step by which a policy learns from passes drawn over problems.

    problems --drawn passes--> shorter or longer than their problem's mean --reinforce--> loss
    loss --descend--> the policy's next weights

Training, fine-tuning and the learner beside a served model all take these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from torchweft.placement.learn.numbers import Bools, Ints, numbers_of
from torchweft.placement.learn.policy import Policy, Scorer
from torchweft.placement.learn.rollout import Observed, Rollout
from torchweft.placement.problem import Problem

MAX_NORM = 1.0


Decision = tuple[Observed, Ints, Bools]
"""One choice of every try: what was seen, what was chosen, in which tries it counts."""


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
    facts, mask = (
        kept([seen.facts for seen, _, _ in made]),
        kept([seen.mask for seen, _, _ in made]),
    )
    chance = torch.log_softmax(policy(facts, op[rows], devices, mask), -1)
    chosen = chance.gather(-1, kept(choices)[:, None]).squeeze(-1)
    return -(chosen * weight[which]).mean()


def descend(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of the optimizer."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
    optimizer.step()
