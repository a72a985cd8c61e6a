from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import Run, make_run


@pytest.fixture
def report_run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "planned", [text_corpus(tmp_path / "texts", varied_texts(60)).path])
