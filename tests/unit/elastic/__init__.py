"""Tests of ray_ulysses.elastic."""
