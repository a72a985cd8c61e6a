"""Fixtures of the tests that start Ray."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.heads import TOKEN, running_head
from tests.cluster.planted_secrets import NAMES


@pytest.fixture
def ray_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where each Ray of the test keeps its sessions; short, for a Unix socket's path has at most 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    for name in (*NAMES, "RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def head() -> Iterator[str]:
    """The address of the dashboard of ``ray start --head``, which asks for `TOKEN`."""
    with running_head(TOKEN) as address:
        yield address


@pytest.fixture(scope="module")
def open_head() -> Iterator[str]:
    """The address of one that takes jobs from anyone."""
    with running_head(None) as address:
        yield address
