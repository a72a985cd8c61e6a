"""Run state and preparation: everything that commands need to know about a run except for training itself."""
