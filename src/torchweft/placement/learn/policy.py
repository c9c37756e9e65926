"""The `Policy`: a small network that chooses the next (op, device) pair of a rollout.

    op facts --3 rounds over the edges, both ways--> a vector an op  ┐
    device facts --------------------------------> a vector a device ├─> score of a pair
    what the rollout sees of the pair -------------------------------┘   + a line

Nothing in it depends on the number of ops or devices: pairs are scored one by one, and the best of
them goes next. The line is linear in what is seen and starts from `PRIOR`: by rank, where the op
and its slowest follower end first. So an untrained policy is a fair list planner, and training only
has to find what that overlooks. A policy file is data: tensors in a safetensors file, whose header
says in JSON of which version and size they are.

Rollouts score with numpy (`Scorer`), which for a few pairs is several times as fast as torch; the
gradient comes from torch, over all steps of a rollout at once. The planners that have a policy, by
default the one that comes with the package:

    learned    one pass, no search: the policy's first choice at every step
    guarded    the same, or the best of single, heft and peft where they are better
    guided     passes with drawn choices and annealing from the best of all, until the deadline;
               never worse than the best of single, heft and peft, either
"""

from __future__ import annotations

import json
import time
from functools import cache, partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from torchweft.errors import PlacementError, clip
from torchweft.files import read_bytes, write_bytes
from torchweft.placement.learn.rollout import (
    FACTS,
    NUM_DEVICE_FACTS,
    NUM_OP_FACTS,
    Bools,
    Floats,
    Ints,
    Numbers,
    Observed,
    Rollout,
    numbers_of,
)
from torchweft.placement.placement import OpenDevices, Placement, best, pack, placed
from torchweft.placement.planners.annealing import annealing
from torchweft.placement.planners.lists import (
    best_quick,
    cuts,
    guard,
    put_all_on,
    ranked,
    upward_ranks,
)
from torchweft.placement.planners.planner import Planner
from torchweft.placement.problem import Problem

VERSION = 2
MAX_SIZE = 256
POLICIES = Path(__file__).parent / "policies"
NUM_TRIES = 16
SEARCH_S = 0.1
DRAWN_SHARE = 0.3
"""Of the time of a guided search: for drawn passes; the rest is annealing."""
PRIOR = {
    "regret of its end": -10.0, "regret ahead": -12.0, "ahead against the last": -2.0,
    "urgency ahead": -11.0, "urgency by rank": 16.0, "tail": -2.0,
}  # fmt: skip
"""Steep enough that drawn passes are about as good as the pass by first choices."""
FORBIDDEN = -1e9


class Policy(nn.Module):
    """Scores pairs. `sizes`: of the vectors inside, of an op's, of a device's, of the scorer's."""

    def __init__(self, sizes: tuple[int, int, int, int] = (32, 16, 8, 32)) -> None:
        super().__init__()
        self.sizes = sizes
        inside, op, device, hidden = sizes
        self.facts = nn.Linear(NUM_OP_FACTS, inside)
        self.own, self.after, self.before = (
            nn.ModuleList(nn.Linear(inside, inside) for _ in range(3)) for _ in range(3)
        )
        self.op = nn.Linear(inside, op)
        self.device = nn.Sequential(
            nn.Linear(NUM_DEVICE_FACTS, 16), nn.ReLU(), nn.Linear(16, device)
        )
        self.pair = nn.Linear(len(FACTS) + op + device, hidden)
        self.again = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1, bias=False)
        self.line = nn.Linear(len(FACTS), 1, bias=False)
        nn.init.zeros_(self.score.weight)
        with torch.no_grad():
            self.line.weight.copy_(torch.tensor([[PRIOR.get(fact, 0.0) for fact in FACTS]]))

    def encode(self, numbers: Numbers) -> tuple[Tensor, Tensor]:
        """Vectors of all rows of the numbers, and of all devices of each problem."""
        vectors = torch.relu(self.facts(torch.from_numpy(numbers.op_facts)))
        source, target = torch.from_numpy(numbers.edges)
        one = torch.ones(len(source), 1)
        after = torch.zeros(len(vectors), 1).index_add_(0, source, one).clamp_(min=1)
        before = torch.zeros(len(vectors), 1).index_add_(0, target, one).clamp_(min=1)
        for own, behind, ahead in zip(self.own, self.after, self.before, strict=True):
            none = torch.zeros_like(vectors)
            followers = none.index_add(0, source, vectors[target]) / after
            makers = none.index_add(0, target, vectors[source]) / before
            vectors = vectors + torch.relu(own(vectors) + behind(followers) + ahead(makers))
        return self.op(vectors), self.device(torch.from_numpy(numbers.device_facts))

    def forward(self, facts: Tensor, op: Tensor, device: Tensor, mask: Tensor) -> Tensor:
        """Scores [..., candidate * device] of pairs from their facts and vectors."""
        shape = facts.shape[:-1]
        both = op.unsqueeze(-2).expand(*shape, -1), device.unsqueeze(-3).expand(*shape, -1)
        hidden = torch.relu(self.pair(torch.cat((facts, *both), -1)))
        scores: Tensor = self.score(hidden + torch.relu(self.again(hidden))) + self.line(facts)
        return scores.squeeze(-1).masked_fill(~mask, FORBIDDEN).flatten(-2)

    def save(self, path: str | Path, **notes: object) -> None:
        """Write the policy; `notes` (plain data) say how it was made."""
        header = {"weft_policy": VERSION, "sizes": self.sizes, "notes": notes}
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        write_bytes(path, save(tensors, {"weft": json.dumps(header)}))

    @staticmethod
    def load(path: str | Path) -> Policy:
        """Read a policy. Raises `PlacementError` for a file that is none."""
        tensors, header = read_tensors(path, "policy")
        sizes = header.get("sizes")
        if (
            header.get("weft_policy") != VERSION
            or not isinstance(sizes, list)
            or len(sizes) != 4
            or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes)
        ):
            raise PlacementError(f"file: {path} is not a policy of version {VERSION}.", rule="file")
        policy = Policy((sizes[0], sizes[1], sizes[2], sizes[3]))
        wanted = {name: tensor.shape for name, tensor in policy.state_dict().items()}
        if {name: tensor.shape for name, tensor in tensors.items()} != wanted or not all(
            tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in tensors.values()
        ):
            raise PlacementError(f"file: the tensors of policy {path} do not fit.", rule="file")
        policy.load_state_dict(tensors)
        return policy


def read_tensors(path: str | Path, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and what its header says of ours.

    Raises `PlacementError` for a file that is none.
    """
    data = read_bytes(path, PlacementError, what)
    try:
        tensors = load(data)
        start, size = 8, int.from_bytes(data[:8], "little")
        notes = json.loads(data[start : start + size]).get("__metadata__") or {}
        header = json.loads(notes.get("weft", "{}"))
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as cause:
        raise PlacementError(f"file: {path} is not a {what}: {clip(cause)}.", rule="file") from None
    return tensors, header if isinstance(header, dict) else {}


class Scorer:
    """A policy for the problems of some numbers, without gradients."""

    def __init__(self, policy: Policy, numbers: Numbers) -> None:
        with torch.no_grad():
            op, device = policy.encode(numbers)
            facts, ops = len(FACTS), op.shape[-1]
            weight = policy.pair.weight
            self.weight: Floats = weight[:, :facts].contiguous().numpy()
            pair = op @ weight[:, facts : facts + ops].T + policy.pair.bias
            self.op: Floats = pair.T.contiguous().numpy()
            device = device @ weight[:, facts + ops :].T
            self.device: Floats = device.permute(2, 1, 0).contiguous().numpy()
            self.again: Floats = policy.again.weight.numpy()
            self.bias: Floats = policy.again.bias[:, None].numpy()
            self.score: Floats = policy.score.weight[0].numpy()
            self.line: Floats = policy.line.weight[0].numpy()

    def __call__(self, rollout: Rollout, seen: Observed) -> Floats:
        """Scores [try, candidate * device] of what a rollout sees."""
        facts = seen.facts.transpose(3, 2, 0, 1)  # as they lie in memory
        rows = seen.ops + rollout.static[:, None]
        flat_facts = facts.reshape(len(facts), -1)
        hidden = (self.weight @ flat_facts).reshape(-1, *facts.shape[1:])
        hidden += self.op.take(rows, 1)[:, None]
        hidden += self.device.take(rollout.problem, 2)[..., None]
        np.maximum(hidden, 0, out=hidden)
        flat = hidden.reshape(len(hidden), -1)
        more = self.again @ flat
        more += self.bias
        np.maximum(more, 0, out=more)
        more += flat
        scores = (self.score @ more + self.line @ flat_facts).reshape(facts.shape[1:])
        return masked(scores.transpose(1, 2, 0), seen.mask)


def masked(scores: Floats, mask: Bools) -> Floats:
    """Scores with those of forbidden pairs far below all others, pairs in one axis."""
    if not mask.all():
        scores = np.where(mask, scores, np.float32(FORBIDDEN))
    return scores.reshape(len(scores), -1)


@cache
def default_policy() -> Policy:
    """The policy that planners take without one of the user's own."""
    return Policy.load(POLICIES / "seed0.safetensors")


def learned(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    policy: Policy | None = None,
) -> Placement:
    """One pass of a policy over the problem."""
    numbers = numbers_of([problem])
    return one_pass(problem, numbers, Scorer(policy or default_policy(), numbers))


def guarded(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    policy: Policy | None = None,
) -> Placement:
    """One pass of a policy, or the best of single, heft and peft."""
    return best([learned(problem, policy=policy), guard(problem)])


def guided(
    problem: Problem,
    *,
    deadline_s: float | None = None,
    seed: int = 0,
    policy: Policy | None = None,
) -> Placement:
    """A search that a policy guides; without a deadline a tenth of a second."""
    began_s, budget_s = time.perf_counter(), SEARCH_S if deadline_s is None else deadline_s
    numbers = numbers_of([problem])
    scorer = Scorer(policy or default_policy(), numbers)
    known = best([one_pass(problem, numbers, scorer), best_quick(problem, began_s + budget_s)])
    draw = np.random.default_rng(seed)
    last_s = time.perf_counter() - began_s
    while problem.free and time.perf_counter() - began_s + last_s < DRAWN_SHARE * budget_s:
        turn_s = time.perf_counter()
        rollout = Rollout(numbers, NUM_TRIES)
        while rollout.going:
            scores = scorer(rollout, rollout.look())
            rollout.put((scores + draw.gumbel(size=scores.shape)).argmax(1))
        known = best([known, _of_try(problem, rollout, int(rollout.end_s.argmin()))])
        last_s = time.perf_counter() - turn_s
    left_s = budget_s - (time.perf_counter() - began_s)
    return annealing(problem, deadline_s=left_s, seed=seed, start=known) if left_s > 0 else known


def planner_of(policy: Policy, planner: Planner = learned) -> Planner:
    """A planner of this file with a policy of the user's own."""
    return update_wrapper(partial(planner, policy=policy), planner)  # type: ignore[call-arg]


def one_pass(problem: Problem, numbers: Numbers, scorer: Scorer) -> Placement:
    """The placement by the best-scored pair at every step, within memory and groups."""
    rollout = Rollout(numbers)
    room = OpenDevices(problem) if problem.limited or problem.together else None
    while rollout.going:
        seen = rollout.look()
        scores = scorer(rollout, seen)
        if room is not None:
            mask = seen.mask & with_room(room, seen, numbers.num_devices)
            if not mask.any():
                order = ranked(problem, upward_ranks(problem))
                return put_all_on(problem, order, pack(problem))
            scores = masked(scores.reshape(mask.shape), mask)
        rollout.put(scores.argmax(1))
        if room is not None:
            room.take(int(rollout.order[-1][0]), int(rollout.device[-1][0]))
    return _of_try(problem, rollout, 0)


def with_room(room: OpenDevices, seen: Observed, num_devices: int) -> Bools:
    """Which pairs of a single try have room for the op and its group [1, candidate, device]."""
    mask = np.zeros((1, seen.ops.shape[1], num_devices), np.bool_)
    for at, op in enumerate(seen.ops[0].tolist()):
        mask[0, at, list(room.open(op))] = True
    return mask


def _of_try(problem: Problem, rollout: Rollout, number: int) -> Placement:
    """The placement of a try: as it was put, or with gaps filled if that is better. For a stream
    the order counts more than the devices: consecutive ops may be better on one device."""
    order, devices = orders(rollout, number)
    placements = [placed(problem, devices, order), put_all_on(problem, order, devices)]
    if problem.objective == "throughput":
        placements += [put_all_on(problem, order, cut) for cut in cuts(problem, order)]
    return best(placements)


def orders(rollout: Rollout, number: int) -> tuple[list[int], list[int]]:
    """The order in which a try's ops run, and the device of each op."""
    steps: Ints = np.stack(rollout.order)[:, number]
    where: Ints = np.stack(rollout.device)[:, number]
    of, num_ops = rollout.problem[number], rollout.num_ops[number]
    order = steps[:num_ops].tolist()  # what is put behind them is the dummy
    devices = [0] * num_ops
    for op, device in zip(order, where[:num_ops].tolist(), strict=True):
        devices[op] = device
    return order[::-1] if rollout.numbers.turned[of] else order, devices
