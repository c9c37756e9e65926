"""DynPartition's scheduler, for comparison: one file, read end to end.

Built as its report describes it (CMU 15-712, "DynPartition"): a *bandit*. It looks at the tree once
and chooses a device for every op at once; there is no second look.

    state    ops in in-order, 128 at most; each a sinusoidal embedding (32 wide) of its position,
             depth, parent's position and whether it is a leaf, averaged; zeros beyond the tree
    network  4096 -> 16 -> 16 -> 16 -> 128 * devices, ReLU
    value    Q(tree, devices) = the sum of each op's value for its device
    choice   the best device of every op, and with chance 0.05 any device
    learning regression of minus the makespan on Q; replay of 50,000, batches of 32, Adam 5e-4

Two places differ from its code, both in its favour: the parent feature is the parent's position
(the code has the op's own), and slots beyond the tree do not count in Q. It knows a fixed number of
devices, no costs and no transfers, so it has to be trained again for every machine.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from torchweft.errors import PlacementError
from torchweft.placement.placement import Placement, placed
from torchweft.placement.problem import Problem

MAX_OPS, WIDTH = 128, 32
EPSILON, BATCH, REPLAY, RATE = 0.05, 32, 50_000, 5e-4


class Bandit(nn.Module):
    """The network, its replay and its optimizer, for one number of devices."""

    def __init__(self, num_devices: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.num_devices, self.draw = num_devices, random.Random(seed)
        sizes = (MAX_OPS * WIDTH, 16, 16, 16)
        layers: list[nn.Module] = []
        for number in range(3):
            layers += [nn.Linear(sizes[number], sizes[number + 1]), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(16, MAX_OPS * num_devices))
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
        self.replay: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=REPLAY)
        self.optimizer = torch.optim.Adam(self.parameters(), RATE)

    def forward(self, states: Tensor) -> Tensor:
        """Values [tree, op, device]."""
        values: Tensor = self.net(states.flatten(-2))
        return values.view(*values.shape[:-1], MAX_OPS, self.num_devices)

    def choose(self, problem: Problem, *, epsilon: float = 0.0) -> tuple[list[int], Tensor, Tensor]:
        """A device for every op; with the state and the choice as tensors for the replay."""
        if problem.num_devices != self.num_devices:
            text = f"this bandit was made for {self.num_devices} devices"
            raise PlacementError(f"dynpartition: {text}; got {problem.num_devices}.")
        order = in_order(problem)
        state = encode(problem, order)
        with torch.no_grad():
            best = self(state).argmax(-1).tolist()
        picked = [
            self.draw.randrange(self.num_devices) if self.draw.random() < epsilon else best[slot]
            for slot in range(len(order))
        ]
        devices = [0] * problem.num_ops
        for slot, op in enumerate(order):
            allowed = problem.allowed[op]
            devices[op] = picked[slot] if picked[slot] in allowed else allowed[0]
        padded = torch.full((MAX_OPS,), -1)
        padded[: len(order)] = torch.tensor([devices[op] for op in order])
        return devices, state, padded

    def learn(self, state: Tensor, chosen: Tensor, reward: float) -> None:
        """Remember one try and take one step on a batch of those remembered."""
        self.replay.append((state, chosen, reward))
        if len(self.replay) < BATCH:
            return
        batch = [self.replay[self.draw.randrange(len(self.replay))] for _ in range(BATCH)]
        states, choices, rewards = zip(*batch, strict=True)
        picked = torch.stack(choices)
        values = self(torch.stack(states)).gather(-1, picked.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        total = (values * (picked >= 0)).sum(-1)
        loss = nn.functional.mse_loss(total, torch.tensor(rewards))
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()

    def plan(
        self, problem: Problem, *, deadline_s: float | None = None, seed: int = 0
    ) -> Placement:
        """The placement that it names: a planner like any other."""
        devices, _, _ = self.choose(problem)
        return placed(problem, devices, range(problem.num_ops))


def train(
    bandit: Bandit,
    problems: Sequence[Problem],
    num_episodes: int,
    measure: Callable[[Problem, list[int]], float] | None = None,
) -> Iterator[float]:
    """Train on problems in turn; yields each try's seconds, by `measure` or as simulated.

    Rewards are minus the seconds in units of the mean of the first tries, raw seconds otherwise.
    """
    unit_s = 0.0
    for episode in range(num_episodes):
        problem = problems[bandit.draw.randrange(len(problems))]
        devices, state, chosen = bandit.choose(problem, epsilon=EPSILON)
        took_s = (
            measure(problem, devices)
            if measure is not None
            else placed(problem, devices, range(problem.num_ops)).makespan_s
        )
        unit_s = unit_s if episode >= BATCH else unit_s + (took_s - unit_s) / (episode + 1)
        bandit.learn(state, chosen, -took_s / (unit_s or 1.0))
        yield took_s


def in_order(problem: Problem) -> list[int]:
    """The ops of a tree in in-order: the first half of what an op reads, the op, the rest.

    Raises `PlacementError` if the problem is not a tree, or has more than 128 ops.
    """
    roots = [op for op, succs in enumerate(problem.succs) if not succs]
    if len(roots) != 1 or any(len(succs) > 1 for succs in problem.succs):
        raise PlacementError(f"dynpartition: problem {problem.name!r} is not a tree.")
    if problem.num_ops > MAX_OPS:
        raise PlacementError(
            f"dynpartition: a tree may have at most {MAX_OPS} ops; got {problem.num_ops}."
        )
    order: list[int] = []
    stack: list[tuple[int, bool]] = [(roots[0], False)]
    while stack:
        op, opened = stack.pop()
        if opened:
            order.append(op)
            continue
        reads = [source for source, _ in problem.preds[op]]
        half = (len(reads) + 1) // 2
        stack += [(child, False) for child in reversed(reads[half:])]
        stack.append((op, True))
        stack += [(child, False) for child in reversed(reads[:half])]
    return order


def encode(problem: Problem, order: Sequence[int]) -> Tensor:
    """The state of a tree [128, 32]."""
    slot = {op: number for number, op in enumerate(order)}
    depth = [0] * problem.num_ops
    for op in reversed(range(problem.num_ops)):
        for target, _ in problem.succs[op]:
            depth[op] = depth[target] + 1
    rows = [
        (
            slot[op],
            depth[op],
            slot[problem.succs[op][0][0]] if problem.succs[op] else 0,
            int(not problem.preds[op]),
        )
        for op in order
    ]
    state = torch.zeros(MAX_OPS, WIDTH)
    state[: len(rows)] = _sinusoids(torch.tensor(rows, dtype=torch.float32)).mean(1)
    return state


def _sinusoids(numbers: Tensor) -> Tensor:
    """Sines and cosines of numbers [..., 32], as positions are embedded in a transformer."""
    rates = 10_000 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    angles = numbers.unsqueeze(-1) * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)
