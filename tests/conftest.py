"""Fixtures for every test."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

from tests.result_table import ResultTable

# Set before torch is imported. Several processes share the cores, and threads that wait for one another cost more
# than they bring: with two, the torch tests take twice the CPU time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long one example takes says how busy the machine is, and nothing of the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture
def result_table() -> ResultTable:
    """An empty table of results."""
    return ResultTable()
