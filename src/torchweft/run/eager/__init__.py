"""Boundary mode: an eager model runs once a part, and a plan decides who goes on."""
