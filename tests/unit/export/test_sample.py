"""What an export is tried with."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_ulysses.export.check import take_sample
from tests.unit.data.corpora import text_corpus, varied_texts
from tests.unit.inspect.runs import make_run


def test_a_run_without_a_plan_is_tried_with_seeded_tokens_of_its_vocabulary(tmp_path: Path) -> None:
    sample = take_sample(tmp_path, 50, None)
    assert sample == take_sample(tmp_path, 50, None)
    assert sample.origin == "seeded tokens, since the run has no data plan, or too few documents"
    assert [len(document) for document in sample.documents] == [256, 256]
    assert sample.documents[0] != sample.documents[1]
    assert {token for document in sample.documents for token in document} == set(range(50))


def test_documents_are_no_longer_than_the_model_can_take(tmp_path: Path) -> None:
    assert [len(document) for document in take_sample(tmp_path, 50, 64).documents] == [64, 64]


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """Return a run whose plan and corpus are there."""
    corpus = text_corpus(tmp_path / "data", varied_texts(20))
    return make_run(tmp_path / "run", [corpus.path]).folder


def test_a_run_is_tried_with_the_first_documents_that_it_trained_on(planned: Path) -> None:
    sample = take_sample(planned, 264, 16)
    assert sample.origin == "the run's first training rows"
    assert [len(document) for document in sample.documents] == [16, 16]


@pytest.mark.parametrize("file", ["plan.json", "rows.parquet", "pieces.parquet"])
def test_a_torn_plan_is_said_and_seeded_tokens_are_taken(planned: Path, file: str) -> None:
    path = planned / "plan/segment-0000" / file
    path.write_bytes(path.read_bytes()[:40])
    sample = take_sample(planned, 264, None)
    assert sample.origin.startswith(
        f"seeded tokens, since the run's data plan can't be read ({path}: the plan can't be"
    )
    assert "new run" not in sample.origin


def test_rows_that_are_damaged_in_the_middle_of_their_file_are_said_too(planned: Path) -> None:
    path = planned / "plan/segment-0000/pieces.parquet"
    content = bytearray(path.read_bytes())
    # The footer stays whole, so that the plan opens.
    content[4:60] = bytes(56)
    path.write_bytes(content)
    assert take_sample(planned, 264, None).origin.startswith("seeded tokens, since the run's data plan can't be read (")


def test_a_corpus_that_is_gone_or_may_not_be_read_is_said(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    import ray_ulysses.data.plan.corpus_set as module

    with monkeypatch.context() as patch:
        patch.setattr(module.Corpus, "open", refuse)
        assert "the run's corpus can't be read ([Errno 13] Permission" in take_sample(planned, 264, None).origin
    (tmp_path / "data").rename(tmp_path / "away")
    assert "the run's corpus can't be read (data.path=" in take_sample(planned, 264, None).origin
