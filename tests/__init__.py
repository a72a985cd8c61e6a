"""Tests of ray-ulysses; the unit tests mirror the package."""
