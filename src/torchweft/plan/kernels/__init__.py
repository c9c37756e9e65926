"""Kernels of users: what they declare, and how that fits the ops in whose place they stand."""
