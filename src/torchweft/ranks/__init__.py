"""Ranks: what is said to other processes, agreed before it starts and bounded in time."""
