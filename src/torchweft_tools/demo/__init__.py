"""The demo: planned and simulated, run in one process, raced over a link."""
