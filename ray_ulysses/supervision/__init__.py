"""Runs attempts in child processes, and forms the next generation after a failure without restarting Ray's workers."""
