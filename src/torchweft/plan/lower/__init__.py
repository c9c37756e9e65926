"""Lowering: a bare plan becomes one that can run."""

from torchweft.plan.lower.lower import lower

__all__ = ["lower"]
