from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.run_case import make_corpus


@pytest.fixture(autouse=True)
def architectures(probed_once: None) -> None:
    """Probe each architecture once."""


@pytest.fixture(scope="session")
def small_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("small"), ("bisect.py", "cmd.py"))


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of eight files of the standard library."""
    return make_corpus(tmp_path_factory.mktemp("stdlib"))
