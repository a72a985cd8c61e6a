"""Tests of ray_ulysses.checkpoint."""
