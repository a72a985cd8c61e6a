"""What the parts of a run cost at 8 to 1,024 workers: the real parts beside simulated ones."""
