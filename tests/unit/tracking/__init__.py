"""Tests of ray_ulysses.tracking."""
