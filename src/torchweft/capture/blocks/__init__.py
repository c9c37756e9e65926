"""Blocks: repeated modules, traced once."""
