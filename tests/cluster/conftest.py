"""Fixtures of the tests that start Ray."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.planted_secrets import NAMES


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where each Ray of the test keeps its sessions; short, for a Unix socket's path has at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    for name in (*NAMES, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
