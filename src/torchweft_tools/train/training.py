"""Training: a policy learns on drawn problems, first from the best classical plans, then by trying.

    1. imitation      the pairs that the best of several classical placements put, one by one
    2. reinforcement  several drawn passes over each problem; those shorter than their mean are
                      made more likely, the others less (REINFORCE with the problem's own mean)
    3. fine-tuning    the same on the user's own problems, with costs as they were measured

Each step of the loop draws new problems from its own number, so an interrupted run can be resumed,
and equal seeds give equal policies on one machine. No wall clock decides anything.

After stage 2, the policy that is best on held-out problems, which it never learns from, is kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import PlacementError, clip
from torchweft.placement.learn.learner import (
    Decision,
    descend,
    one_thread,
    reinforce,
    weighted_loss,
)
from torchweft.placement.learn.policy import Policy, Scorer
from torchweft.placement.learn.rollout import Bools, Ints, Observed, Rollout, numbers_of
from torchweft.placement.placement import Placement
from torchweft.placement.planners.annealing import annealing
from torchweft.placement.planners.lists import heft, peft
from torchweft.placement.problem import Problem
from torchweft_tools.formats.read_trees import Tree
from torchweft_tools.train.cases import draw_case

HELD_OUT = 1_000_000_007
"""Added to the seed for held-out problems."""
NUM_HELD_OUT = 160
HELD_OUT_RATIOS = (0.3, 1.0, 3.0, 0.0)
NUM_TAUGHT = 4
"""How many of a step's problems the teacher plans, which takes long."""


LIMITS = {
    "num_imitation": (0, 10**9), "num_steps": (0, 10**9), "seed": (0, 2**62),
    "num_problems": (1, 10**4), "num_tries": (1, 10**4), "rate": (0.0, 1.0),
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How to train. `num_imitation` and `num_steps` count steps of the loop in stages 1 and 2.

    Raises `PlacementError` for numbers out of range.
    """

    num_imitation: int
    num_steps: int
    seed: int = 0
    num_problems: int = 16
    num_tries: int = 12
    rate: float = 3e-3
    trees: tuple[Tree, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            number = getattr(self, name)
            if not least <= number <= most:  # also true of NaN
                text = f"{name} must be a number from {least} to {most}; got {clip(number)}."
                raise PlacementError(f"train: {text}", rule="train")


class Point(NamedTuple):
    """One point of the curve: after so many steps, mean makespan on the problems set aside, as a
    ratio to the better of heft and peft; the worst; and the same with the guard."""

    stage: str
    step: int
    mean: float
    worst: float
    guarded: float


class Yardstick:
    """Problems set aside, with the better of heft and peft on each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.numbers = numbers_of(problems)
        self.best_s = np.array([min(heft(p).score_s, peft(p).score_s) for p in problems])

    def measure(self, policy: Policy, stage: str, step: int) -> Point:
        """A point of the curve."""
        rollout, scorer = Rollout(self.numbers), Scorer(policy, self.numbers)
        while rollout.going:
            rollout.put(scorer(rollout, rollout.look()).argmax(1))
        ratio = rollout.makespan_s / self.best_s
        mean, worst = float(ratio.mean()), float(ratio.max())
        return Point(stage, step, mean, worst, float(np.minimum(ratio, 1).mean()))


def held_out(settings: Settings, num: int = NUM_HELD_OUT) -> Yardstick:
    """Problems that training never draws: also on five devices, at ratios from 0.3 up, and on
    equal processors without transfers."""
    draw = random.Random(settings.seed + HELD_OUT)
    return Yardstick(
        [
            draw_case(
                draw,
                trees=settings.trees,
                num_devices=(2, 3, 5),
                ratio=HELD_OUT_RATIOS[number % len(HELD_OUT_RATIOS)],
            )
            for number in range(num)
        ]
    )


class Trainer:
    """A policy in training. `step` counts the steps done, over both stages."""

    def __init__(self, settings: Settings, policy: Policy | None = None) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.policy = settings, policy or Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), settings.rate)
        self.step = 0

    @property
    def num_steps(self) -> int:
        """How many steps there are in all."""
        return self.settings.num_imitation + self.settings.num_steps

    @property
    def stage(self) -> str:
        """The stage of the next step."""
        early = self.step < self.settings.num_imitation
        return "imitation" if early else "reinforcement"

    @one_thread()
    def advance(self) -> float:
        """One step of the loop on newly drawn problems; its loss."""
        settings = self.settings
        draw = random.Random(settings.seed * 1_000_003 + self.step)
        problems = [draw_case(draw, trees=settings.trees) for _ in range(settings.num_problems)]
        left = 1 - max(0, self.step - settings.num_imitation) / max(1, settings.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.rate * max(0.05, left)
        if self.stage == "imitation":
            loss = imitate(self.policy, problems[:NUM_TAUGHT], self.step)
        else:
            generator = np.random.default_rng([settings.seed, self.step])
            loss = reinforce(self.policy, problems, settings.num_tries, generator)
        descend(self.policy, self.optimizer, loss)
        self.step += 1
        return float(loss.detach())


def fine_tune(
    policy: Policy,
    problems: Sequence[Problem],
    *,
    num_steps: int = 50,
    rate: float = 3e-4,
    seed: int = 0,
    num_problems: int = 8,
    num_tries: int = 12,
) -> Iterator[float]:
    """Stage 3: learn on given problems, in place; yields the loss of each step."""
    optimizer = torch.optim.Adam(policy.parameters(), rate)
    for step in range(num_steps):
        draw = random.Random(seed * 1_000_003 + step)
        chosen = draw.sample(list(problems), min(num_problems, len(problems)))
        generator = np.random.default_rng([seed, step])
        loss = reinforce(policy, chosen, num_tries, generator)
        descend(policy, optimizer, loss)
        yield float(loss.detach())


def imitate(policy: Policy, problems: Sequence[Problem], seed: int) -> Tensor:
    """The loss of not choosing what the best classical placement of each problem has next."""
    numbers = numbers_of(problems)
    rollout = Rollout(numbers)
    scorer = Scorer(policy, numbers)
    teachers = [_teacher(problem, seed) for problem in problems]
    made: list[Decision] = []
    while rollout.going:
        seen = rollout.look()
        wanted, known = _wanted(rollout, seen, teachers)
        made.append((seen, wanted, known & rollout.live))
        rollout.put(np.where(known, wanted, scorer(rollout, seen).argmax(1)))
    return weighted_loss(policy, rollout, made, torch.ones(len(problems)))


def _teacher(problem: Problem, seed: int) -> Placement:
    """The best of the list planners, improved by some annealing."""
    return annealing(problem, seed=seed)


def _wanted(rollout: Rollout, seen: Observed, teachers: Sequence[Placement]) -> tuple[Ints, Bools]:
    """For each try the candidate that its teacher starts first (of a turned problem: ends last), on
    that device; and whether there is one."""
    num_devices = rollout.numbers.num_devices
    wanted = np.zeros(len(teachers), np.int64)
    known = np.zeros(len(teachers), np.bool_)
    for number, teacher in enumerate(teachers):
        turned = rollout.numbers.turned[number]
        turns = [-end_s for end_s in teacher.end_s] if turned else teacher.start_s
        choices = [
            (turns[op], at, teacher.device[op])
            for at, op in enumerate(seen.ops[number].tolist())
            if seen.mask[number, at].any()
        ]
        if choices:
            _, at, device = min(choices)
            wanted[number], known[number] = at * num_devices + device, True
    return wanted, known


def moments(trainer: Trainer) -> dict[str, Tensor]:
    """The state of the optimizer, as tensors by name."""
    state = trainer.optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(tensor).clone()
        for number, entry in state.items()
        for name, tensor in entry.items()
    }


def remember(trainer: Trainer, tensors: dict[str, Tensor]) -> None:
    """Restore the state of the optimizer. Raises `ValueError` if it does not fit the policy."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = tensor
    shapes = [parameter.shape for parameter in trainer.policy.parameters()]
    wanted = {
        number: {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}
        for number, shape in enumerate(shapes if state else ())
    }
    given = {at: {name: item.shape for name, item in entry.items()} for at, entry in state.items()}
    if given != wanted or not all(
        item.dtype == torch.float32 and item.isfinite().all() for item in tensors.values()
    ):
        raise ValueError("the state of the optimizer does not fit the policy")
    whole = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict({**whole, "state": state})
