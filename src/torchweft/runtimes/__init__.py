"""Runtimes: each carries out a plan with the one meaning of `docs/plans.md` and leaves a trace."""
