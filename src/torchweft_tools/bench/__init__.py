"""Benches: how good Weft's own parts are, measured against something simpler than they are.

`oracle` judges plans by brute force, `random_plans` makes plans to judge, `verify` compares.
"""
