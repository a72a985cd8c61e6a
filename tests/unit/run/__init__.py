"""Tests of ray_ulysses.trainer."""
