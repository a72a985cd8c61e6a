"""Tests of ray_ulysses.migration."""
