"""Ops: calls that are cut together become regions, regions become ops of a `Graph`."""
