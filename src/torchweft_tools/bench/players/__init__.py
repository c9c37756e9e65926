"""The races of a bench, and the processes that it starts."""
