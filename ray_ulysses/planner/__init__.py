"""Predicts the memory, cost and problems of a run before any worker starts, from its configuration and data plan."""
