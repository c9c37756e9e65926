"""Writing: a strategy records a bare plan through a scheduler. Nothing runs while it writes."""
