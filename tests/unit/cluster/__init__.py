"""Tests of ray_ulysses.cluster that need no Ray cluster."""
