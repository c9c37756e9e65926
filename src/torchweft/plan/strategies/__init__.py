"""The built-in strategies, one page each. Importing this package registers them."""

from torchweft.plan.strategies.branches import branches
from torchweft.plan.strategies.compose import compose
from torchweft.plan.strategies.overlap import overlap
from torchweft.plan.strategies.sequential import sequential
from torchweft.plan.write.strategy import get_strategy, strategy_names

__all__ = ["branches", "compose", "get_strategy", "overlap", "sequential", "strategy_names"]
