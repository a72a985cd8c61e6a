"""Reads each rank's rows for a step, and computes a digest of the model's inputs."""
