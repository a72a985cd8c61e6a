"""Fixtures of the tests that start Ray."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.planted_secrets import NAMES
from tests.distributed.run_case import make_corpus


@pytest.fixture(scope="session", autouse=True)
def equal_priority() -> Iterator[None]:
    """Start Ray's workers with normal priority, because with Ray's default they starve beside other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of the standard library as bytes, which no test changes."""
    return make_corpus(tmp_path_factory.mktemp("data"))


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
