"""The built-in strategies, one page each. Importing this package registers them."""

from torchweft.plan.strategies.branches import branches
from torchweft.plan.strategies.comet import comet
from torchweft.plan.strategies.compose import compose
from torchweft.plan.strategies.dual_batch import dual_batch
from torchweft.plan.strategies.multiplex import multiplex
from torchweft.plan.strategies.nanoflow import nanoflow
from torchweft.plan.strategies.overlap import overlap
from torchweft.plan.strategies.pipeline import pipeline
from torchweft.plan.strategies.prefetch import prefetch
from torchweft.plan.strategies.sequential import sequential
from torchweft.plan.strategies.single_batch import single_batch
from torchweft.plan.strategies.tokenweave import tokenweave
from torchweft.plan.strategies.ulysses import ulysses
from torchweft.plan.write.strategy import get_strategy, strategy_names

__all__ = [
    "branches",
    "comet",
    "compose",
    "dual_batch",
    "get_strategy",
    "multiplex",
    "nanoflow",
    "overlap",
    "pipeline",
    "prefetch",
    "sequential",
    "single_batch",
    "strategy_names",
    "tokenweave",
    "ulysses",
]
