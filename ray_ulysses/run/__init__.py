"""What a command knows of a run without training it: its settings, directory, start, checkpoints and requests."""
