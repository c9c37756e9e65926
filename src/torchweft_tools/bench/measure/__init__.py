"""How benches measure: pairs and their ratios, allocations, kernels, progress."""
