"""Run state and preparation: everything that commands need for a run, except for the training itself."""
