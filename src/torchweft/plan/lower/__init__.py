"""Lowering: a bare plan becomes one that can run."""
