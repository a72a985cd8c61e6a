"""Benchmarks that need a CUDA GPU."""
