"""The built-in strategies, one page each. Importing this package registers them."""

from torchweft.strategies.branches import branches
from torchweft.strategies.overlap import overlap
from torchweft.strategies.sequential import sequential
from torchweft.strategy import get_strategy, strategy_names

__all__ = ["branches", "get_strategy", "overlap", "sequential", "strategy_names"]
