"""What Weft uses of PyTorch that is not public: the only files to change for a new release."""
