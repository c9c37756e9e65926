"""A captured graph and rewrites -> the graph that is cut into ops; see `rewriting`."""
