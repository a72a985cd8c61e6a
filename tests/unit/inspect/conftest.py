from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import Run, make_run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_corpus(tmp_path_factory.mktemp("inspect"), varied_texts(60)).path


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Run:
    return make_run(tmp_path / "demo", [corpus])


@pytest.fixture(scope="session")
def more(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second corpus, for the branch of a run."""
    return text_corpus(tmp_path_factory.mktemp("more") / "more", varied_texts(20, seed=5)).path
