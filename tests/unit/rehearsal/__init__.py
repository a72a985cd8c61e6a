"""Tests of ray_ulysses.rehearsal."""
