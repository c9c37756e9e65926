"""Rows: what a split of the batch does to every call of a graph."""
