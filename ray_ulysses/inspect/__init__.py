"""Inspects a run's rows, plan history and checkpoints, and verifies that each planned row was trained once (law 3)."""
