"""Benchmarks: each runs its peer beside it."""
