"""The aten level: the forward and backward graphs of AOTAutograd."""
