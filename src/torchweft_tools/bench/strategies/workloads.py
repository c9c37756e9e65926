"""What each published strategy is raced on: a home, where it should be ahead of a sequential run
and of plain overlap, and a workload where it should not help.

    WORKLOADS["tokenweave"]      [RacedWorkload(tokenweave(), "sharded", (16, 64), home=True), ...]

To add a strategy, add its two workloads here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchweft.plan.strategies import (
    comet,
    compose,
    dual_batch,
    multiplex,
    nanoflow,
    overlap,
    pipeline,
    prefetch,
    single_batch,
    tokenweave,
    ulysses,
)
from torchweft.plan.write.strategy import Strategy
from torchweft_tools.bench.peers.models import Dense, MoE, Sizes
from torchweft_tools.bench.strategies.models import Local, Sharded, SharedMoE, Tailed
from torchweft_tools.bench.strategies.split_models import Pipelined, Ulysses

SIZES = {
    "full": Sizes(num_layers=4, hidden=512, wide=1024),
    "tiny": Sizes(num_layers=2, hidden=64, wide=96, head=16),
}
MODELS: dict[str, Callable[..., nn.Module]] = {
    "dense": Dense,
    "experts": MoE,
    "shared": SharedMoE,
    "sharded": Sharded,
    "tailed": Tailed,
    "local": Local,
    "sequence": Ulysses,
    "stages": Pipelined,
}


@dataclass(frozen=True)
class RacedWorkload:
    """A model and a batch, and the strategy with its options."""

    strategy: Strategy
    model: str
    shape: tuple[int, int]
    """Sequences and positions."""
    home: bool
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a host would tell, by `weft.context`."""
    lanes: int = 1
    on_disk: bool = False
    """Whether the weights are on disk; every program reads them there at each call."""

    @property
    def name(self) -> str:
        """The model and its batch."""
        told = " ".join(map(str, self.facts.values())) if "phase" in self.facts else ""
        return f"{self.model} {'x'.join(map(str, self.shape))} {told}".strip()


MIXED = {"tokens_per_request": [*([1] * 64), 192]}
DECODE = {"phase": "decode"}
ROUGH = nanoflow(shares=(1, 2, 2, 1), compute=4, memory=4, network=4)
BY_PHASE = compose(phases={"decode": "sequential"})
WORKLOADS = {
    "nanoflow": [
        RacedWorkload(ROUGH, "dense", (24, 64), home=True),
        RacedWorkload(ROUGH, "dense", (8, 1), home=False, facts=DECODE),
    ],
    "single_batch": [
        RacedWorkload(single_batch, "shared", (1, 64), home=True),
        RacedWorkload(single_batch, "dense", (4, 64), home=False),
    ],
    "dual_batch": [
        RacedWorkload(dual_batch(), "shared", (8, 64), home=True),
        RacedWorkload(dual_batch(), "shared", (2, 1), home=False, facts=DECODE),
    ],
    "multiplex": [
        RacedWorkload(multiplex(), "dense", (256, 1), home=True, facts=MIXED, lanes=2),
        RacedWorkload(
            multiplex(),
            "dense",
            (64, 1),
            home=False,
            facts={"tokens_per_request": [1] * 64},
            lanes=2,
        ),
    ],
    "comet": [
        RacedWorkload(comet(), "dense", (1, 64), home=True),
        RacedWorkload(comet(), "dense", (8, 1), home=False, facts=DECODE),
    ],
    "prefetch": [
        RacedWorkload(prefetch(), "local", (8, 64), home=True, on_disk=True),
        RacedWorkload(prefetch(), "local", (2, 1), home=False, on_disk=True),
    ],
    "tokenweave": [
        RacedWorkload(tokenweave(), "sharded", (16, 64), home=True),
        RacedWorkload(tokenweave(), "sharded", (8, 1), home=False, facts=DECODE),
    ],
    "compose": [
        RacedWorkload(
            compose(layers={"tail*": "sequential"}, otherwise=overlap(parts=2)),
            "tailed",
            (16, 8),
            home=True,
        ),
        RacedWorkload(BY_PHASE, "dense", (8, 1), home=False, facts=DECODE),
    ],
    "ulysses": [
        RacedWorkload(ulysses(), "sequence", (1, 512), home=True),
        RacedWorkload(ulysses(), "sequence", (1, 1), home=False, facts=DECODE),
    ],
    "pipeline": [
        RacedWorkload(pipeline(parts=4), "stages", (16, 64), home=True),
        RacedWorkload(pipeline(parts=4), "stages", (1, 64), home=False),
    ],
}
