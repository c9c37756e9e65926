"""Training of policies: drawn problems, the loop, its checkpoint, and a game for other agents."""
