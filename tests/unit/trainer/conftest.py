"""A clock and the log, shared by the trainer's tests."""

from __future__ import annotations

import logging

import pytest

from ray_ulysses.clock import SystemClock


class HandClock(SystemClock):
    """A clock that moves only on request."""

    def __init__(self, time: float = 0.0) -> None:
        self.time = time
        self.waits: list[float] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.time += seconds


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The package's log."""
    monkeypatch.setattr(logging.getLogger("ray_ulysses"), "propagate", True)
    return caplog
