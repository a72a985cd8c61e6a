"""Tests of ray_ulysses.storage."""
