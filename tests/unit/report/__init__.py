"""Tests of ray_ulysses.report."""
