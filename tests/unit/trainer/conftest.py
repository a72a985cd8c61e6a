"""What tests of the training loop share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What the package logs."""
    monkeypatch.setattr(logging.getLogger("ray_ulysses"), "propagate", True)
    return caplog
