"""Tests of ray_ulysses.parallel."""
