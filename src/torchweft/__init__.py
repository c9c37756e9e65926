"""Weft: what a PyTorch model computes, apart from how and when its operators run."""
