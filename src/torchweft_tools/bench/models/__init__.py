"""Models that benches run."""
