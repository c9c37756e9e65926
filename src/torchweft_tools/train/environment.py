"""The environment: placing one problem as a `gymnasium` game, one op per step.

    observation   facts of the (candidate, device) pairs, and which of them may be chosen
    action        candidate * max_devices + device
    reward        0, and at the end how much shorter the placement is than heft's, as a share

It is deterministic: `reset(seed=...)` draws the problem, and nothing in `step` looks at a clock.
Pairs without room for the op are masked, as are those that do not exist; an action that the mask
forbids ends the game with the reward `FORBIDDEN`. It needs gymnasium: `torchweft[learn]`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from torchweft.errors import PlacementError
from torchweft.placement.learn.policy import orders, with_room
from torchweft.placement.learn.rollout import (
    FACTS,
    LIMIT,
    NUM_CANDIDATES,
    Bools,
    Ints,
    Rollout,
    numbers_of,
)
from torchweft.placement.placement import OpenDevices, Placement, placed
from torchweft.placement.planners.lists import heft
from torchweft.placement.problem import Problem
from torchweft_tools.train.cases import draw_case

FORBIDDEN = -1.0
Observation = dict[str, npt.NDArray[Any]]


class PlacementEnv(gymnasium.Env[Observation, np.int64]):
    """A game of placing. draw: makes the next problem from a `random.Random`."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(
        self,
        draw: Callable[[random.Random], Problem] = draw_case,
        *,
        max_devices: int = 5,
        render_mode: str | None = None,
    ) -> None:
        self.draw, self.max_devices, self.render_mode = draw, max_devices, render_mode
        num_pairs = NUM_CANDIDATES * max_devices
        limit = float(LIMIT)
        space: Any = spaces.Dict(
            {
                "facts": spaces.Box(-limit, limit, (num_pairs, len(FACTS)), np.float32),
                "mask": spaces.MultiBinary(num_pairs),
            }
        )
        self.observation_space = space
        self.action_space = spaces.Discrete(num_pairs)
        self.problem: Problem | None = None
        self.placement: Placement | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start over with a new problem, or with `options["problem"]`."""
        super().reset(seed=seed)
        given = (options or {}).get("problem")
        self.problem = given or self.draw(random.Random(int(self.np_random.integers(2**63))))
        if self.problem.num_devices > self.max_devices:
            text = f"problem {self.problem.name!r} has {self.problem.num_devices} devices"
            raise PlacementError(f"environment: {text}; max_devices is {self.max_devices}.")
        self.heft_s = heft(self.problem).score_s
        self.rollout, self.room = Rollout(numbers_of([self.problem])), OpenDevices(self.problem)
        self.placement = None
        return self._look(), {"heft_s": self.heft_s}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Put an op on a device."""
        if self.problem is None or self.placement is not None:
            raise PlacementError("environment: the game is over; call reset() first.")
        at, device = divmod(int(action), self.max_devices)
        if not self.mask.any() or not self.mask[int(action)]:
            return self._look(), FORBIDDEN, True, False, {"why": "the mask forbids this pair"}
        self.rollout.put(np.array([at * self.problem.num_devices + device]))
        self.room.take(int(self.rollout.order[-1][0]), device)
        if self.rollout.going:
            seen = self._look()
            stuck = not self.mask.any()  # no device has room for any op that is ready
            why = {"why": "memory has run out"} if stuck else {}
            return seen, FORBIDDEN if stuck else 0.0, stuck, False, why
        order, devices = orders(self.rollout, 0)
        self.placement = placed(self.problem, devices, order)
        reward = 1 - self.placement.score_s / self.heft_s if self.heft_s else 0.0
        return self._blank(), reward, True, False, {"score_s": self.placement.score_s}

    def action_masks(self) -> Bools:
        """Which actions may be chosen now, by the name that maskable agents look for."""
        return self.mask

    def render(self) -> str | None:
        """The placement as text, once the game is over."""
        return str(self.placement) if self.placement is not None else None

    def _blank(self) -> Observation:
        num_pairs = NUM_CANDIDATES * self.max_devices
        self.mask: Bools = np.zeros(num_pairs, np.bool_)
        facts = np.zeros((num_pairs, len(FACTS)), np.float32)
        return {"facts": facts, "mask": self.mask.astype(np.int8)}

    def _look(self) -> Observation:
        """The pairs to choose from; the space has an entry for every possible pair."""
        assert self.problem is not None, "there is a problem after a reset"
        blank, seen = self._blank(), self.rollout.look()
        allowed = (seen.mask & with_room(self.room, seen, self.problem.num_devices))[0]
        num_candidates, num_devices = allowed.shape
        where: Ints = np.arange(num_candidates)[:, None] * self.max_devices + np.arange(num_devices)
        blank["facts"][where] = seen.facts[0]
        self.mask[where] = allowed
        return {"facts": blank["facts"], "mask": self.mask.astype(np.int8)}
