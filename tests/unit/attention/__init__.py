"""Tests of ray_ulysses.attention."""
