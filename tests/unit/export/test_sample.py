"""What an export is tried with."""

from __future__ import annotations

from pathlib import Path

from ray_ulysses.export.sample import take_sample


def test_a_run_without_a_plan_is_tried_with_seeded_tokens_of_its_vocabulary(tmp_path: Path) -> None:
    sample = take_sample(tmp_path, 50, None)
    assert sample == take_sample(tmp_path, 50, None)
    assert sample.origin == "seeded tokens, since the run has no data plan, or too few documents"
    assert [len(document) for document in sample.documents] == [256, 256]
    assert sample.documents[0] != sample.documents[1]
    assert {token for document in sample.documents for token in document} == set(range(50))


def test_documents_are_no_longer_than_the_model_can_take(tmp_path: Path) -> None:
    assert [len(document) for document in take_sample(tmp_path, 50, 64).documents] == [64, 64]
