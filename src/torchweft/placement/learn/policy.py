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
gradient comes from torch, over all steps of a rollout at once.
"""

from __future__ import annotations

import json
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
    Numbers,
    Observed,
    Rollout,
)

VERSION = 2
MAX_SIZE = 256
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
