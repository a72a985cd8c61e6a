"""Reads the rows of a step for each rank, and computes the digest of what the model received."""
