"""Fixtures for every test."""

from __future__ import annotations

import pytest

from tests.result_table import ResultTable


@pytest.fixture
def result_table() -> ResultTable:
    """An empty table of results."""
    return ResultTable()
