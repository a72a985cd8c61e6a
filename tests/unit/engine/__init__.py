"""Tests of ray_ulysses.engine."""
