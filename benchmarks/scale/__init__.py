"""What the parts of a run cost at 8 to 1,024 workers: real components against simulated workers and nodes."""
