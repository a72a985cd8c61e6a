"""Runs attempts in child processes, and forms the next generation of them when one fails, without a restart by Ray."""
