"""Inspects what a run trained on: single rows, the history of its plan, its checkpoints, and the proof of law 3."""
