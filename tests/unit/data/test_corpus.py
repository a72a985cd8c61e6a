from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ray_ulysses.data import format as corpus_format
from ray_ulysses.data.corpus import Corpus
from ray_ulysses.data.format import CHUNK_TOKENS, token_dtype
from ray_ulysses.data.shard import ShardReader, ShardWriter
from ray_ulysses.errors import UserError
from tests.unit.data.corpora import text_corpus, varied_texts


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return text_corpus(tmp_path, varied_texts(30), unit_bytes=2000)


def test_any_stretch_of_any_document_is_read_across_chunks_and_row_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = [1, 7, 8, 9, 40, 3, 16, 17, 100, 5]
    documents = [rng.integers(0, 60_000, length) for length in lengths]
    writer = ShardWriter(tmp_path / "s.parquet", np.dtype(np.uint16), chunk_tokens=8)
    first_rows = [writer.add(document) for document in documents]
    writer.close()
    reader = ShardReader(tmp_path, max_open=1, chunk_tokens=8)
    for document, first_row in zip(documents, first_rows, strict=True):
        for start in range(document.size + 1):
            for length in {0, 1, document.size - start, (document.size - start) // 2}:
                if 0 <= length <= document.size - start:
                    found = reader.read("s.parquet", first_row, start, length)
                    assert found.tolist() == document[start : start + length].tolist()
    metadata = pq.read_metadata(tmp_path / "s.parquet")
    assert metadata.num_row_groups > 10


def test_row_groups_hold_about_64k_tokens(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s.parquet", np.dtype(np.uint16))
    for length in (200_000, 30_000, 30_000, 30_000, 5):
        writer.add(np.arange(length) % 60_000)
    writer.close()
    shard = pq.ParquetFile(tmp_path / "s.parquet")
    sizes = [
        sum(len(tokens) for tokens in shard.read_row_group(group).column("tokens"))
        for group in range(shard.metadata.num_row_groups)
    ]
    assert sizes == [CHUNK_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS, 200_000 - 3 * CHUNK_TOKENS + 2 * 30_000, 30_005]


@pytest.mark.parametrize(
    ("vocab_size", "name"), [(256, "uint8"), (257, "uint16"), (65_536, "uint16"), (65_537, "uint32")]
)
def test_the_smallest_type_that_holds_the_vocabulary_is_used(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size).name == name


def test_a_corpus_opens_with_what_the_plan_needs(corpus: Corpus) -> None:
    again = Corpus.open(str(corpus.path))
    assert again.lengths.dtype == np.int64 and not again.lengths.flags.writeable
    assert again.fingerprint == corpus.fingerprint
    assert again.tokenizer.vocab_size == 257
    again.check_files(checksums=True)


def test_a_missing_directory_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.path=.*nowhere: does not exist; make it with `ray-ulysses prepare`"):
        Corpus.open(tmp_path / "nowhere")


def test_a_directory_that_is_no_corpus_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a prepared corpus \(no corpus.json\)"):
        Corpus.open(tmp_path)


def test_a_corpus_of_another_format_is_refused(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    path = corpus.path / "corpus.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "format_version": 7}))
    with pytest.raises(UserError, match=r"the corpus has format 7, this version reads 1"):
        Corpus.open(corpus.path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format_version": 1}'])
def test_a_broken_corpus_json_is_named(corpus: Corpus, text: str) -> None:
    (corpus.path / "corpus.json").write_text(text)
    with pytest.raises(UserError, match=r"corpus\.json can't be used"):
        Corpus.open(corpus.path)


def test_an_edited_corpus_json_is_refused(corpus: Corpus) -> None:
    path = corpus.path / "corpus.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "num_documents": fields["num_documents"] - 1}))
    with pytest.raises(UserError, match=r"its fields do not give its fingerprint"):
        Corpus.open(corpus.path)


def test_an_empty_corpus_is_refused(corpus: Corpus) -> None:
    pq.write_table(corpus_format.DOCUMENT_SCHEMA.empty_table(), corpus.path / "documents.parquet")
    size = (corpus.path / "documents.parquet").stat().st_size
    path = corpus.path / "corpus.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "documents_bytes": size}))
    with pytest.raises(UserError, match=r"the corpus is empty"):
        Corpus.open(corpus.path)


def test_a_missing_or_cut_sidecar_is_named(corpus: Corpus) -> None:
    path = corpus.path / "documents.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(\d+ bytes where prepare wrote \d+\)"):
        Corpus.open(corpus.path)
    path.write_bytes(b"\0" * len(data))
    with pytest.raises(UserError, match=r"documents\.parquet can't be used"):
        Corpus.open(corpus.path)
    path.unlink()
    with pytest.raises(UserError, match=r"documents\.parquet can't be used \(No such file or directory\)"):
        Corpus.open(corpus.path)


def test_a_truncated_shard_is_named_by_the_check_and_by_the_read(corpus: Corpus) -> None:
    path = corpus.path / "shards" / corpus.info.shards[1].name
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"shard-00001\.parquet can't be used \(\d+ bytes where prepare wrote"):
        corpus.check_files()
    document = corpus.info.shards[0].num_documents
    with pytest.raises(UserError, match=r"the shard .*shard-00001\.parquet can't be read .*; restore the file"):
        corpus.read(document, 0, 2)


def test_a_missing_shard_is_named(corpus: Corpus) -> None:
    (corpus.path / "shards" / "shard-00000.parquet").unlink()
    with pytest.raises(UserError, match=r"shard-00000\.parquet can't be used \(No such file or directory\)"):
        corpus.check_files()


def test_a_shard_with_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    corpus = text_corpus(tmp_path, varied_texts(3, longest=3000))
    path = corpus.path / "shards" / "shard-00000.parquet"
    clean = path.read_bytes()
    expected = [corpus.read(document, 0, int(corpus.lengths[document])) for document in range(3)]
    noticed = 0
    for at in range(40, len(clean) // 2, 97):
        damaged = bytearray(clean)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"its checksum differs from the one prepare wrote"):
            corpus.check_files(checksums=True)
        fresh = Corpus.open(corpus.path)
        for document in range(3):
            try:
                found = fresh.read(document, 0, int(corpus.lengths[document]))
            except UserError as error:
                noticed += "shard-00000.parquet can't be read" in str(error)
            else:
                assert np.array_equal(found, expected[document]), f"byte {at}"
    assert noticed > 5


def test_a_shard_of_another_corpus_is_named(tmp_path: Path, corpus: Corpus) -> None:
    other = text_corpus(tmp_path / "other", varied_texts(31, seed=5), unit_bytes=2000)
    theirs = (other.path / "shards" / "shard-00000.parquet").read_bytes()
    (corpus.path / "shards" / "shard-00000.parquet").write_bytes(theirs)
    with pytest.raises(UserError, match=r"shard-00000\.parquet"):
        corpus.check_files(checksums=True)
