"""Fixtures for every test."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.result_table import ResultTable

# How long one example takes says how busy the machine is, and nothing of the code.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture
def result_table() -> ResultTable:
    """An empty table of results."""
    return ResultTable()
