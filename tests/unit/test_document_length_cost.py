"""The flat peer of the direct reader gives the same rows, and the page says whether the goal is met."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.document_length_cost import FlatStore, markdown, random_corpus, row_cost
from benchmarks.length_peers import hugging_face, megatron, row_seconds, store
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.segment import PlanSettings
from tests.unit.data.plans import build_plan


def test_a_flat_file_of_other_tokens_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = random_corpus(tmp_path / "sources", 1_000, 100_000)
    settings = PlanSettings(seed=0, context_tokens=16_384, pad_multiple=256, rows_per_step=2)
    plan = build_plan(corpus.lengths, corpus.fingerprint, settings)
    cost = row_cost(corpus, plan, tmp_path / "flat.bin", num_rows=2, rounds=2)
    assert {name: len(seconds) for name, seconds in cost.items()} == {"first": 2, "direct": 2, "flat": 2}
    assert (tmp_path / "flat.bin").stat().st_size == corpus.info.num_tokens * np.dtype(corpus.info.dtype).itemsize

    flat = FlatStore(corpus, tmp_path / "again.bin")
    last = corpus.num_documents - 1
    assert np.array_equal(flat.read(last, 3, 40), corpus.read(last, 3, 40))

    read = Corpus.read
    monkeypatch.setattr(FlatStore, "read", lambda _, document, start, length: read(corpus, document, start, length) + 1)
    with pytest.raises(AssertionError):
        row_cost(corpus, plan, tmp_path / "other.bin", num_rows=1, rounds=1)


def test_the_page_of_lengths_says_which_ratios_are_met() -> None:
    costs = {
        "100": {"first": [0.5, 0.4], "direct": [0.01, 0.01], "flat": [0.01, 0.01], "peers": {"datasets": [0.5]}},
        "20000": {"first": [0.003], "direct": [0.002], "flat": [0.002], "peers": {}},
    }
    record = {"date": "a day", "commit": "abc", "hardware": "a machine", "versions": {}, "command": "c"}
    page = markdown({**record, "lengths": costs})
    ten = "10.0 (10.0 to 10.0) ms"
    ratios = "45.0 (40.0 to 50.0) | 1.0 (1.0 to 1.0) | **not met**"
    assert f"| 100 | 450.0 (400.0 to 500.0) ms | {ten} | {ten} | {ratios} |" in page
    two = "2.0 (2.0 to 2.0) ms"
    assert f"| 20,000 | 3.0 (3.0 to 3.0) ms | {two} | {two} | 1.5 (1.5 to 1.5) | 1.0 (1.0 to 1.0) | met |" in page
    unknown = "not yet measured"
    assert f"| 100 | {ten} | 500.0 (500.0 to 500.0) ms | {unknown} | {unknown} |" in page


def test_the_readers_of_others_give_the_documents_that_were_stored(tmp_path: Path) -> None:
    tokens = [np.arange(n, n + 40_000 + n, dtype=np.int64) for n in range(9)]
    store(tmp_path / "peers", tokens, num_rows=2)
    for make in (hugging_face, megatron):
        read = make(tmp_path / "peers")
        assert all(np.array_equal(read(number), one) for number, one in enumerate(tokens))
        assert len(row_seconds(tmp_path / "peers", read, 2)) == 2
