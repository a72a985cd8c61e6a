"""Every configuration that is shipped can be planned, without a network or a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.config import load_config
from ray_ulysses.trainer.preflight import prepare_run
from tests.unit.data.corpora import text_corpus, varied_texts

_CONFIGS = tuple(sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")))


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("corpus")
    # Long enough that every context has several full rows, in a hundred documents, so that some are held out.
    text_corpus(directory, [text * 200 for text in varied_texts(100, longest=400)])
    return directory / "corpus"


@pytest.mark.parametrize("path", _CONFIGS, ids=[path.stem for path in _CONFIGS])
def test_a_shipped_configuration_is_planned_without_problems(path: Path, corpus_dir: Path, tmp_path: Path) -> None:
    overrides = (f"data.path={corpus_dir}", f"run.storage={tmp_path}")
    prepared = prepare_run(load_config(path, overrides), tmp_path)
    assert prepared.report.problems == ()
    assert prepared.plan.num_steps >= 1
    assert list(tmp_path.iterdir()) == []
