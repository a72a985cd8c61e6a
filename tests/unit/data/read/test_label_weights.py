"""Label weights, from a source's rows to the slices of every rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ulysses.data.corpus import row_groups
from ray_ulysses.data.corpus.corpus import Corpus
from ray_ulysses.data.plan.corpus_set import CorpusSet, open_sources
from ray_ulysses.data.plan.rows import Piece
from ray_ulysses.data.read.digest import add_digests, slice_checksum
from ray_ulysses.data.read.reader import IGNORE_INDEX, slice_row
from ray_ulysses.errors import UserError
from tests.unit.data.corpora import MemoryStore, check_content
from tests.unit.data.tokenize.test_supervision import prepare_rows, reasons_of


def weights_of(corpus: Corpus, document: int) -> list[float] | None:
    found = corpus.label_weights(document, 0, int(corpus.lengths[document]))
    return None if found is None else found.tolist()


def test_documents_have_the_weight_of_their_row_or_1(tmp_path: Path) -> None:
    rows = [{"text": "ab", "w": 2.5}, {"text": "abc"}, {"text": "d", "w": None}, {"text": "efg", "w": 3}]
    corpus = prepare_rows(tmp_path, rows, text_field="text", weight_field="w")
    assert corpus.has_weights
    assert [weights_of(corpus, n) for n in range(4)] == [[2.5] * 3, [1.0] * 4, [1.0] * 2, [3.0] * 4]
    assert corpus.label_weights(3, 2, 3) == [3.0]  # type: ignore[comparison-overlap]
    assert corpus.info.spans is not None and corpus.info.spans.weights == (1.0, 3.0)
    check_content(corpus)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_tokens_may_have_their_own_weights_and_weight_0_removes_a_label(tmp_path: Path, form: str) -> None:
    rows = [
        {"ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "w": [1.0, 0.5, 0.0, 2.0]},
        {"ids": [5, 6], "labels": [5, 6], "w": [1.0, 1.0]},
        {"ids": [7, 8], "labels": [7, 8], "w": [4.0, 4.0]},
    ]
    fields = {"tokens_field": "ids", "labels_field": "labels", "weight_field": "w"}
    corpus = prepare_rows(tmp_path, rows, form=form, **fields)
    # The end token has the weight of the last token.
    assert weights_of(corpus, 0) == [0.0, 0.5, 0.0, 2.0, 2.0]
    assert (weights_of(corpus, 1), weights_of(corpus, 2)) == ([1.0] * 3, [4.0] * 3)
    assert corpus.info.spans is not None and corpus.info.spans.num_supervised == 3 + 3 + 3


def test_rows_with_invalid_weights_are_left_out_with_the_reason(tmp_path: Path) -> None:
    values = [-1, float("nan"), float("inf"), "2", True, 0, 1e7, [1.0], 0.5]
    rows = [{"text": f"text {number}", "w": value} for number, value in enumerate(values)]
    corpus = prepare_rows(tmp_path / "texts", rows, text_field="text", weight_field="w")
    assert corpus.num_documents == 1 and weights_of(corpus, 0) == [0.5] * 7
    reasons = dict(reasons_of(corpus))
    assert sorted(reasons) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "nan" in reasons[2] and "type bool" in reasons[5] and "10000000.0" in reasons[7]
    # Nothing predicts the first token, so a row with the weights 3 and 0 has no label.
    lists = [[1.0], [1.0, "x"], [1.0, -2.0], [3.0, 0.0], [1.0, 3.0]]
    rows = [{"ids": [number, 4], "w": weights} for number, weights in enumerate(lists)]
    corpus = prepare_rows(tmp_path / "tokens", rows, tokens_field="ids", weight_field="w")
    assert [row for row, _ in reasons_of(corpus)] == [1, 2, 3, 4]
    assert weights_of(corpus, 0) == [1.0, 3.0, 3.0]


def test_weights_of_1_give_the_same_corpus_as_no_weights(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("one", "two", "three")]
    plain = prepare_rows(tmp_path / "plain", rows, text_field="text")
    one, two, three = (
        prepare_rows(tmp_path / str(n), [{**row, "w": n} for row in rows], text_field="text", weight_field="w")
        for n in (1, 2, 3)
    )
    assert one.fingerprint == plain.fingerprint
    assert len({plain.fingerprint, two.fingerprint, three.fingerprint}) == 3
    assert one.info.spans is None and not one.has_weights and one.label_weights(0, 0, 2) is None


def test_weights_are_found_over_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_groups, "GROUP_ROWS", 3)
    rows = [{"ids": list(range(n, n + 8)), "w": [float(1 + (n + place) % 5) for place in range(8)]} for n in range(6)]
    corpus = prepare_rows(tmp_path, rows, tokens_field="ids", weight_field="w")
    # The end token follows.
    for number, row in enumerate(rows):
        assert weights_of(corpus, number) == [*row["w"], row["w"][-1]]


def test_a_forged_weight_is_noticed(tmp_path: Path) -> None:
    corpus = prepare_rows(tmp_path, [{"text": "hij", "w": 2}], text_field="text", weight_field="w")
    path = corpus.path / "spans.parquet"
    table = pq.read_table(path)
    forged = table.set_column(3, table.schema.field(3), pa.array(table.column("weight").to_numpy() + 1))
    with pq.ParquetFile(path) as file:
        notes = file.metadata.metadata
    pq.write_table(forged.replace_schema_metadata(notes), path)
    spans = replace(corpus.info.spans, num_bytes=path.stat().st_size)  # type: ignore[type-var]
    (corpus.path / "corpus.json").write_text(json.dumps(replace(corpus.info, spans=spans).to_json()))
    with pytest.raises(UserError, match=r"the spans do not match corpus\.json"):
        _ = Corpus.open(corpus.path).spans
    with pytest.raises(UserError, match="row group 0 has changed"):
        weights_of(Corpus.open(corpus.path), 0)


def pieces_of(lengths: list[int]) -> list[Piece]:
    return [
        Piece(document=number, start=number, length=length, has_next_label=number % 3 == 0)
        for number, length in enumerate(lengths)
    ]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), layout=st.sampled_from([(1, 1), (2, 1), (4, 2)]))
def test_each_label_has_its_weight_at_every_layout(lengths: list[int], layout: tuple[int, int]) -> None:
    store = MemoryStore([length + 20 for length in lengths], has_weights=True)
    row_tokens = -(-sum(lengths) // 16) * 16
    sp_size, ring_size = layout
    whole = slice_row(store, 3, row_tokens, pieces_of(lengths), 0, 1)
    assert whole.label_weights is not None
    for label, weight in zip(whole.labels.tolist(), whole.label_weights.tolist(), strict=True):
        document, at = divmod(label, 100_000)
        is_weighted = label != IGNORE_INDEX and document % 2
        assert weight == (document + at if is_weighted else 1.0)
    slices = [slice_row(store, 3, row_tokens, pieces_of(lengths), n, sp_size, ring_size) for n in range(sp_size)]
    for part in slices:
        expected = np.concatenate([whole.label_weights[start:stop] for start, stop in part.ranges])
        assert part.label_weights is not None and np.array_equal(part.label_weights, expected)
    assert add_digests(*map(slice_checksum, slices)) == slice_checksum(whole)
    assert sum(part.supervised_weight for part in slices) == pytest.approx(whole.supervised_weight)


def test_weights_change_the_digest_except_weights_of_1() -> None:
    weighted, plain = (
        slice_row(MemoryStore([40, 40], has_weights=has_weights), 3, 48, pieces_of([20, 21]), 0, 1)
        for has_weights in (True, False)
    )
    assert weighted.label_weights is not None and plain.label_weights is None
    ones = replace(plain, label_weights=np.ones(48, dtype=np.float32))
    moved = replace(weighted, label_weights=np.roll(weighted.label_weights, 1))
    assert slice_checksum(ones) == slice_checksum(plain)
    assert len({slice_checksum(one) for one in (weighted, plain, moved)}) == 3


def test_all_slices_of_a_run_have_weights_if_one_of_its_corpora_has(tmp_path: Path) -> None:
    plain = prepare_rows(tmp_path / "plain", [{"text": "abcdefg"}], text_field="text")
    weighted = prepare_rows(tmp_path / "weighted", [{"text": "hij", "w": 2}], text_field="text", weight_field="w")
    both = open_sources([(str(plain.path), None), (str(weighted.path), None)])
    alone = open_sources([(str(plain.path), None)])
    assert both.has_weights and not alone.has_weights
    # The plan records the weights, so no corpus is opened.
    assert CorpusSet(both.sources).has_weights
    of_plain = [Piece(document=0, start=0, length=8, has_next_label=False)]
    assert slice_row(both, 0, 8, of_plain, 0, 1).label_weights.tolist() == [1.0] * 8  # type: ignore[union-attr]
    assert slice_row(alone, 0, 8, of_plain, 0, 1).label_weights is None
    of_weighted = [Piece(document=1, start=0, length=4, has_next_label=False)]
    assert slice_row(both, 0, 4, of_weighted, 0, 1).label_weights.tolist() == [2.0] * 3 + [1.0]  # type: ignore[union-attr]
